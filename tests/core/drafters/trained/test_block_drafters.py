"""The block drafters: each mechanism against its formula, written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outrider.core.decode import decode
from outrider.core.distribution import Distribution, Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.length_policies import Budget
from outrider.core.drafters.trained.blocks.chained import DFlyBlock, DominoBlock
from outrider.core.drafters.trained.blocks.path_selector import BlockConvolution, DFlash2Block, PathRunner
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.parallel_eagle import PEagleHead
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import random_draft_head
from outrider.core.testing.table_target import TableTarget
from outrider.core.training.dataset import Lesson, TargetTeacher, read
from outrider.core.training.losses import resolve

SHAPE = Config(vocabulary=31, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=48)
TAPS = ("layer.0", "layer.1", "last")
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


def target() -> Decoder:
    return Decoder.random(SHAPE, seed=5, dtype=torch.float64)


def shaken(head: Any, much: float = 0.2) -> Any:
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn(weight.shape) * much)
    return head.double().eval()


def batch(model: Decoder, head: Any) -> Any:
    return read(TargetTeacher(model), [Lesson(tuple(TEXT[:2]), tuple(TEXT[2:]))], head.needs)


def test_the_convolution_mixes_a_position_with_the_one_before_it_in_its_block() -> None:
    around = BlockConvolution(8, wide=3, group=4).double()
    x, entered = torch.randn(1, 6, 8, dtype=torch.float64), torch.randn(1, 6, 8, dtype=torch.float64)
    for kernel in around.kernels(entered):
        torch.testing.assert_close(around(x, kernel), x, atol=0, rtol=0)  # it starts as the identity
    shaken(around)
    dynamic = around.project(entered)[0].view(6, 2, 2, 2)  # [position, side, tap, group]
    for side, kernel in enumerate(around.kernels(entered)):
        for place, mixed in enumerate(around(x, kernel)[0]):
            for channel in range(8):
                taps = around.kernel[side, :, channel] + dynamic[place, side, :, channel // 4]
                past = x[0, place - 1, channel] if place % 3 else 0.0
                torch.testing.assert_close(mixed[channel], taps[0] * x[0, place, channel] + taps[1] * past)


def test_the_selector_walks_the_path_of_the_highest_scores_through_the_candidates() -> None:
    model = target()
    head = shaken(DFlash2Block(model, block=4, candidates=3, rank=5, group=8, taps=TAPS, vocabulary=range(4, 31)), 0.6)
    drafting = head.drafts(model)
    runner = PathRunner(drafting)
    runner.set_hidden(model.begin([TEXT], Sampling(), head.needs).hidden)
    runner.begin([TEXT], Sampling())
    said = runner.score(Draft.empty(1)).logits()[0, 0]
    assert int(said.isfinite().sum()) == 3
    states = runner._states[0]
    best, places = head.words.logits(states).topk(3)
    token, path = TEXT[-1], []

    def embedded(ids: Any) -> torch.Tensor:
        norm: torch.Tensor = head.embedded(model.network.embedding[ids])
        return norm

    for slot in range(4):
        ids = head.words.vocabulary[places[slot]]
        gates = head.gate(states[slot]) * head.before(embedded(token))
        scores = best[slot] + head.behind(embedded(ids)) @ gates
        if slot == 0:
            torch.testing.assert_close(said[places[0]], scores)
        token = int(ids[scores.argmax()])
        path.append(token)
    drafter = Learned(drafting, length=4)
    step = next(iter(decode(model, drafter, Exact(), [TEXT], sampling=Sampling(temperature=0), max_new_tokens=6)))
    assert list(step.drafted) == path
    plain = [int(head.words.vocabulary[place]) for place in places[:, 0]]
    assert path != plain  # the selector has changed the path


def test_the_selector_learns_from_tokens_that_are_no_candidates() -> None:
    head = DFlash2Block(target(), block=2, candidates=2, rank=2, group=8, taps=TAPS)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    best, places = head.kept(logits, torch.tensor([1, 3, -1]))
    assert places.tolist() == [[0, 1], [0, 3], [0, 1]] and best.tolist() == [[3, 2], [3, 0], [3, 2]]


def test_domino_remembers_a_block_as_a_gru_does() -> None:
    model = target()
    head = shaken(DominoBlock(model, block=3, recurrent=5, rank=2, taps=TAPS))
    gru = nn.GRU(32, 5, bias=False, batch_first=True).double()
    with torch.no_grad():
        gru.weight_ih_l0.copy_(head.read.weight)
        gru.weight_hh_l0.copy_(head.recur.weight)
    tokens = torch.tensor([TEXT[:3], TEXT[3:6]])
    memory, found = torch.zeros(2, 5, dtype=torch.float64), []
    for place in head.words.embed(tokens).unbind(1):
        memory = head._remember(memory, place)
        found.append(memory)
    torch.testing.assert_close(torch.stack(found, 1), gru(head.embedded(head.words.embed(tokens)))[0])


def test_dominos_loss_moves_from_the_plain_to_the_corrected_guesses() -> None:
    model = target()
    head = shaken(DominoBlock(model, block=3, recurrent=5, rank=2, taps=TAPS, anchors=8, base=0.5))
    head.train()
    work = batch(model, head)
    torch.manual_seed(0)
    losses = []
    for head.finished in (0.0, 0.25, 0.5, 1.0):
        head.zero_grad()
        torch.manual_seed(0)
        loss = head.loss(work, resolve("kl"))
        loss.backward()
        losses.append((loss.item(), bool(head.out.weight.grad is not None and head.out.weight.grad.any())))
    (first, corrected), (middle, _), (last, _), (end, _) = losses
    assert not corrected and last == end and middle == pytest.approx((first + last) / 2)


def test_dfly_gives_each_layer_its_own_mixture_of_taps() -> None:
    model = target()
    head = DFlyBlock(model, block=3, layers=2, correction=4, taps=TAPS)
    assert head.mixture.argmax(-1).tolist() == [0, 2]  # shallow taps first, deep ones last
    shaken(head)
    taps = torch.randn(1, 4, 96, dtype=torch.float64)
    parts = [norm(part) for norm, part in zip(head.tap_norms, taps.chunk(3, -1), strict=True)]
    for context, weights in zip(head._context(taps, torch.zeros(1, 4), None), head.mixture.softmax(-1), strict=True):
        mixed = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        torch.testing.assert_close(context, head.context_norm(head.fuse(torch.cat(parts, -1)) + mixed))


def test_p_eagle_trains_its_unknown_state() -> None:
    model = target()
    head = PEagleHead(model, depth=3, anchors=4, taps=TAPS).double()
    torch.manual_seed(0)
    head.loss(batch(model, head), resolve("kl")).backward()
    assert head.mask_hidden.grad is not None and head.mask_hidden.grad.any()


@pytest.mark.parametrize("price", [0.0, 0.05, 0.3, 2.0])
def test_the_budget_ends_a_chain_where_tokens_per_cost_are_highest(price: float) -> None:
    chances = [0.9, 0.8, 0.5, 0.9, 0.4, 0.2]
    expected = [1.0]
    for chance in torch.tensor(chances).cumprod(0).tolist():
        expected.append(expected[-1] + chance)
    best = max(range(7), key=lambda n: expected[n] / (1 + n * price))
    policy = Budget(6, price)
    policy.begin(1, torch.device("cpu"))
    policy.start()
    going, length = True, 0
    for depth, chance in enumerate(chances):
        probs = torch.tensor([[chance, 1 - chance]]) if chance >= 0.5 else torch.tensor([[chance] + [0.01] * 60])
        going = going and bool(policy.more(Distribution(probs, None, probs.shape[1]), depth))
        length += going
    assert length == best
    with pytest.raises(InvalidOption, match="price"):
        Budget(6, -1.0)


@pytest.mark.parametrize("name", ["dflash", "dflash2", "domino", "dfly", "dspark", "p-eagle"])
def test_block_drafters_draft_less_at_a_higher_price(name: str) -> None:
    def drafted(price: float) -> tuple[int, list[int]]:
        head = random_draft_head(DRAFTERS[name], TableTarget(7, seed=3))
        drafter = Learned(head, draft_kind="chain", length=6, policy="budget", price=price)
        sampling = Sampling(temperature=0)
        steps = list(
            decode(TableTarget(7, seed=3), drafter, Exact(), [[1, 4, 2]], sampling=sampling, max_new_tokens=12)
        )
        return sum(len(step.drafted) for step in steps), [token for step in steps for token in step.emitted]

    (most, one), (least, other) = drafted(0.0), drafted(0.9)
    assert most > least and one == other


def test_improbable_nodes_of_a_parallel_tree_are_left_out() -> None:
    def drafted(least: float) -> int:
        head = random_draft_head(DRAFTERS["dflash"], TableTarget(7, seed=3))
        drafter = Learned(head, draft_kind="dynamic", min_probability=least)
        steps = decode(
            TableTarget(7, seed=3), drafter, Exact(), [[1, 4, 2]], sampling=Sampling(temperature=0), max_new_tokens=8
        )
        return sum(len(step.drafted) for step in steps)

    assert drafted(0.0) > drafted(0.3) > 0
