"""How the page opens soon: Gradio without what it does for editors, and no search for garbage while all is made.

Whenever it is imported, Gradio reads the source of each of its components again, to write a stub for editors beside it,
and puts the component's name into the description of each of its events, two hundred templates made for one use each.
A page needs neither. And three times while a page is put together it makes an application that would serve it, though
only the one made when the page is opened ever does. Where Gradio no longer does so, all this changes nothing. Torch's
machine code is loaded beside Gradio's import: Python would do nothing else meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock


@contextmanager
def soon() -> Iterator[None]:
    """Within, Gradio is imported, and nothing is looked for that could be thrown away: there is nothing."""
    gc.disable()
    try:
        Thread(target=_load_torch, daemon=True).start()
        _import_gradio()
        yield
    finally:
        gc.freeze()  # what is there stays
        gc.enable()


def _load_torch() -> None:
    """On Linux. `dlopen` is called as any other function, as ctypes' own way of opening libraries lets nobody go on."""
    found = find_spec("torch")
    if found is not None and found.origin is not None:
        code = Path(found.origin).parent / "lib" / "libtorch_cpu.so"
        with suppress(AttributeError, OSError):
            if code.is_file():
                ctypes.CDLL(None).dlopen(os.fsencode(code), os.RTLD_NOW)


@contextmanager
def put_together() -> Iterator[None]:
    """Within, a page is made and not yet served."""
    with mock.patch("gradio.routes.App.create_app", staticmethod(lambda *_, **__: None)):
        yield


def _import_gradio() -> None:
    """Without stubs: of a class without a file, Gradio writes none. Descriptions keep the blank for the name."""
    file_of = inspect.getfile

    def no_component(found: Any) -> str:
        if type(found).__name__ == "ComponentMeta":
            raise OSError("its stub is not wanted")
        return file_of(found)

    with mock.patch("inspect.getfile", no_component), mock.patch("jinja2.Template", _AsItIs):
        import gradio  # noqa: F401


class _AsItIs:
    """A template that nobody fills in."""

    def __init__(self, words: str) -> None:
        self.words = words

    def render(self, **_: str) -> str:
        return self.words
