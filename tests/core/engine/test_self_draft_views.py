"""Views of a model: what each computes, that it disturbs nothing, and that drafting by one changes no output."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import DraftModel, DynamicTree, SampledTree, TopKTree
from outrider.core.engine.self_draft_views import View
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods import make_rule
from outrider.core.rng import CounterRNG
from outrider.core.testing.cache_audit import emitted, paths, random_draft, random_verdict, reference
from outrider.core.tree import Tree

SHAPE = Config(vocabulary=31, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)
GREEDY = Sampling(temperature=0)
VIEWS: dict[str, dict[str, Any]] = {
    "all of it": {},
    "exit": {"exit": 2},
    "skip": {"skip": {"attention.1", "mlp.0"}},
    "window": {"window": (2, 4)},
    "recent only": {"window": (0, 3)},
    "bits": {"bits": 4},
    "everything": {"skip": {"mlp.1"}, "exit": 2, "window": (1, 5), "bits": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("seed", range(3))
def test_a_view_says_what_a_fresh_one_says(name: str, seed: int) -> None:
    rng = random.Random(seed)
    rows = 1 + seed
    model = Decoder.random(SHAPE, dtype=torch.float64)
    view = model.view(**VIEWS[name])
    texts = [[rng.randrange(31) for _ in range(rng.randint(1, 9))] for _ in range(rows)]
    model.begin(texts, Sampling())
    view.begin(texts, Sampling())
    for _ in range(5):
        draft, parents = random_draft(rng, rows, 31, 5)
        half = draft.size // 2
        if rng.random() < 0.5:  # between the model's own passes, then continued: its scratch must stay whole
            model.score(draft)
        first = Draft.guess(draft.tokens[:, :half], Tree(draft.tree.parents[:, :half]), draft.live[:, :half])
        pieces = [view.score(first), view.score(draft, half)] if rng.random() < 0.7 else [view.score(draft)]
        found = torch.cat([piece.logits() for piece in pieces], 1)
        for row, text in enumerate(texts):
            alone = Decoder.random(SHAPE, dtype=torch.float64)
            fresh = alone.view(**VIEWS[name])
            for path in [[], *paths(parents[row])]:
                alone.begin([text], Sampling())
                fresh.begin([text], Sampling())
                tokens = draft.tokens[row : row + 1, path]
                chain = Draft.guess(tokens, Tree.chain(len(path)), torch.ones_like(tokens).bool())
                wanted = fresh.score(chain).logits()[0, -1]
                at = path[-1] + 1 if path else 0
                torch.testing.assert_close(found[row, at], wanted, atol=1e-10, rtol=0)
        verdict, count = random_verdict(rng, draft, parents, 31)
        model.score(draft)
        model.keep(draft, verdict, count)
        view.keep(draft, verdict, count)
        texts = [[*text, *emitted(draft, verdict, row, int(count[row]))] for row, text in enumerate(texts)]
        logits = model.score(Draft.empty(rows)).logits()
        for row, text in enumerate(texts):
            torch.testing.assert_close(logits[row, 0], reference(model.network, text)[-1], atol=1e-10, rtol=0)


def test_the_whole_view_is_the_model() -> None:
    model = Decoder.random(SHAPE, dtype=torch.float64)
    view = model.view()
    model.begin([[1, 2, 3]], Sampling())
    view.begin([[1, 2, 3]], Sampling())
    chain = Draft.guess(torch.tensor([[4, 5]]), Tree.chain(2), torch.ones(1, 2).bool())
    torch.testing.assert_close(view.score(chain).logits(), model.score(chain).logits(), atol=1e-12, rtol=0)
    assert view.weight_bytes == model.weight_bytes


def test_views_read_less() -> None:
    model = Decoder.random(SHAPE)
    assert model.view(exit=1).weight_bytes < model.view(exit=2).weight_bytes < model.weight_bytes
    assert model.view(skip={"mlp.1"}).weight_bytes < model.view(skip={"attention.1"}).weight_bytes
    assert model.view(bits=4).weight_bytes < model.view(bits=8).weight_bytes < model.weight_bytes / 3


def test_outside_the_window_nothing_is_seen() -> None:
    model = Decoder.random(replace(SHAPE, layers=1), dtype=torch.float64)
    view = model.view(window=(1, 3))
    said = []
    for middle in (5, 6):
        text = [1, middle, 7, 8, 9, 10]
        model.begin([text], Sampling())
        view.begin([text], Sampling())
        said.append(view.score(Draft.empty(1)).logits())
    assert torch.equal(said[0], said[1])


class Carrying(DraftModel):
    """Hands the target what an early exit has computed."""

    carried = 0

    def propose(self, room: torch.Tensor, rng: CounterRNG) -> Draft:
        assert isinstance(self.model, View)
        draft = super().propose(room, rng)
        carry = self.model.carry()
        self.carried += carry is not None
        return replace(draft, carry=carry)


@pytest.mark.parametrize("rows", [1, 3])
def test_what_an_exit_computed_is_not_computed_again(rows: int) -> None:
    model = Decoder.random(SHAPE, dtype=torch.float64)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8]][:rows]
    plain = list(decode(model, None, make_rule(), prompts, sampling=GREEDY, max_new_tokens=20))
    drafter = Carrying(model.view(exit=2), length=3)
    found = list(decode(model, drafter, make_rule(), prompts, sampling=GREEDY, max_new_tokens=20))
    assert drafter.carried
    for row in range(rows):
        texts = [[token for step in steps if step.row == row for token in step.emitted] for steps in (plain, found)]
        assert texts[0] == texts[1]


def test_resumed_scores_are_those_of_a_whole_pass() -> None:
    model = Decoder.random(SHAPE, dtype=torch.float64)
    view = model.view(exit=2)
    model.begin([[1, 2, 3], [4, 5]], Sampling())
    view.begin([[1, 2, 3], [4, 5]], Sampling())
    draft = Draft.guess(torch.tensor([[6, 7, 8], [9, 10, 11]]), Tree.of((-1, -1, 1)), torch.ones(2, 3).bool())
    part = Draft.guess(draft.tokens[:, :2], Tree.of((-1, -1)), draft.live[:, :2])
    view.score(part)
    carry = view.carry()
    resumed = model.score(replace(draft, carry=carry)).logits()
    assert carry is not None and carry.usable(model.cache, ()) is False  # the model has written there since
    torch.testing.assert_close(resumed, model.score(draft).logits(), atol=1e-12, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DraftModel, SampledTree, TopKTree, DynamicTree])
@pytest.mark.parametrize("name", VIEWS)
def test_drafting_for_itself_changes_nothing(kind: type[Any], name: str) -> None:
    model = Decoder.random(SHAPE, dtype=torch.float64)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
    plain = list(decode(model, None, make_rule(), prompts, sampling=GREEDY, max_new_tokens=16))
    found = list(
        decode(model, kind(model.view(**VIEWS[name])), make_rule(), prompts, sampling=GREEDY, max_new_tokens=16)
    )
    for row in range(3):
        texts = [[token for step in steps if step.row == row for token in step.emitted] for steps in (plain, found)]
        assert texts[0] == texts[1]
    if name == "all of it" and kind is DraftModel:
        assert len(found) < len(plain) / 3


def test_what_a_view_cannot_do_is_said() -> None:
    model = Decoder.random(SHAPE)
    with pytest.raises(InvalidOption, match=r"must be 1 to 3"):
        model.view(exit=4)
    with pytest.raises(InvalidOption, match=r"no sublayer 'mlp\.3'.* mlp\.2"):
        model.view(skip={"mlp.3"})
    with pytest.raises(InvalidOption, match=r"window is \(4, 0\)"):
        model.view(window=(4, 0))
    with pytest.raises(InvalidOption, match="Known: 4, 8"):
        model.view(bits=3)
    model.begin([[1], [2]], Sampling())
    with pytest.raises(Incompatible, match="got 1 prompts and its model is decoding 2"):
        model.view().begin([[1]], Sampling())
    with pytest.raises(InvalidOption, match="tap the model"):
        model.view().begin([[1], [2]], Sampling(), frozenset({"last"}))
