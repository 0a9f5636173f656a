"""Runs all model work on one thread, and lets a visitor cancel a waiting or running job.

Visitors are session ids; independent of what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Lock
from typing import TypeVar

T = TypeVar("T")
MODEL = "model"  # Gradio's concurrency id of every event that computes
_thread = ThreadPoolExecutor(1, thread_name_prefix=MODEL)
_END = object()


def on_model_thread(work: Callable[[], T]) -> T:
    """The result of `work`, computed on the one thread for models. Each computing thread has its own OpenMP workers;
    with more workers than cores, OpenMP suspends them after every product, which halves the speed."""
    return _thread.submit(copy_context().run, work).result()


def steps_on_model_thread(work: Generator[T]) -> Generator[T]:
    """The items of a generator, each computed on the model thread; the generator is closed there too."""
    try:
        while (item := on_model_thread(lambda: next(work, _END))) is not _END:
            yield item  # type: ignore[misc]
    finally:
        on_model_thread(work.close)


class RunQueue:
    """Tickets of runs. Each visitor has one current ticket: the last one taken, until it is cancelled."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last: dict[str, int] = {}
        self._count = 0

    def take(self, visitor: str) -> int:
        with self._lock:
            self._count += 1
            self._last[visitor] = self._count
            return self._count

    def cancel(self, visitor: str) -> bool:
        """Invalidate the visitor's ticket, which ends the run; returns whether there was one."""
        with self._lock:
            return self._last.pop(visitor, None) is not None

    def is_current(self, visitor: str, ticket: int) -> bool:
        with self._lock:
            return self._last.get(visitor) == ticket
