"""Trees are the same computed on the host and at once, and greedy verdicts compiled and in torch."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from outrider.core import tree
from outrider.core.draft import Draft
from outrider.core.rng import CounterRNG
from outrider.core.rules import native_walk
from outrider.core.rules.matching import follow
from outrider.core.tree import Tree

WORDS = 3  # so few that guesses are often right


def _parents(rng: random.Random, rows: int, size: int) -> Tensor:
    return torch.tensor([[rng.randint(-1, node - 1) for node in range(size)] for _ in range(rows)])


@pytest.mark.parametrize("seed", range(20))
def test_ancestors(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    parents = _parents(rng, rng.randint(1, 4), rng.randint(1, 12))
    few = Tree(parents)
    monkeypatch.setattr(tree, "_FEW", 0)
    many = Tree(parents)
    assert torch.equal(few.ancestors, many.ancestors) and torch.equal(few.paths, many.paths)


@pytest.mark.parametrize("seed", range(20))
def test_a_shape_that_comes_up_again_knows_its_depth_and_width(seed: int) -> None:
    parents = _parents(random.Random(seed), 1, 1 + seed % 9)
    known, found = Tree.of(tuple(parents[0].tolist())), Tree(parents)
    assert (known.depth, known.width) == (found.depth, found.width)
    assert Tree.of(tuple(parents[0].tolist())) is known


def test_the_table_of_children_is_as_wide_as_the_tree() -> None:
    assert Tree.chain(3).children.tolist() == [[[0], [1], [2], [-1]]]
    assert Tree.of((-1, -1, 0)).children.tolist() == [[[0, 1], [2, -1], [-1, -1], [-1, -1]]]


@pytest.mark.parametrize("seed", range(60))
def test_greedy_verdicts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    rows, size = rng.randint(1, 4), rng.randint(1, 8)
    parents = _parents(rng, rows, size)
    tokens = torch.zeros(rows, size, dtype=torch.long)
    live = torch.ones(rows, size, dtype=torch.bool)
    for row in range(rows):
        for node, parent in enumerate(parents[row].tolist()):
            beside = {int(tokens[row, one]) for one in range(node) if parents[row, one] == parent and live[row, one]}
            free = [word for word in range(WORDS) if word not in beside]  # siblings differ
            live[row, node] = bool(free) and (parent < 0 or bool(live[row, parent])) and rng.random() < 0.9
            tokens[row, node] = rng.choice(free or [0])
    own = torch.randint(WORDS, (rows, size + 1), generator=torch.Generator().manual_seed(seed))
    draft = Draft.guess(tokens, Tree(parents), live)
    compiled = follow(draft, own, CounterRNG.of(0, rows))
    monkeypatch.setattr(native_walk, "library", lambda: None)
    reference = follow(draft, own, CounterRNG.of(0, rows))
    for part in fields(compiled):
        one, other = getattr(compiled, part.name), getattr(reference, part.name)
        assert (one is other is None) or (one.dtype == other.dtype and torch.equal(one, other)), part.name
