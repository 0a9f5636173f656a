"""Draft heads under drafter="auto": one that is given or was trained here is merged, if its guesses are fixed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from outrider.core.drafters.combined.auto import Auto
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.methods import DRAFTERS
from outrider.core.training.checkpoint import save
from outrider.text import TextModel, recipes
from outrider.text.options import Options
from outrider.text.resolve_drafter import resolve_drafter

COSTS = {"costs": "1:10 2:10 4:10 8:10 16:10 32:10"}
PROMPT = "one two three four five six seven " * 6
RAW: dict[str, Any] = {"raw": True, "max_new_tokens": 40}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))


def head(lm: TextModel, name: str, folder: Path, tokens_per_pass: float = 1.0) -> Path:
    """A file of a recipe's draft head with random weights."""
    path = folder / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = recipes.recipe(name).make(lm.target(), None)  # type: ignore[arg-type]
    save(made, path, {"validation": {"tokens_per_pass": tokens_per_pass}})
    return path


def made(lm: TextModel, **options: Any) -> list[str]:
    """The classes of the drafters that `auto` merges; or that of the drafter that it stands for."""
    drafter = resolve_drafter(lm, Options(drafter="auto", **options)).made
    drafters = drafter.drafters if isinstance(drafter, Auto) else [drafter]
    return [type(each.draft_head if isinstance(each, Learned) else each).__name__ for each in drafters]


@pytest.mark.parametrize("name", [name for name in recipes.RECIPES if name in DRAFTERS and DRAFTERS[name].draft_head])
def test_the_table_says_which_heads_draft_trees(lm: TextModel, name: str) -> None:
    trained = recipes.recipe(name).make(lm.target(), None)  # type: ignore[arg-type]
    drafter = DRAFTERS[name].make(trained.drafts(lm.target()))
    trees = isinstance(drafter, Learned) and drafter.draft_kind in ("tree", "dynamic")
    assert DRAFTERS[name].drafts_trees == trees


def test_guesses_of_a_head_are_merged_where_they_are_fixed(lm: TextModel, tmp_path: Path) -> None:
    usual = ["Suffix", "TokenRecycling"]
    medusa, mtp = head(lm, "medusa", tmp_path / "given"), head(lm, "mtp", tmp_path / "given")
    assert made(lm, drafter_options=COSTS) == usual
    assert made(lm, drafter_options=COSTS, head=medusa) == [*usual, "MedusaHeads"]
    assert made(lm, drafter_options={**COSTS, "drafters": ["suffix"]}, head=str(medusa)) == ["Suffix", "MedusaHeads"]
    assert made(lm, head=mtp) == ["MtpModules"], "its chains are drawn"
    assert made(lm, drafter_options={"draft_kind": "chain"}, head=medusa) == ["MedusaHeads"], "not an option of auto"
    out = lm.generate(PROMPT, head=medusa, drafter_options=COSTS, **RAW)
    assert out.trace.method == "auto" and out.tokens == lm.generate(PROMPT, drafter=None, **RAW).tokens


def test_the_best_head_that_was_trained_here_is_merged(lm: TextModel) -> None:
    home = recipes.home(lm.name)
    head(lm, "medusa", home / "medusa", 1.4)
    best = head(lm, "eagle3", home / "eagle3", 1.9)
    head(lm, "mtp", home / "mtp", 2.5)  # draws chains
    assert made(lm, drafter_options=COSTS) == ["Suffix", "TokenRecycling", "Eagle3Head"]
    options = {"drafter_options": {**COSTS, "options": {"eagle3": {"depth": 2}}}}
    merged: Any = resolve_drafter(lm, Options(drafter="auto", **options)).made
    tree = merged.drafters[-1]._fixed
    assert (tree.depth, tree._floor) == (2, math.log(0.1)), "unlikely guesses are not grown; options are kept"
    assert made(lm, drafter_options={**COSTS, "drafters": ["suffix"]}) == ["Suffix"], "the drafters are given"
    assert lm.generate("a", drafter_options=COSTS, **RAW).trace.options["drafter.head"] == str(best)
    best.write_bytes(b"cut")
    lm.draft_heads.clear()
    with pytest.warns(UserWarning, match="`auto` does without .*eagle3.safetensors"):
        assert made(lm, drafter_options=COSTS) == ["Suffix", "TokenRecycling"]
