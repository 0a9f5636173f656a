"""How the page opens soon: Gradio without what it does for editors, and no search for garbage while all is made.

Whenever it is imported, Gradio reads the source of each of its components again, to write a stub for editors beside it.
A page needs none. Where Gradio no longer does so, this is an ordinary import.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def soon() -> Iterator[None]:
    """Within, Gradio is imported, and nothing is looked for that could be thrown away: there is nothing."""
    gc.disable()
    try:
        _import_gradio()
        yield
    finally:
        gc.freeze()  # what is there stays
        gc.enable()


def _import_gradio() -> None:
    """Without stubs: of a class without a file, Gradio writes none."""
    file_of = inspect.getfile

    def no_component(found: Any) -> str:
        if type(found).__name__ == "ComponentMeta":
            raise OSError("its stub is not wanted")
        return file_of(found)

    with mock.patch("inspect.getfile", no_component):
        import gradio  # noqa: F401
