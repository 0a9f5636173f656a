"""Trees of a given shape drawn in one call: they are the trees that torch draws level by level, siblings are drawn
without replacement, and drafting with them changes no token."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.eagle import Eagle3Head
from outrider.core.drafters.trained.head_runner import HeadRunner, ready
from outrider.core.drafters.trained.heads import MedusaHeads
from outrider.core.engine.linear import fastest
from outrider.core.engine.native.sampled_tree import NativeHeads, shape_of
from outrider.core.engine.network import random_network
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.kernels import native
from outrider.core.methods import make_rule
from outrider.core.protocol import DrawnTree
from outrider.core.rng import CounterRNG

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no compiler")
SHAPE = Config(vocabulary=101, hidden_size=64, layers=3, heads=2, kv_heads=2, head_dim=32, intermediate_size=96)
TREE = (-1, -1, -1, 0, 0, 1, 3, 5)
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "medusa": (MedusaHeads, {"heads": 3, "layers": 2}),
    "medusa, few tokens": (MedusaHeads, {"heads": 3, "vocabulary": 48}),
    "eagle3": (Eagle3Head, {}),
    "eagle3, few tokens": (Eagle3Head, {"vocabulary": 48}),
}
PROMPTS = [[3, 14, 15, 92, 65, 35], [8, 97, 9]]


def learned(kind: str, draft_kind: str) -> tuple[Decoder, Learned]:
    made, options = KINDS[kind]
    network = random_network(SHAPE, 3, dtype=torch.bfloat16)
    target = Decoder(network.map_linears(fastest))
    torch.manual_seed(0)
    head = made(Decoder(random_network(SHAPE, 3)), **options)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return target, Learned(ready(head, target), draft_kind=draft_kind, tree=TREE)


def drafts(kind: str, draft_kind: str, sampling: Sampling, compiled: bool) -> list[Any]:
    """The drafts of some rounds, each after what plain decoding emits."""
    target, drafter = learned(kind, draft_kind)
    found: list[Any] = []

    class Seen(Learned):
        def propose(self, room: Any, rng: CounterRNG) -> Any:
            with patch.object(HeadRunner, "draw_tree", HeadRunner.draw_tree if compiled else lambda *_: None):
                found.append(super().propose(room, rng))
            return found[-1]

    drafter.__class__ = Seen
    for _ in decode(
        target, drafter, make_rule("gumbel-match"), PROMPTS, sampling=sampling, max_new_tokens=[9, 7], seed=[5, 6]
    ):
        pass
    return found


@pytest.mark.parametrize("draft_kind", ["sampled", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_those_of_torch(kind: str, draft_kind: str) -> None:
    sampling = Sampling(temperature=0.7)
    assert learned(kind, draft_kind)[1].model.draft_head is not None
    pairs = list(zip(*(drafts(kind, draft_kind, sampling, compiled) for compiled in (True, False)), strict=False))
    assert len(pairs) > 2
    alike = 0.0
    for quick, slow in pairs:
        if quick.size != slow.size or not quick.size:  # another token was accepted, or there is no room
            break
        assert torch.equal(quick.live, slow.live)
        alike += float((quick.tokens == slow.tokens).float().mean()) / len(pairs)
        if draft_kind == "sampled":
            root = [each.distributions.dense().probs[:, 0].float() for each in (quick, slow)]
            torch.testing.assert_close(*root, atol=0.02, rtol=0.05)  # logits of 16 bits
            index = quick.source[..., None].expand(-1, -1, quick.distributions.width)
            assert (quick.distributions.probs.gather(1, index).sum(-1) - 1).abs().max() < 1e-4
    assert alike > 0.6


@pytest.mark.parametrize("rule", ["gumbel-match", "exact"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_drafting_changes_no_token(kind: str, rule: str) -> None:
    sampling = Sampling(temperature=0.0 if rule == "exact" else 0.8)

    def tokens(drafter: Any, target: Decoder) -> list[list[int]]:
        rows: list[list[int]] = [[], []]
        for step in decode(target, drafter, make_rule(rule), PROMPTS, sampling=sampling, max_new_tokens=24, seed=3):
            rows[step.row] += step.emitted
        return rows

    target, drafter = learned(kind, "sampled")
    assert tokens(drafter, target) == tokens(None, target)


def test_siblings_are_drawn_without_replacement() -> None:
    """Over a grid of uniforms, pairs of siblings have the probability p(a) p(b) / (1 - p(a))."""
    torch.manual_seed(1)
    small = Config(vocabulary=16, hidden_size=32, layers=1, heads=1, kv_heads=1, head_dim=32, intermediate_size=32)
    target = Decoder(random_network(small, 3, dtype=torch.bfloat16).map_linears(fastest))
    head = ready(MedusaHeads(Decoder(random_network(small, 3)), heads=1), target)
    heads = head.native_heads()
    assert isinstance(heads, NativeHeads)
    shape, steps = shape_of((-1, -1)), 80
    assert shape is not None
    state, grid = torch.randn(32).bfloat16(), (np.arange(steps) + 0.5) / steps
    seen: Counter[tuple[int, ...]] = Counter()
    drawn: DrawnTree | None = None
    for first in grid:
        for second in grid:
            drawn = heads.draw(state, shape, np.array([first, second]), 1.5)
            assert drawn is not None
            seen[tuple(drawn.tokens.tolist())] += 1
    assert drawn is not None
    p = drawn.distributions[0].double()
    expected = p[:, None] * p / (1 - p[:, None])
    expected.fill_diagonal_(0)
    found = torch.zeros_like(expected)
    for (one, other), count in seen.items():
        found[one, other] = count / steps**2
    assert (found - expected).abs().max() < 2 / steps
    assert 0.5 * float((found - expected).abs().sum()) < 0.06


def test_shapes_with_scattered_siblings_are_left_to_torch() -> None:
    assert shape_of((-1, -1, 1, 0)) is None and shape_of(()) is None
    shape = shape_of((-1, -1, 0, 1, 1))
    assert shape is not None and (shape.depth, shape.widest, shape.inner) == (2, 2, 2)
