"""A plan: what it says of codes, how it is told, and whose it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.errors import InvalidOption
from outrider.image.layout_planner import Plan, PlannedTarget, Teller, decoder
from outrider.image.token_model import TokenModel
from outrider.image.tokenizer import Tokenizer

LEVELS = (4, 3, 3)
STYLES, WORDS = ("noto", "fluent"), ("cat", "face", "heart", "house", "red")
Make = Callable[..., TokenModel]


def plan(seed: int = 0) -> Plan:
    torch.manual_seed(seed)
    return Plan(codes=36, styles=STYLES, words=WORDS, levels=LEVELS, channels=4, side=4).eval()


def test_levels_are_those_of_the_codebook_and_their_laws_multiply(codec: Tokenizer) -> None:
    one = plan()
    asked = torch.tensor([one.names.encode("red heart", "noto"), one.names.free])
    every = torch.arange(36)
    grids = every[:, None].expand(-1, 16)
    with torch.no_grad():
        distributions = torch.stack([(-one.surprise(asked[:1], grid[None])).exp()[0] for grid in grids])
        assert distributions.sum(0).allclose(torch.ones(16), atol=1e-5)  # over all codes, at every place
        said = one.says(one.features(asked))[0].flatten(1)
    first = said[:4].softmax(0)  # of the codebook's first dimension, which its codes count last
    values = codec.codebook[:, 0].unique()
    for level, value in enumerate(values):
        assert distributions[codec.codebook[:, 0] == value].sum(0).allclose(first[level], atol=1e-5)


def test_words_count_in_any_order_and_what_was_not_asked_for_says_nothing() -> None:
    one = plan()
    names = one.names
    with torch.no_grad():
        a, b, c = (
            one.features(torch.tensor([names.encode(text, "noto")])) for text in ("red heart", "heart red", "heart")
        )
    assert a.allclose(b, atol=1e-5) and not a.allclose(c, atol=1e-3)


def test_a_plan_learns_no_more_once_it_is_told(token_model: Make) -> None:
    model = token_model().train()
    assert model.teller is not None
    assert not any(part.requires_grad for part in model.teller.plan.parameters())
    assert not model.teller.plan.training and model.teller.training
    ids = torch.tensor([model.names.encode("cat", "noto") + [3] * 5])
    model.surprise(ids, torch.full((1, 5), 2)).mean().backward()
    assert model.teller.out.weight.grad is not None and model.teller.out.weight.grad.abs().sum() > 0


def test_the_network_is_told_what_the_model_learned_with(token_model: Make) -> None:
    model = token_model()
    network = model.network()
    assert isinstance(network, PlannedTarget) and model.teller is not None
    asked = [model.names.encode("red heart", "noto"), model.names.encode("house", "fluent")]
    told = network.told([[*one, 5] for one in asked])
    with torch.no_grad():
        assert told[:, model.names.length :].allclose(model.teller(torch.tensor(asked)), atol=1e-5)
    assert not told[:, : model.names.length].any()
    target = decoder(network)
    target.begin([[*one, 5] for one in asked], Sampling(), frozenset())
    target.end()


def test_a_smaller_model_draws_by_the_plan_of_the_one_it_drafts_for(token_model: Make) -> None:
    large = token_model()
    small = TokenModel(large, **{**large.config, "layers": 1})  # type: ignore[arg-type]
    assert large.teller is not None and small.teller is not None
    assert small.teller.plan is large.teller.plan
    assert not any("embedding" in name for name in small.teller.state_dict())
    own = TokenModel(**{**large.config, "layers": 1})  # type: ignore[arg-type]
    assert own.teller is not None and own.teller.plan is not large.teller.plan


def test_a_smaller_model_reads_the_embeddings_of_the_one_it_drafts_for(token_model: Make) -> None:
    large = token_model()
    small = TokenModel(large, **{**large.config, "width": 8, "heads": 2, "lent": True})  # type: ignore[arg-type]
    assert "embedding" not in small.state_dict() and small.network().embedding.shape == (large.names.size, 8)
    small.through.weight.data.zero_()
    assert not small.network().embedding.any()
    with pytest.raises(InvalidOption, match="lent"):
        TokenModel(**small.config)  # type: ignore[arg-type]


def test_a_plan_that_fits_no_codes_is_refused() -> None:
    with pytest.raises(InvalidOption, match="levels"):
        Plan(codes=36, styles=STYLES, words=WORDS, levels=(4, 3))
    assert Teller(plan(), 16).out.out_channels == 16
