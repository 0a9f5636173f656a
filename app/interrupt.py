"""Ends a command within two seconds of SIGTERM or Ctrl-C, and every process that it started with it.

A signal raises KeyboardInterrupt in the main thread, so that files that are half written are removed. Whatever is still
at work at the deadline, or when a second signal comes, is killed. A command that then saves its work may set a later
deadline. Independent of commands.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

_deadline = 1.5  # seconds
_ROUNDS = 20  # of killing, before this process ends in any case
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CHILD_SUBREAPER = 36  # of Linux's prctl


@contextmanager
def ended_by_signals() -> Iterator[list[int]]:
    """Within the block, signals end the process as described above. Yields a list of the signals that came."""
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if sys.platform == "linux":  # orphans of a child that was killed become children of this process
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = [signal.signal(number, interrupt) for number in _SIGNALS]
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # also while the main thread runs compiled code
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()
    try:
        yield received
    finally:
        if received:
            kill_children()  # the deadline stays, for threads that are waited for at the end
        else:
            signal.set_wakeup_fd(-1)
            for number, handler in zip(_SIGNALS, before, strict=True):
                signal.signal(number, handler)
            os.close(writing)


def allow(seconds: float) -> None:
    """Give this process so long to end after a signal, since it saves its work then."""
    global _deadline
    _deadline = seconds


def end_now(code: int) -> NoReturn:
    """End this process and those below it without the interpreter's tidying up, which takes seconds."""
    kill_children()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _watch(reading: int) -> None:
    """Kill this process a while after the first signal, or at the second."""
    number = 0
    while number not in _SIGNALS:
        if not (data := os.read(reading, 1)):
            os.close(reading)
            return
        number = data[0]
    select.select([reading], [], [], _deadline)
    kill_children()
    os._exit(128 + number)


def kill_children() -> None:
    """Kill all processes below this one, where /proc lists them, until none is left that could start another."""
    for _ in range(_ROUNDS):
        if not (below := _below()):
            return
        for pid in below:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _below() -> list[int]:
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # ended meanwhile
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(status.parent.name))
    below = children.get(os.getpid(), [])
    for pid in below:  # grows while it is walked
        below += children.get(pid, [])
    return below
