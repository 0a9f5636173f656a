"""Runs all model work on one thread, and lets a visitor cancel a waiting or running job.

Visitors are session ids; independent of what runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Lock
from typing import TypeVar

T = TypeVar("T")
MODEL = "model"  # Gradio's concurrency id of every event that computes
REFUSED = 0  # the ticket of a run that found the queue full
_VISITORS = 512
_thread = ThreadPoolExecutor(1, thread_name_prefix=MODEL)
_END = object()


def on_model_thread(work: Callable[[], T]) -> T:
    """The result of `work`, computed on the one thread for models. Each computing thread has its own OpenMP workers;
    with more workers than cores, OpenMP suspends them after every product, which halves the speed."""
    return _thread.submit(copy_context().run, work).result()


def soon_on_model_thread(work: Callable[[], object]) -> None:
    """Let the thread for models do `work` when it has nothing else to do. Its errors are those of the next to ask."""
    _thread.submit(copy_context().run, work)


def steps_on_model_thread(work: Generator[T]) -> Generator[T]:
    """The items of a generator, each computed on the model thread; the generator is closed there too."""
    try:
        while (item := on_model_thread(lambda: next(work, _END))) is not _END:
            yield item  # type: ignore[misc]
    finally:
        on_model_thread(work.close)


class RunQueue:
    """Tickets of runs. Each visitor has one current ticket: the last one taken, until it is cancelled.

    `waiting` says how many runs wait, of at most `limit`."""

    def __init__(self, limit: int = 1, waiting: Callable[[], int] = lambda: 0) -> None:
        self.limit, self.waiting = limit, waiting
        self._lock = Lock()
        self._last: OrderedDict[str, int] = OrderedDict()
        self._count = REFUSED

    def take(self, visitor: str) -> int:
        with self._lock:
            self._count += 1
            self._last[visitor] = self._count
            self._last.move_to_end(visitor)
            if len(self._last) > _VISITORS:  # those that left without a word
                self._last.popitem(last=False)
            return self._count

    def cancel(self, visitor: str) -> bool:
        """Invalidate the visitor's ticket, which ends the run; returns whether there was one."""
        with self._lock:
            return self._last.pop(visitor, None) is not None

    def is_current(self, visitor: str, ticket: int) -> bool:
        with self._lock:
            return self._last.get(visitor) == ticket
