"""A model adapted to another vocabulary: it drafts, rewinds and commits like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, forced
from outrider.core.drafters.draft_model.vocab_bridge import Renamed, Translated
from outrider.core.methods import make_drafter
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import Case, enumerate_output, target_distribution, total_variation
from outrider.core.testing.table_target import TableTarget
from outrider.core.tree import Tree

SOME = Renamed({0: 1, 2: 0}, unknown=2)  # the target's token 1 has no name there


def target() -> TableTarget:
    return TableTarget(3, seed=1, sharpness=0.7)


def translated() -> Translated:
    return Translated(TableTarget(3, seed=1, sharpness=0.7, blur=0.4), SOME)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=2, repetition_penalty=1.3, end=(2,))])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("draft-model", {"length": 2}),
        ("sampled-tree", {"tree": (-1, -1, 0)}),
        ("dynamic-tree", {"nodes": 3, "width": 2, "depth": 2}),
        ("specexec", {"nodes": 3, "batch": 1, "width": 2}),
        ("cs-drafting", {"lengths": (2, 1), "inner_length": 2}),
    ],
)
def test_drafters_keep_the_distribution_with_a_bridge(
    name: str, options: Mapping[str, Any], sampling: Sampling
) -> None:
    prompts, limits = ((0, 1), (2, 1, 0, 1)), (3, 2)
    case = Case(
        target=target,
        drafter=lambda: make_drafter(name, model=translated(), **options),
        rule=Exact(),
        prompts=prompts,
        sampling=sampling,
        limits=limits,
    )
    distributions = enumerate_output(case)
    for distribution, prompt, limit in zip(distributions, prompts, limits, strict=True):
        assert total_variation(distribution, target_distribution(target(), prompt, sampling, limit)) < 1e-12


def test_distributions_are_those_of_the_shared_tokens() -> None:
    model = translated()
    model.begin([[0, 1], [2, 2]], Sampling())
    plain = TableTarget(3, seed=1, sharpness=0.7, blur=0.4)
    plain.begin([[1, 2], [0, 0]], Sampling())
    tree = Tree.of((-1, -1, 0), model.device)
    tokens, live = torch.tensor([[0, 2, 2], [2, 0, 0]]), torch.ones(2, 3, dtype=torch.bool)
    found = model.score(Draft.guess(tokens, tree, live)).distributions().dense().probs
    theirs = torch.where(tokens == 0, 1, 0)
    raw = plain.score(Draft.guess(theirs, tree, live)).distributions().dense().probs
    assert not found[..., 1].any()
    wanted = raw[..., [1, 0]] / raw[..., [1, 0]].sum(-1, keepdim=True)
    torch.testing.assert_close(found[..., [0, 2]], wanted)


def test_scoring_in_pieces_marks_and_commits() -> None:
    model = translated()
    model.begin([[0, 1]], Sampling())
    whole = Draft.guess(torch.tensor([[0, 2]]), Tree.chain(2), torch.ones(1, 2, dtype=torch.bool))
    first = Draft.guess(torch.tensor([[0]]), Tree.chain(1), torch.ones(1, 1, dtype=torch.bool))
    every = model.score(whole).distributions().probs
    before = model.mark()
    assert torch.equal(model.score(first).distributions().probs, every[:, :2])
    assert torch.equal(model.score(whole, 1).distributions().probs, every[:, 2:])
    model.keep(*forced([[0, 2]], model.device))
    assert torch.equal(model.score(Draft.empty(1)).distributions().probs[:, 0], every[:, 2])
    assert int(model.score(Draft.empty(1)).lengths) == 4
    model.rewind(before)
    assert torch.equal(model.score(whole).distributions().probs, every) and int(model.score(whole).lengths) == 2
    fresh = Translated(TableTarget(3, seed=1, sharpness=0.7, blur=0.4), SOME)
    fresh.begin([[0, 1, 1]], Sampling())
    model.keep(*forced([[1]], model.device))
    assert torch.equal(
        model.score(Draft.empty(1)).distributions().probs, fresh.score(Draft.empty(1)).distributions().probs
    )
