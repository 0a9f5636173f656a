"""Passes of the compiled kernels over rows of unequal drafts: tokens that are not live are left out, and the others get
what they get in a pass over all tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.native.native_pass import NativePass
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.kernels import native
from outrider.core.protocol import Scores
from outrider.core.tree import Tree

SHAPE = Config(
    vocabulary=96, hidden_size=64, layers=3, heads=6, kv_heads=2, head_dim=32, intermediate_size=96, qk_norm=True
)
PROMPTS = [[3, 17, 5, 88], [9], [40, 41, 42, 43, 44, 45, 46], [7, 8, 7]]
TAPS = frozenset({"embedding", "layer.1", "last"})

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler, or no AVX2")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens in each call of the kernels."""
    counts: list[int] = []
    real = NativePass.arguments

    def arguments(self: NativePass, x: torch.Tensor, *others: Any) -> Any:
        counts.append(len(x))
        return real(self, x, *others)

    monkeypatch.setattr(NativePass, "arguments", arguments)
    return counts


def unequal(tree: Tree, rows: int, rng: random.Random) -> Draft:
    """A draft of random tokens in which each row has some of the nodes, the last one none."""
    live = []
    for row in range(rows):
        alive: list[bool] = []
        for parent in tree.parents[0].tolist():
            alive.append((parent < 0 or alive[parent]) and row < rows - 1 and rng.random() < 0.7)
        live.append(alive)
    tokens = torch.tensor([[rng.randrange(SHAPE.vocabulary) for _ in range(tree.size)] for _ in range(rows)])
    return Draft.guess(tokens, tree, torch.tensor(live))


def whole(draft: Draft) -> Draft:
    return replace(draft, live=torch.ones_like(draft.live))


def taken(draft: Draft) -> Verdict:
    """The deepest live path of each row."""
    path = torch.full((draft.rows, draft.tree.depth), -1)
    for row in range(draft.rows):
        alive = [node for node in range(draft.size) if draft.live[row, node]]
        best = max(alive, key=lambda node: int(draft.tree.depths[0, node]), default=None)
        if best is not None:
            nodes = [node for node in draft.tree.paths[0, best].tolist() if node >= 0]
            path[row, : len(nodes)] = torch.tensor(nodes)
    nothing = torch.zeros(draft.rows, draft.size)
    token = torch.full((draft.rows,), 11)
    return Verdict(path, (path >= 0).sum(1), token, token < 0, nothing > 0, *[nothing] * 3)


def compare(found: Scores, wanted: Scores, live: torch.Tensor) -> None:
    some = torch.nn.functional.pad(live, (1, 0), value=True)
    assert torch.equal(found.logits()[some], wanted.logits()[some])
    assert not found.logits()[~some].any()
    for tap in TAPS:
        assert torch.equal(found.hidden[tap][some], wanted.hidden[tap][some])


@pytest.mark.parametrize("cache_bits", [None, 8])
@pytest.mark.parametrize("wait", [1, 3])
@pytest.mark.parametrize(
    "tree", [Tree.chain(5), Tree.of((-1, -1, 0, 0, 1, 2, 5, 4)), Tree.chain(40)], ids=["chain", "tree", "long"]
)
def test_rows_get_what_they_get_beside_dead_nodes(
    tree: Tree, wait: int, cache_bits: int | None, counted: list[int]
) -> None:
    network = Decoder.random(SHAPE, 3, dtype=torch.bfloat16, gain=3.0).network
    rng, models = random.Random(5), [Decoder(network, cache_bits=cache_bits) for _ in range(2)]
    for model in models:
        model.begin(PROMPTS, Sampling(), TAPS)
        model.keep(Draft.empty(4), taken(Draft.empty(4)), torch.ones(4, dtype=torch.long))
        if wait > 1:  # committed tokens that were not read, in unequal number
            ahead = Draft.guess(
                torch.arange(8).view(4, 2), Tree.chain(2), torch.tensor([[True] * 2] * 2 + [[False] * 2] * 2)
            )
            verdict = taken(ahead)
            model.keep(ahead, verdict, verdict.accepted + 1)
    for _ in range(3):
        draft = unequal(tree, 4, rng)
        counted.clear()
        found = models[0].score(draft)
        pending = sum(models[0].cache.rows.host_pending)
        assert counted == [pending + int(draft.live.sum())]
        compare(found, models[1].score(whole(draft)), draft.live)
        verdict = taken(draft)
        models[0].keep(draft, verdict, verdict.accepted + 1)
        models[1].keep(whole(draft), verdict, verdict.accepted + 1)


def test_logits_that_are_computed_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.core.engine.self_draft_views._MAX_LOGITS", 0)
    network = Decoder.random(SHAPE, 3, dtype=torch.bfloat16, gain=3.0).network
    draft, model = unequal(Tree.chain(5), 4, random.Random(2)), Decoder(network)
    model.begin(PROMPTS, Sampling(), TAPS)
    found, other = model.score(draft), Decoder(network)
    other.begin(PROMPTS, Sampling(), TAPS)
    compare(found, other.score(whole(draft)), draft.live)
    assert torch.equal(found.row(0, draft).logits(), found.logits()[:1])
