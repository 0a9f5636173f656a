"""The run queue: all work runs on one thread, and only a visitor's last ticket is current."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextvars import ContextVar

import pytest

from outrider.app.page.run_queue import REFUSED, RunQueue, on_model_thread, steps_on_model_thread
from outrider.app.page.runner import enter


def test_steps_run_on_one_thread() -> None:
    def work() -> Generator[str]:
        while True:
            yield threading.current_thread().name

    steps, seen = steps_on_model_thread(work()), []
    for _ in range(3):
        caller = threading.Thread(target=lambda: seen.append(next(steps)))
        caller.start()
        caller.join()
    assert len({*seen, on_model_thread(lambda: threading.current_thread().name)}) == 1
    assert seen[0] != threading.current_thread().name


def test_generators_are_closed_and_errors_are_raised() -> None:
    closed: list[str] = []

    def work() -> Generator[int]:
        try:
            yield 1
            raise ValueError("two")
        finally:
            closed.append(threading.current_thread().name)

    steps = steps_on_model_thread(work())
    assert next(steps) == 1
    steps.close()
    assert len(closed) == 1 and closed[0] != threading.current_thread().name
    with pytest.raises(ValueError, match="two"):
        list(steps_on_model_thread(work()))
    assert len(closed) == 2


def test_context_variables_reach_the_model_thread() -> None:
    variable = ContextVar("variable", default="unset")
    variable.set("set by the caller")
    assert on_model_thread(variable.get) == "set by the caller"


def test_each_visitor_has_one_current_ticket() -> None:
    queue = RunQueue()
    first, second = queue.take("a"), queue.take("b")
    assert queue.is_current("a", first) and queue.is_current("b", second) and not queue.is_current("a", second)
    assert queue.cancel("a") and not queue.cancel("a")
    assert not queue.is_current("a", first) and queue.is_current("b", second)
    assert queue.is_current("b", second) and not queue.is_current("b", queue.take("c"))


def test_a_full_queue_gives_no_ticket() -> None:
    waiting = [0]
    queue = RunQueue(2, lambda: waiting[0])
    ticket, status = enter(queue, "a")
    assert queue.is_current("a", ticket) and "Waiting for the model" in status
    waiting[0] = 1
    assert "Waiting for 1 other runs" in enter(queue, "b")[1]
    waiting[0] = 2
    ticket, status = enter(queue, "c")
    assert ticket == REFUSED and "2 runs wait already" in status and not queue.is_current("c", ticket)


def test_tickets_of_visitors_who_never_return_are_dropped() -> None:
    queue = RunQueue()
    tickets = [queue.take(str(number)) for number in range(2_000)]
    assert len(queue._last) == 512 and queue.is_current("1999", tickets[-1]) and not queue.is_current("0", tickets[0])
