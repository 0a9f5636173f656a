"""Chains that a decoder draws by itself in one call: the tokens and distributions that a pass after another would give,
and a cache that goes on from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.fewer_tokens import predicting
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.trained.distilled import SmallModel
from outrider.core.engine.conditioned import ConditionedDecoder
from outrider.core.engine.self_draft_views import View
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.kernels import native
from outrider.core.methods import make_rule
from outrider.core.trace import Trace
from outrider.core.tree import Tree

SHAPE = Config(
    vocabulary=96, hidden_size=64, layers=3, heads=2, kv_heads=1, head_dim=32, intermediate_size=96, qk_norm=True
)
ODD = replace(SHAPE, vocabulary=91)  # no whole number of tiles
PROMPT = [3, 17, 5, 88]

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler, or no AVX2")


def opened(shape: Config, sampling: Sampling, told: Tensor | None = None) -> Decoder:
    network = Decoder.random(shape, 3, dtype=torch.bfloat16, gain=3.0).network
    model = Decoder(network) if told is None else ConditionedDecoder(network)
    if isinstance(model, ConditionedDecoder) and told is not None:
        model.set_conditioning(told)
    model.begin([PROMPT], sampling)
    return model


@pytest.mark.parametrize("informed", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, ODD], ids=["tiles", "odd"])
def test_laws_are_those_of_the_tokens_before_them(shape: Config, informed: bool) -> None:
    told = torch.randn(1, 6, shape.hidden_size, generator=torch.Generator().manual_seed(2)) if informed else None
    sampling, numbers = Sampling(temperature=0.7), np.array([0.1, 0.9, 0.35, 0.6, 0.999])
    model = opened(shape, sampling, told)
    found = model.draw_chain(numbers)
    assert found is not None
    tokens, distributions = found
    chain = Draft.guess(tokens, Tree.chain(5, tokens.device), torch.ones_like(tokens, dtype=torch.bool))
    again = opened(shape, sampling, told).score(chain).distributions()
    torch.testing.assert_close(distributions.probs, again.probs[:, :5], atol=0.02, rtol=0.05)
    running = distributions.probs.double().cumsum(-1)[0]
    wanted = [
        int(torch.searchsorted(row, number * row[-1], right=True)) for row, number in zip(running, numbers, strict=True)
    ]
    assert tokens[0].tolist() == wanted and len(set(wanted)) > 1
    assert (told is None) or not torch.allclose(again.probs, opened(shape, sampling).score(chain).distributions().probs)


def test_what_is_kept_of_a_chain_is_read_no_more() -> None:
    sampling, kept = Sampling(), torch.tensor([4])
    model = opened(SHAPE, sampling)
    found = model.draw_chain(np.array([0.1, 0.2, 0.4, 0.6, 0.8]))
    assert found is not None
    tokens, _ = found
    draft = Draft.guess(tokens, Tree.chain(5, tokens.device), torch.ones_like(tokens, dtype=torch.bool))
    taken = torch.zeros(1, 5)
    verdict = Verdict(
        path=torch.tensor([[0, 1, 2, -1, -1]]), accepted=torch.tensor([3]), token=torch.tensor([9]),
        resampled=torch.tensor([True]), tried=taken.bool(), chance=taken, p=taken, q=taken,
    )  # fmt: skip
    model.keep(draft, verdict, kept)
    fresh = Decoder(model.network)
    fresh.begin([[*PROMPT, *tokens[0, :3].tolist(), 9]], sampling)
    numbers = np.array([0.3, 0.5])  # of a chain whose last token was kept unread, two tokens wait
    ours, theirs = (one.draw_chain(numbers) for one in (model, fresh))
    assert ours is not None and theirs is not None and torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].probs, theirs[1].probs, atol=0.02, rtol=0.05)
    model.keep(
        Draft.guess(ours[0], Tree.chain(2, tokens.device), torch.ones(1, 2, dtype=torch.bool)),
        replace(verdict, path=torch.tensor([[0, 1]]), accepted=torch.tensor([2]), token=torch.tensor([4])),
        torch.tensor([3]),
    )
    assert model.cache.rows.pending.tolist() == [[int(ours[0][0, 1]), 4]]
    fresh.begin([[*PROMPT, *tokens[0, :3].tolist(), 9, *ours[0][0].tolist(), 4]], sampling)
    ours, theirs = (one.draw_chain(numbers) for one in (model, fresh))
    assert ours is not None and theirs is not None and torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].probs, theirs[1].probs, atol=0.02, rtol=0.05)


def test_greedy_chains_are_the_likeliest_tokens() -> None:
    model = opened(SHAPE, Sampling(temperature=0))
    found = model.draw_chain(np.zeros(4))
    assert found is not None
    tokens, distributions = found
    chain = Draft.guess(tokens, Tree.chain(4, tokens.device), torch.ones_like(tokens, dtype=torch.bool))
    assert opened(SHAPE, Sampling()).score(chain).logits()[0, :4].argmax(-1).tolist() == tokens[0].tolist()
    assert distributions.width == 1 and torch.equal(distributions.sole(), tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_view_in_fewer_bits_draws_by_its_own_laws(temperature: float) -> None:
    sampling, numbers = Sampling(temperature=temperature), np.array([0.1, 0.9, 0.35, 0.6])

    def viewed(**options: Any) -> tuple[Decoder, View]:
        model = opened(SHAPE, sampling)
        view = model.view(**options)
        view.begin([PROMPT], sampling)
        return model, view

    model, view = viewed(bits=4)
    found = view.draw_chain(numbers)
    assert found is not None
    tokens, distributions = found
    chain = Draft.guess(tokens, Tree.chain(4, tokens.device), torch.ones_like(tokens, dtype=torch.bool))
    again = viewed(bits=4)[1].score(chain).distributions()
    if temperature:
        torch.testing.assert_close(distributions.probs, again.probs[:, :4], atol=0.02, rtol=0.05)
    else:
        assert torch.equal(distributions.sole(), again.sole()[:, :4])
    assert torch.equal(model.score(chain).logits(), opened(SHAPE, sampling).score(chain).logits())
    assert view.draw_chain(numbers) is None, "the model may keep what it has scored"
    for cannot in ({"window": (1, 2)}, {"exit": 1}):
        assert viewed(**cannot)[1].draw_chain(numbers) is None


def test_laws_of_other_kinds_take_a_pass_after_another() -> None:
    for sampling in (Sampling(top_k=5), Sampling(top_p=0.9), Sampling(min_p=0.1), Sampling(repetition_penalty=1.2)):
        assert opened(SHAPE, sampling).draw_chain(np.array([0.5])) is None
    float32 = Decoder.random(SHAPE, 3)
    float32.begin([PROMPT], Sampling())
    assert float32.draw_chain(np.array([0.5])) is None


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_chain_ends_where_its_law_is_unsure(last: bool, joint: bool) -> None:
    model, numbers = opened(SHAPE, Sampling()), np.array([0.1, 0.9, 0.35, 0.6, 0.999])
    whole = model.draw_chain(numbers)
    assert whole is not None
    sure = whole[1].probs[0].amax(-1)
    sure = sure.cumprod(0) if joint else sure
    for end in range(5):
        model = opened(SHAPE, Sampling())
        threshold = float(sure[: end + 1].min()) * 1.001
        below = int((sure < threshold).nonzero()[0])
        found = model.draw_chain(numbers, threshold, last, joint)
        assert found is not None and found[0].tolist() == [whole[0][0, : below + last].tolist()]
        assert model.cache.scored == below


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_chain_of_the_first_tokens_has_their_law(temperature: float) -> None:
    sampling, numbers = Sampling(temperature=temperature), np.array([0.1, 0.9, 0.35, 0.6, 0.999])
    network = Decoder.random(ODD, 3, dtype=torch.bfloat16, gain=3.0).network
    model, whole = predicting(Decoder(network), 48), Decoder(network)
    assert model.weight_bytes < whole.weight_bytes and model.network.layers is network.layers
    for each in (model, whole):
        each.begin([PROMPT], sampling)
    found = model.draw_chain(numbers)
    assert found is not None and int(found[0].max()) < 48
    tokens, distributions = found
    chain = Draft.guess(tokens, Tree.chain(5, tokens.device), torch.ones_like(tokens, dtype=torch.bool))
    logits = whole.score(chain).logits()[:, :5]
    model.begin([PROMPT], sampling)
    few = model.score(chain).logits()[:, :5]
    torch.testing.assert_close(few[..., :48], logits[..., :48], atol=0, rtol=0)
    assert bool(few[..., 48:].isneginf().all())
    if temperature:
        expected = (logits[..., :48] / temperature).softmax(-1)
        torch.testing.assert_close(distributions.dense().probs[..., :48], expected, atol=0.02, rtol=0.05)
    else:
        assert torch.equal(tokens, logits[..., :48].argmax(-1))


def test_a_distilled_model_drafts_the_tokens_that_it_has_learned_only() -> None:
    target, kept = opened(SHAPE, Sampling()), [5, 7, 9, *range(40, 60)]
    model = SmallModel(target, layers=1, vocabulary=kept).drafts(target)
    model.begin([PROMPT], Sampling())
    assert model.network.native_chain is not None and len(model.network.native_chain.head.weight) == 32  # whole tiles
    found = model.draw_chain(np.linspace(0, 0.99, 8))
    assert found is not None and set(found[0][0].tolist()) <= set(kept)
    model.begin([PROMPT], Sampling())
    logits = model.score(Draft.empty(1, torch.device("cpu"))).logits()[0, 0]
    assert logits.isfinite().nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("count", [0, 80])
@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"policy": "confidence"},
        {"policy": "confidence", "last": True},
        {"policy": "best", "cost": 0.25},
        {"policy": "window"},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_says_what_it_says_pass_by_pass(
    temperature: float, policy: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, sampling = Decoder.random(SHAPE, 3, dtype=torch.bfloat16), Sampling(temperature=temperature)

    def said() -> tuple[Trace, int]:
        small = Decoder.random(replace(SHAPE, layers=1), 3, dtype=torch.bfloat16)
        small = predicting(small, count) if count else small
        drafter = DraftModel(small, length=4, **policy)
        steps = decode(
            target,
            drafter,
            make_rule("token"),
            [PROMPT],
            sampling=sampling,
            max_new_tokens=40,
            seed=5,
        )
        return Trace(tuple(steps)), drafter.bytes_read

    at_once, read = said()
    monkeypatch.setattr(Decoder, "draw_chain", lambda *given: None)
    one_by_one, read_one_by_one = said()
    # one by one, the pass that follows an unsure token is made before it is known that no token is drawn from it
    assert read <= read_one_by_one if "last" in policy else read == read_one_by_one
    assert at_once.tokens() == one_by_one.tokens()
    assert at_once.summary().tokens_per_pass == one_by_one.summary().tokens_per_pass > 1
