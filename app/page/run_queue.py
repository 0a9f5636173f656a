"""The model's one lane, the thread it leads through, and who may leave it: tickets that a visitor can give back while a
run waits or works.

Knows visitors by the names their sessions have; nothing of what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Lock
from typing import TypeVar

T = TypeVar("T")
LANE = "model"  # of everything that computes, as the queue knows it
_thread = ThreadPoolExecutor(1, thread_name_prefix=LANE)
_END = object()


def laned(work: Callable[[], T]) -> T:
    """What this finds, in the one thread that computes. Every thread that does so has helpers of its own, and where all
    of them are more than there are cores, OpenMP puts them to sleep after each product: twice as slow."""
    return _thread.submit(copy_context().run, work).result()


def stepped(work: Generator[T]) -> Generator[T]:
    """The same steps, each of them taken there."""
    try:
        while (found := laned(lambda: next(work, _END))) is not _END:
            yield found  # type: ignore[misc]
    finally:
        laned(work.close)


class RunQueue:
    """One for each visitor; the last that was taken counts."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last: dict[str, int] = {}
        self._count = 0

    def take(self, visitor: str) -> int:
        with self._lock:
            self._count += 1
            self._last[visitor] = self._count
            return self._count

    def give_back(self, visitor: str) -> bool:
        """What the visitor has running or waiting is to end. Was there anything?"""
        with self._lock:
            return self._last.pop(visitor, None) is not None

    def valid(self, visitor: str, ticket: int) -> bool:
        with self._lock:
            return self._last.get(visitor) == ticket
