"""drafter="auto": plain where nothing pays, the same output again from a noted calibration, costs measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.core.draft import Draft
from outrider.core.drafters.recycling import TokenRecycling
from outrider.core.errors import InvalidOption
from outrider.core.laws import Sampling
from outrider.core.target import Prefill
from outrider.text import TextModel, auto

FREE = "1:10 2:10 4:10 8:10 16:10 32:10"  # milliseconds: a pass over many tokens costs what one costs
DEAR = "1:10 2:20 4:40 8:80 16:160 32:320"
REPEATING = "one two three four five six seven " * 6
RAW: dict[str, Any] = {"raw": True, "max_new_tokens": 40}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def drafted(lm: TextModel, costs: str, **options: Any) -> int:
    out = lm.generate(REPEATING, drafter="auto", drafter_options={"costs": costs}, **RAW, **options)
    return out.trace.summary().drafted


def test_it_drafts_where_guesses_are_free_and_hardly_where_they_cost_as_much_as_tokens(lm: TextModel) -> None:
    assert drafted(lm, FREE) > 20
    assert drafted(lm, DEAR) <= 10, "a probe now and then"


def test_it_is_the_default_and_changes_no_token(lm: TextModel) -> None:
    plain = lm.generate(REPEATING, drafter=None, **RAW)
    found = lm.generate(REPEATING, **RAW)
    assert found.trace.method == "auto"
    assert found.tokens == plain.tokens
    batch = lm.generate([REPEATING, "the cat", "a"], drafter_options={"costs": FREE}, **RAW)
    assert [one.tokens for one in batch] == [
        lm.generate(one, drafter=None, **RAW).tokens for one in (REPEATING, "the cat", "a")
    ]


def test_costs_are_measured_once_and_noted_so_that_a_seed_stays_true(lm: TextModel, cache: Path) -> None:
    first = lm.generate(REPEATING, temperature=1.0, seed=5, **RAW)
    (kept,) = (cache / "calibrations").iterdir()
    costs = first.trace.options["drafter.costs"]
    assert kept.read_text() == costs
    again = lm.generate(REPEATING, temperature=1.0, seed=5, **RAW)
    assert again.tokens == first.tokens
    assert [step.drafted for step in again.trace.steps] == [step.drafted for step in first.trace.steps]
    kept.write_text(DEAR)
    replayed = lm.generate(REPEATING, temperature=1.0, seed=5, drafter_options={"costs": costs}, **RAW)
    assert replayed.tokens == first.tokens, "what the trace says is enough to have it again"
    kept.write_text("nonsense")
    lm.generate(REPEATING, **RAW)
    assert kept.read_text().startswith("1:"), "a broken calibration is measured anew"


def test_as_many_guesses_are_tried_as_should_be_the_fastest() -> None:
    flat = auto.Auto(auto.parse("1:10 8:10 9:40"), drafters=("suffix",))
    flat.begin(Prefill(), [[1, 2, 3]], Sampling())
    assert flat.wanted([0.5, 0.4, 0.01]) == 3, "up to eight tokens cost what one costs"
    assert flat.wanted([0.2] * 20) == 7
    stairs = auto.Auto(auto.parse("1:10 8:10 9:15 40:15"), drafters=("suffix",))
    stairs.begin(Prefill(), [[1, 2, 3]], Sampling())
    assert stairs.wanted([0.9] * 20) == 20, "half as much again for many times the tokens"
    steep = auto.Auto(auto.parse("1:10 2:16 3:22"), drafters=("suffix",))
    steep.begin(Prefill(), [[1, 2, 3]], Sampling())
    assert steep.wanted([0.5, 0.5]) == 0
    assert steep.wanted([0.9, 0.2]) == 1
    batch = auto.Auto(auto.parse("1:10 8:10 9:40"), drafters=("suffix",))
    batch.begin(Prefill(), [[1, 2, 3]] * 4, Sampling())
    assert batch.wanted([0.5, 0.4, 0.3]) == 1, "the rows share the room of a pass"


def test_costs_lie_between_those_measured_and_go_on_behind_them() -> None:
    costs = auto.parse("1:10 5:18 9:16 13:24")
    assert [costs(tokens) for tokens in (1, 3, 5, 7, 9, 13, 17)] == [10, 14, 18, 18, 18, 24, 30]


def test_guessing_rests_where_nothing_pays_and_is_tried_again(lm: TextModel) -> None:
    asked: list[int] = []

    class Counted(TokenRecycling):
        def propose(self, room: Any, dice: Any) -> Draft:
            asked.append(1)
            return super().propose(room, dice)

    drafter = auto.Auto(auto.parse(DEAR), drafters=(Counted(),))
    out = lm.generate("the cat", drafter=drafter, raw=True, max_new_tokens=90)
    rounds = len(out.trace.steps)
    assert 8 <= len(asked) < rounds / 2
    assert out.tokens == lm.generate("the cat", drafter=None, raw=True, max_new_tokens=90).tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cost": 1}, "Did you mean 'costs'"),
        ({"longest": 0}, "longest is 0"),
        ({"costs": "fast"}, "give tokens and milliseconds"),
        ({"costs": "1:10"}, "at least two different numbers"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str, lm: TextModel) -> None:
    with pytest.raises(InvalidOption, match=said):
        lm.generate("x", drafter_options=options)
