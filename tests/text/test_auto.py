"""drafter="auto": plain where nothing pays, the same output again from a noted calibration, costs measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.draft import Draft, Tree
from outrider.core.errors import InvalidOption
from outrider.core.policies import Best
from outrider.core.speed import PassCost
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


def test_the_length_follows_what_is_accepted() -> None:
    best = Best(cost=0.002, verify=PassCost(10, 1, 4), most=16)
    best.begin(2, torch.device("cpu"))
    for _ in range(40):
        best.learn(torch.tensor([8, 8]), torch.tensor([8, 0]))
    long, short = best.start().tolist()
    assert long == 16
    assert short <= 4


def test_a_draft_is_shortened_row_by_row() -> None:
    live = torch.tensor([[True, True, True], [True, False, False]])
    draft = Draft.guess(torch.arange(6).view(2, 3), Tree.chain(3), live)
    found = auto.shortened(draft, torch.tensor([2, 3]))
    assert found.tokens.tolist() == [[0, 1], [3, 4]]
    assert found.live.tolist() == [[True, True], [True, False]]
    assert auto.shortened(draft, torch.tensor([0, 0])).size == 0
    assert auto.shortened(draft, torch.tensor([0, 9])).live.tolist() == [[False], [True]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cost": 1}, "Did you mean 'costs'"),
        ({"longest": 0}, "longest is 0"),
        ({"costs": "fast"}, "give tokens and milliseconds"),
        ({"costs": "1:10"}, "at least two different lengths"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str, lm: TextModel) -> None:
    with pytest.raises(InvalidOption, match=said):
        lm.generate("x", drafter_options=options)
