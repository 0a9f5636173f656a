"""A seeded mutator of files, and the check that no case of it ends the process, hangs or takes its memory."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from outrider.core.errors import OutriderError

COUNTS = (0, 1, 1 << 31, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 1)
WRONG = (None, -1, 0, 1e308, "x", [], {}, True, 1 << 40, float("nan"), 1.5, -7)
MAX_GROWTH = 512 << 20  # bytes by which reading damaged input may increase the process
PARTS = (  # of texts: an unpaired surrogate, NUL, right-to-left text, chat and template markup ...
    "\ud800", "\x00", "\u202e", "a", "hello", "<|im_start|>", "</s>", "{{ x }}", "{% raw", "\U0001f600", "e\u0301" * 5,
    "\n", " ", "'", "\\", "\ufeff", "\uffff", "日本語", "0" * 50, "\r", "12,345", "Dr.", "http://x.y/z", "red",
)  # fmt: skip
SECONDS = 5.0  # of processor time that a case may take


def damaged(rng: random.Random, good: bytes) -> bytes:
    """Damage data: change bytes, enlarge a number, remove or truncate a part."""
    result = bytearray(good)
    kinds = (0, 1, 2, 3, 4) if rng.random() < 0.3 else (0, 1, 3)
    for _ in range(rng.randint(1, 3)):
        at, kind = rng.randrange(max(len(result), 1)), rng.choice(kinds)
        if not result:
            break
        if kind == 0:
            result[at] = rng.randrange(256)
        elif kind == 1:
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del result[at : at + rng.randint(1, 40)]
        elif kind == 3:
            result[at : at + 8] = struct.pack("<Q", rng.choice(COUNTS))
        else:
            del result[at:]
    return bytes(result)


def bent(rng: random.Random, good: Any) -> Any:
    """Return JSON in which one value, at any depth, has another type."""
    result = json.loads(json.dumps(good))
    place = result
    while True:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
            place = place[key]
            continue
        place[key] = rng.choice(WRONG)
        return result


def words(rng: random.Random) -> str:
    return "".join(rng.choice(PARTS) for _ in range(rng.randint(0, 12)))


def survives(
    cases: int, once: Callable[[random.Random], object], *, refused: float = 0.0, seconds: float = SECONDS
) -> None:
    """Check that each case passes or raises a one-line OutriderError within bounded time and memory, and count the
    errors. OUTRIDER_FUZZ=N takes N cases, OUTRIDER_FUZZ_START=M those from number M on."""
    usual = cases
    cases, start = int(os.environ.get("OUTRIDER_FUZZ", cases)), int(os.environ.get("OUTRIDER_FUZZ_START", 0))
    count = 0
    for case in range(start, start + cases):
        said, before = "", _peak(reset=True)
        try:
            with _bounded(seconds):
                once(random.Random(case))
        except OutriderError as error:
            said = str(error)
            count += 1
        except BaseException as error:  # panics of libraries in Rust are no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error
        assert "\n" not in said and len(said) < 600, (case, said)
        grown = _peak() - before
        assert grown < MAX_GROWTH, f"case {case}: takes {grown:,} bytes"
    assert cases < usual or count >= refused * cases  # of a few cases none may be refused


def _peak(*, reset: bool = False) -> int:
    """Peak main memory of this process in bytes, since the last reset where the system allows one."""
    if reset:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raise after so much processor time, which other processes do not take from a case."""

    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
