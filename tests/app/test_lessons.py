"""Intervals and drawings of the lessons."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.app.lessons import drawings, intervals
from outrider.core.decode import decode
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.rules.exact import Exact
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Trace


def test_nineteen_of_twenty_intervals_hold_the_mean() -> None:
    rng, held = np.random.default_rng(0), 0
    for seed in range(200):
        interval = intervals.mean(rng.normal(3.0, 1.0, 30).tolist(), seed)
        held += interval.low <= 3.0 <= interval.high
    assert 180 <= held <= 198


def test_statements_follow_the_interval() -> None:
    same = intervals.difference([1.0, 2.0, 3.0], [1.5, 2.0, 2.5])
    assert same.than(0, "more", "less", "unclear") == "unclear"
    assert intervals.mean([2.0, 2.1]).than(1, "more", "less", "unclear") == "more"
    assert intervals.mean([0.2, 0.1]).than(1, "more", "less", "unclear") == "less"
    assert f"{intervals.mean([0.5, 0.5]):.0%}" == "50% (50% to 50%)"
    with pytest.raises(ValueError, match="no values"):
        intervals.mean([])


def test_tokens_per_pass_are_those_of_the_summary() -> None:
    target, small = TableTarget(20, sharpness=2.0), TableTarget(20, sharpness=2.0, blur=0.1)
    prompts = [[seed, 3] for seed in range(12)]
    drafter = DraftModel(small, length=3)
    trace = Trace(tuple(decode(target, drafter, Exact(), prompts, max_new_tokens=24, seed=1)))
    whole = intervals.tokens_per_pass([trace])
    assert whole.value == pytest.approx(trace.summary().tokens_per_pass)
    assert 1 < whole.low < whole.value < whole.high
    assert whole.value == intervals.tokens_per_pass([trace.row(row) for row in range(12)]).value
    assert 0 < intervals.accepted([trace]).value < 1
    drawn = drawings.bars("passes", {"whole": whole, "plain": 1.0}, base=1)
    assert f"({whole.low:.3g} to {whole.high:.3g})" in drawn
