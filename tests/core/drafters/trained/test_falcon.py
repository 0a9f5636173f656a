"""Falcon: several positions per pass, consecutive passes, and glancing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.falcon import FalconHead
from outrider.core.engine.trainable.block import AttentionMask
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import InvalidOption
from outrider.core.training.dataset import Lesson, TargetTeacher, read
from outrider.core.training.draft_head import Batch
from outrider.core.training.losses import resolve
from outrider.core.tree import Tree

SHAPE = Config(vocabulary=31, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=48)
TOKENS = [3, 14, 15, 9, 2, 6, 5, 3]


def head(model: Decoder, **config: Any) -> FalconHead:
    torch.manual_seed(1)
    found: FalconHead = FalconHead(model, **{"block": 2, **config}).to(model.network.dtype)
    return found


def lesson(model: Decoder) -> Batch:
    return read(TargetTeacher(model), [Lesson(tuple(TOKENS[:2]), tuple(TOKENS[2:] * 3))], frozenset({"last"}))


def test_the_next_pass_continues_from_the_drafted_tokens() -> None:
    """Compared with the same computation in one pass, without a cache and levels."""
    model = Decoder.random(SHAPE, seed=5, dtype=torch.float64)
    learner = head(model).eval()
    runner = Learned(learner.drafts(model)).model
    prefill = model.begin([TOKENS], Sampling(), learner.needs)
    runner.set_hidden(prefill.hidden)
    runner.begin([TOKENS], Sampling())
    said = [runner.score(Draft.empty(1)).logits()[0]]
    drafted = [7, 11, 4]
    for node in range(3):
        ids = torch.tensor([drafted[: node + 1]])
        said.append(runner.score(Draft.guess(ids, Tree.chain(node + 1), ids >= 0), node).logits()[0])

    def block(x: torch.Tensor) -> torch.Tensor:
        """The layer's inputs [1, T, D] -> the states [2, D] of the next positions."""
        length = x.shape[1]
        places = torch.arange(length)[None]
        cos, sin = learner.angles(places, length, x.dtype)
        context = learner._attend_to(x, AttentionMask(cos, sin, None))
        inputs = x[:, -1:] + learner.place
        return learner._predicted(inputs, AttentionMask(cos[:, -1:], sin[:, -1:], None, context=context))[0]

    with torch.no_grad():
        x = learner._input(prefill.hidden["last"], torch.tensor([TOKENS[1:]]))  # the first has no state before it
        first = block(x)
        drawn = learner._input(first[None], torch.tensor([drafted[:2]]))
        second = block(torch.cat([x, drawn], 1))
        wanted = learner.logits(torch.cat([first, second]))
    torch.testing.assert_close(torch.cat(said), wanted, atol=1e-6, rtol=1e-6)


def test_positions_of_a_block_attend_to_one_another() -> None:
    model = Decoder.random(SHAPE, seed=5, dtype=torch.float64)
    learner, batch = head(model, block=3).eval(), lesson(model)
    with torch.no_grad():
        before = learner.block_states(batch, torch.tensor([[4, 6]]))
        learner.place[2] += 1
        after = learner.block_states(batch, torch.tensor([[4, 6]]))
    assert (before != after).any(-1).all()


def test_glancing_shows_only_blocks_that_were_wrong() -> None:
    model = Decoder.random(SHAPE, seed=5, dtype=torch.float64)
    batch, roots = lesson(model), torch.arange(2, 16)[None]
    with torch.no_grad():
        plain = head(model, block=3, noise=0).eval().block_states(batch, roots)
        same = head(model, block=3, noise=0, glance=0).train().block_states(batch, roots)
        glanced = head(model, block=3, noise=0, glance=1).train().block_states(batch, roots)
    torch.testing.assert_close(same, plain)
    said = head(model).words.logits(plain).argmax(-1)
    labels = torch.stack([batch.labels(k + 1).gather(1, roots) for k in range(3)], -1)
    wrong = (said != labels).any(-1)
    assert wrong.any()
    changed = (glanced != plain).flatten(2).any(-1)
    assert torch.equal(changed, wrong), "a correct block is not shown the truth"


def test_it_learns_to_predict_states() -> None:
    model = Decoder.random(SHAPE, seed=5)
    learner, batch = head(model), lesson(model)
    torch.autograd.backward(learner.loss(batch, resolve("kl")))
    assert all(one.grad is not None and bool(one.grad.any()) for one in learner.parameters())
    far = head(model, regress=50.0)
    torch.manual_seed(0)
    near_loss = head(model, regress=0.0, noise=0, glance=0).loss(batch, resolve("kl"))
    torch.manual_seed(0)
    assert far.loss(batch, resolve("kl")) > near_loss
    with pytest.raises(InvalidOption, match="glance is 2"):
        head(model, glance=2)
    with pytest.raises(InvalidOption, match="1 or more"):
        head(model, block=0)
