"""Intervals and drawings of the lessons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.app.lessons import costs, drawings, intervals, timings
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
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


def _results(drafter: Any, prompts: list[list[int]]) -> list[Any]:
    """One result for each prompt, with a recorded trace."""
    target, found = TableTarget(20, sharpness=2.0), []
    for prompt in prompts:
        steps = decode(target, drafter, Exact(), [prompt], max_new_tokens=12, sampling=Sampling(temperature=0))
        trace = Trace(tuple(steps))
        found.append(SimpleNamespace(trace=trace, tokens=trace.tokens(), prompt=prompt))
    return found


def test_a_round_costs_its_parts() -> None:
    prompts = [[seed, 3] for seed in range(4)]
    plain = _results(None, prompts)
    drafted = _results(DraftModel(TableTarget(20, sharpness=2.0, blur=0.1), length=3), prompts)
    assert costs.RoundCost.of(plain, plain).total == pytest.approx(1)
    cost = costs.RoundCost.of(drafted, plain)
    assert cost.total == pytest.approx(cost.draft + cost.target + cost.rest) and 0 < cost.nodes <= 3
    tokens, faster = intervals.tokens_per_pass(drafted), costs.speedup(drafted, plain)
    assert faster.value == pytest.approx(tokens.value / cost.total)
    assert intervals.equivalents_per_token(plain).value == 1
    assert np.mean(intervals.by_prompt(drafted)) == pytest.approx(tokens.value, rel=0.1)


def test_texts_that_differ_by_more_than_rounding_are_an_error() -> None:
    prompts = [[seed, 3] for seed in range(3)]
    lm = SimpleNamespace(target=lambda: TableTarget(20, sharpness=2.0), dtype="float32", end=())
    plain = _results(None, prompts)
    assert "token for token." in costs.same_text(lm, plain, plain)
    gap = [SimpleNamespace(**vars(result)) for result in plain]
    gap[0].tokens = [*gap[0].tokens[:-1], (gap[0].tokens[-1] + 1) % 20]
    with pytest.raises(AssertionError, match="more than rounding"):
        costs.same_text(lm, gap, plain)
    with pytest.MonkeyPatch.context() as patch:  # the same difference, if rounding could have made it
        patch.setattr("outrider.text.bench.comparison.near_tie", lambda dtype: 1e9)
        assert costs.same_text(lm, gap, plain).startswith("2 of 3 texts")


def test_ways_are_timed_in_turns_and_impossible_figures_are_named() -> None:
    target, small = TableTarget(20, sharpness=2.0), TableTarget(20, sharpness=2.0, blur=0.1)
    turns: list[str] = []
    now = 0.0  # of a clock that only decoding advances

    def way(name: str, drafter: DraftModel | None, seconds: float) -> object:
        def run(prompt: list[int]) -> object:
            nonlocal now
            turns.append(name)
            now += seconds
            trace = Trace(tuple(decode(target, drafter, Exact(), [prompt], max_new_tokens=8, seed=1)))
            return SimpleNamespace(tokens=trace.tokens(0), trace=trace)

        return run

    ways = {
        "plain": way("plain", None, 3.0),
        "quick": way("quick", None, 1.0),
        "drafted": way("drafted", DraftModel(small, length=3), 2.5),
    }
    made = timings.compare(ways, [[1, 3], [2, 3]], repeats=3, clock=lambda: now)  # type: ignore[arg-type]
    assert turns[:3] == ["plain", "quick", "drafted"]  # the warm-up
    assert sorted(turns[3:6]) == sorted(turns[:3]) and len(turns) == 3 + 3 * 2 * 3
    quick, drafted = made["quick"], made["drafted"]
    assert quick.passes.value == 1 and quick.speedup.value == 3 and quick.impossible
    assert quick.verdict().startswith("impossible") and any("quick" in doubt for doubt in made.doubts)
    assert drafted.speedup.value == pytest.approx(1.2) and not drafted.impossible
    assert drafted.passes.value > 1.1
    assert drafted.cost.total == pytest.approx(drafted.cost.draft + drafted.cost.target + drafted.cost.rest)
    assert "drafted, drafting:" in drawings.rounds(made.timings)
    assert len(made.results["drafted"]) == 2


def test_verdicts_name_what_decides() -> None:
    def timing(low: float, high: float, draft: float = 0.0, target: float = 1.0, alone: float = 0.9) -> timings.Timing:
        speedup, passes = intervals.Interval((low + high) / 2, low, high), intervals.Interval(2.0, 1.8, 2.2)
        decoding = intervals.Interval(alone, alone, alone)
        return timings.Timing("x", speedup, decoding, passes, costs.RoundCost(draft, target, 0.0, 4.0, 0.1))

    assert timing(1.2, 1.6).verdict().startswith("pays: 2.00 tokens")
    assert timing(0.5, 0.7, draft=1.5, target=1.3).verdict().endswith("mostly drafting")
    assert timing(0.8, 1.1, target=2.0).verdict() == (
        "no difference shown: 2.00 tokens for 2.00 plain rounds, mostly a longer target pass"
    )
    assert timing(0.9, 1.1, target=1.1, alone=1.8).verdict().endswith("but decoding is a small part of the call")
    assert intervals.median_ratio([3.0, 3.1], [1.0, 1.0]).above(2)
