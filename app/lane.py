"""The model's one lane, and who may leave it: tickets that a visitor can give back while a run waits or works.

Knows visitors by the names their sessions have; nothing of what runs.
"""

from __future__ import annotations

from threading import Lock

LANE = "model"  # of everything that computes, as the queue knows it


class Tickets:
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
