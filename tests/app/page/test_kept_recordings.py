"""Recordings of visitors are bounded in number and size, and released when a visitor leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.app.page import kept_recordings as module
from outrider.app.page.kept_recordings import KeptRecordings, size
from outrider.app.page.recordings import Recording
from outrider.core.trace import Step, Trace


def recording(tokens: int) -> Recording:
    step = Step(row=0, index=0, emitted=(1,) * tokens, sources=("drafted",) * tokens)
    return Recording("text", Trace((step,)))


def test_each_visitor_has_one_recording_in_each_view() -> None:
    kept, first, second, other = KeptRecordings(), recording(1), recording(2), recording(3)
    kept.keep("ann", "text", first)
    kept.keep("ann", "text", second)
    kept.keep("ann", "traces", other)
    kept.keep("bob", "text", first)
    assert kept.find("ann", "text") is second and kept.find("ann", "traces") is other
    kept.forget("ann")
    assert kept.find("ann", "text") is kept.find("ann", "traces") is None and kept.find("bob", "text") is first
    kept.forget("bob")
    assert kept._size == 0


def test_the_least_recently_used_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COUNT", 3)
    kept = KeptRecordings()
    for name in "abc":
        kept.keep(name, "text", recording(1))
    assert kept.find("a", "text")
    kept.keep("d", "text", recording(1))
    assert [name for name in "abcd" if kept.find(name, "text")] == ["a", "c", "d"]


def test_the_size_of_all_is_bounded_but_the_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SIZE", 10_000)
    kept = KeptRecordings()
    for number in range(20):
        kept.keep(str(number), "text", recording(1_000))
        assert kept._size <= 10_000
    assert sum(kept.find(str(number), "text") is not None for number in range(20)) == 2
    kept.keep("large", "text", recording(9_000))
    assert kept.find("large", "text") and len(kept._kept) == 1


def test_the_size_counts_every_part() -> None:
    one = recording(10)
    assert size(replace(one, picture="x" * 8_000)) == size(one) + 1_000
    assert size(replace(one, plain=one, words=((0.0, "a"),))) == 2 * size(one) + 1


def test_a_run_that_has_begun_is_known_before_it_has_a_recording() -> None:
    kept = KeptRecordings()
    kept.begin("ann", "image")
    assert kept.has_begun("ann", "image") and kept.find("ann", "image") is None
    assert not kept.has_begun("ann", "text") and not kept.has_begun("bob", "image")
    kept.keep("ann", "image", recording(1))
    kept.begin("ann", "image")  # a second run: the first recording is shown until it is done
    assert kept.find("ann", "image") is not None
    kept.forget("ann")
    assert not kept.has_begun("ann", "image") and kept._size == 0
