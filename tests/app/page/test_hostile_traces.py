"""Traces made to exhaust the page: each is refused in one line, or read and drawn with work and HTML in proportion."""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gradio")

from outrider.app.page import recordings, render
from outrider.app.page.recordings import Recording
from outrider.app.page.theory import estimate
from outrider.core.errors import TraceError
from outrider.speech.audio import Sound

INVISIBLE = "\u202e" * 200  # each character is shown as six
ONE: dict[str, Any] = {"row": 0, "index": 0, "emitted": [1], "sources": ["bonus"]}


def recording(steps: list[dict[str, Any]], **more: Any) -> str:
    return json.dumps({"recording": 1, "modality": "text", "trace": {"steps": steps}, **more}, separators=(",", ":"))


def raced(steps: list[dict[str, Any]]) -> str:
    return recording(steps, plain={"modality": "text", "trace": {"steps": steps}})


def committed(count: int, **more: Any) -> dict[str, Any]:
    return {"row": 0, "index": 0, "emitted": [1] * count, "sources": ["drafted"] * count, **more}


def chain(count: int) -> dict[str, Any]:
    """A draft that is one long path."""
    flags = [True] * count
    return {"drafted": [1] * count, "parents": [*range(-1, count - 1)], "fixed": flags, "tried": flags}


def siblings(count: int) -> dict[str, Any]:
    flags = [True] * count
    return {**ONE, "drafted": [1] * count, "parents": [-1] * count, "fixed": flags, "tried": flags}


def sound(rate: int) -> str:
    data = bytearray(Sound(np.zeros(100_000, dtype=np.float32)).wav())
    data[24:28] = rate.to_bytes(4, "little")
    return b64encode(data).decode()


def png(side: int) -> str:
    return b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + 2 * side.to_bytes(4, "big") + b"\x08\x02\0\0\0").decode()


DRAWN: dict[str, Callable[[int], str]] = {  # n -> a file whose size is in proportion to n
    "a deep draft": lambda n: recording([{"row": 0, "index": 0, **chain(n)}]),
    "a deep draft and many steps": lambda n: recording([{**ONE, **chain(n // 4)}, *[ONE] * (n // 8)]),
    "many siblings": lambda n: recording([siblings(n)]),
    "a long path": lambda n: raced([{**chain(n), **committed(n, path=[*range(n)])}]),
    "more tokens than nodes": lambda n: recording([committed(n)]),
    "long names": lambda n: recording([committed(n)], names={"1": INVISIBLE}),
    "many alternatives": lambda n: recording([{**ONE, "alternatives": [[[1, 0.5]] * n]}], names={"1": INVISIBLE}),
    "many rows": lambda n: raced([{"row": row, "index": row} for row in range(min(n, 15_000))]),
    "many words": lambda n: recording([ONE], modality="speech", starts=[1.0], words=[[0, ""]] * n),
    "a long speech": lambda n: recording([committed(n)], modality="speech"),
    "more codes than the image has": lambda n: recording([committed(n)], modality="image", rows=1, columns=1),
}
REFUSED = {
    "a huge index": recording([{**ONE, "index": 10**400}]),
    "a huge token": recording([{**ONE, "emitted": [10**400]}]),
    "huge memory": json.dumps({"steps": [ONE], "memory": 10**400}),
    "huge launches": json.dumps({"steps": [ONE], "launches": 1e308}),
    "a huge bandwidth": json.dumps({"steps": [ONE], "machine": {"bandwidth": 1e308}}),
    "a huge temperature": json.dumps({"steps": [ONE], "options": {"temperature": 10**400}}),
    "huge times": recording([{**ONE, "times": {"draft": 1e308}}]),
    "negative times": recording([{**ONE, "times": {"draft": -1.0}}]),
    "a huge total variation": recording([{**ONE, "total_variation": [1e308]}]),
    "a token that starts after months": recording([ONE], modality="speech", starts=[3e6]),
    "a word before the start": recording([ONE], modality="speech", words=[[-1e300, "a"]]),
    "a sound of a day": recording([ONE], modality="speech", sound=sound(1)),
    "a sound without a rate": recording([ONE], modality="speech", sound=sound(0)),
    "an image of gigapixels": recording([ONE], modality="image", picture=png(100_000)),
    "an image cut short": recording([ONE], modality="image", picture=b64encode(b"\x89PNG\r\n\x1a\n").decode()),
    "a path longer than what is committed": recording([{**chain(3), **committed(2, path=[0, 1, 2])}]),
}


def draw(opened: Recording) -> dict[str, str]:
    """All that the page draws of a recording when it is opened and stepped through."""
    return {
        "output": render.output(opened),
        "answer": render.answer(opened),
        "steps": render.steps(opened),
        "charts": render.charts(opened),
        "figures": render.figures(opened.trace),
        "theory": str(estimate(opened)),
    }


def operations(work: Callable[[], object]) -> int:
    """How many bytecode instructions `work` runs."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", DRAWN)
def test_the_html_of_a_trace_is_bounded(name: str) -> None:
    data = DRAWN[name](60_000)
    opened = recordings.read(data)
    sizes = {part: len(html) for part, html in draw(opened).items()}
    assert max(sizes.values()) < 6_100_000 and sizes["charts"] < 300_000, sizes
    assert len(opened.link()) < 3 * len(data) + 1_000 * len(opened.trace.steps)


@pytest.mark.parametrize("name", DRAWN)
def test_work_grows_with_the_size_of_a_trace(name: str) -> None:
    size = 30 if name == "long names" else 400
    few, many = (operations(lambda n=n: draw(recordings.read(DRAWN[name](n)))) for n in (size, 2 * size))
    assert many < 2.3 * few


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_values_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(TraceError) as refused:
        recordings.read(REFUSED[name])
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_tokens_that_are_not_drawn_are_counted() -> None:
    opened = recordings.read(recording([committed(9_000), committed(1_000)], names={"1": INVISIBLE}))
    output = render.output(opened)
    drawn = output.count('class="or-t ')
    assert 500 < drawn < 10_000 and f"… {10_000 - drawn} more tokens, not shown" in output
    deep = recordings.read(recording([{"row": 0, "index": 0, **chain(1_000)}]))
    assert "position in the draft (the first 160 of 1000)" in render.charts(deep)
