"""What `outrider advise` measures of a text model."""

from __future__ import annotations

import pytest

from outrider.core.advice.measure import RoundCosts
from outrider.core.advice.predict import Candidate, DraftCost, Machine, Prediction
from outrider.core.bench.runner import Bench, Item
from outrider.text import TextModel
from outrider.text.bench import advice


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 9), (float("inf"), 36)], ids=["slow", "fast"])
def test_costs_are_measured_several_times_where_that_is_quick(
    lm: TextModel, monkeypatch: pytest.MonkeyPatch, seconds: float, lines: int
) -> None:
    monkeypatch.setattr(advice, "_SECONDS", seconds)
    costs = advice.Study(lm, [Item("one", "chat", "one two three")], tokens=8, longest=1).rounds()
    assert costs.samples.shape == (lines, len(costs.shapes)) and (costs.samples > 0).all()


def test_the_fastest_so_far_run_on_all_prompts_whatever_their_interval() -> None:
    def predicted(name: str, speedup: float, high: float) -> Prediction:
        return Prediction(Candidate(name, (), DraftCost({})), 1, 1, speedup, 0.5, high, 1.0, 1.0, 1.0, 0.0)

    wide = [predicted(f"wide {number}", 1.5, 3.0 + number) for number in range(6)]
    kept = advice._promising([*wide, predicted("narrow", 2.0, 2.1), predicted("slow", 0.5, 0.6)])
    assert [each.name for each in kept] == ["narrow", "wide 0", "wide 5", "wide 4", "wide 3"]


def test_what_was_measured_in_turns_overrules_the_sum_of_the_parts(
    lm: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[Bench]()

    def ratio(bench: Bench, name: str, picked: range) -> float:
        tried.append(bench)
        assert len(picked) == 4 and picked[-1] < len(bench.of(name)) == 16
        return 0.5

    items = [Item(word, "chat", f"one two {word}") for word in ("three", "four")]
    monkeypatch.setattr(advice, "_ratio", ratio)
    machine = Machine(RoundCosts.of({(1, tokens): 10.0 for tokens in range(1, 4)}), draws=4)
    study = advice.Study(lm, items, tokens=8, longest=2)
    given = study.advice(machine, advice.methods_of(lm, ("prompt-lookup", "suffix")))
    assert len({id(bench) for bench in tried}) == 1 and len(given.best) > 1
    assert {round(each.speedup, 9) for each in given.best} == {0.5}
    assert all(each.candidate.pace[0] == 1 and len(each.candidate.pace) == 5 for each in given.best)
    assert given.chosen is None
