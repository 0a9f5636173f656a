"""Gradio, imported in half its time.

Whenever it is imported, Gradio reads the source of each of its components again, to write a stub for editors beside it.
A page needs none. Where Gradio no longer does so, this is an ordinary import.
"""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock


def import_gradio() -> None:
    """Import it without stubs: of a class without a file, Gradio writes none."""
    file_of = inspect.getfile

    def no_component(found: Any) -> str:
        if type(found).__name__ == "ComponentMeta":
            raise OSError("its stub is not wanted")
        return file_of(found)

    with mock.patch("inspect.getfile", no_component):
        import gradio  # noqa: F401
