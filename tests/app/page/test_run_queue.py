"""Everything that computes does so in one thread, whoever asks for it and however often; and a visitor's last ticket is
the one that counts."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextvars import ContextVar

import pytest

from outrider.app.page.run_queue import RunQueue, laned, stepped


def test_steps_are_taken_in_one_thread_whoever_asks() -> None:
    def work() -> Generator[str]:
        while True:
            yield threading.current_thread().name

    steps, seen = stepped(work()), []
    for _ in range(3):
        asking = threading.Thread(target=lambda: seen.append(next(steps)))
        asking.start()
        asking.join()
    assert len({*seen, laned(lambda: threading.current_thread().name)}) == 1
    assert seen[0] != threading.current_thread().name


def test_what_is_left_is_closed_and_what_fails_is_told() -> None:
    closed: list[str] = []

    def work() -> Generator[int]:
        try:
            yield 1
            raise ValueError("two")
        finally:
            closed.append(threading.current_thread().name)

    steps = stepped(work())
    assert next(steps) == 1
    steps.close()
    assert len(closed) == 1 and closed[0] != threading.current_thread().name
    with pytest.raises(ValueError, match="two"):
        list(stepped(work()))
    assert len(closed) == 2


def test_it_knows_who_asks() -> None:
    asking = ContextVar("asking", default="nobody")
    asking.set("a visitor")
    assert laned(asking.get) == "a visitor"


def test_tickets_are_of_one_visitor_each() -> None:
    tickets = RunQueue()
    one, two = tickets.take("a"), tickets.take("b")
    assert tickets.valid("a", one) and tickets.valid("b", two) and not tickets.valid("a", two)
    assert tickets.give_back("a") and not tickets.give_back("a")
    assert not tickets.valid("a", one) and tickets.valid("b", two)
    assert tickets.valid("b", two) and not tickets.valid("b", tickets.take("c"))
