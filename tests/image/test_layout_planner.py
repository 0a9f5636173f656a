"""The layout planner: its distribution over codes, and how it conditions the token model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.errors import InvalidOption
from outrider.image.layout_planner import LayoutPlanner, PlanConditioning, PlannedNetwork, decoder
from outrider.image.token_model import TokenModel
from outrider.image.tokenizer import Tokenizer

LEVELS = (4, 3, 3)
STYLES, WORDS = ("noto", "fluent"), ("cat", "face", "heart", "house", "red")
Make = Callable[..., TokenModel]


def make_planner(seed: int = 0) -> LayoutPlanner:
    torch.manual_seed(seed)
    return LayoutPlanner(codes=36, styles=STYLES, words=WORDS, levels=LEVELS, channels=4, side=4).eval()


def test_the_code_distribution_is_the_product_of_those_of_the_codebook_levels(codec: Tokenizer) -> None:
    planner = make_planner()
    prompt_ids = torch.tensor([planner.prompt_encoder.encode("red heart", "noto")])
    grids = torch.arange(36)[:, None].expand(-1, 16)
    with torch.no_grad():
        distributions = torch.stack([(-planner.nll(prompt_ids, grid[None])).exp()[0] for grid in grids])
        assert distributions.sum(0).allclose(torch.ones(16), atol=1e-5)  # over all codes, at every position
        logits = planner.logits(planner.features(prompt_ids))[0].flatten(1)
    first = logits[:4].softmax(0)  # of the codebook's first dimension, the slowest in its code numbers
    values = codec.codebook[:, 0].unique()
    for level, value in enumerate(values):
        assert distributions[codec.codebook[:, 0] == value].sum(0).allclose(first[level], atol=1e-5)


def test_the_order_of_words_does_not_matter() -> None:
    planner = make_planner()
    with torch.no_grad():
        a, b, c = (
            planner.features(torch.tensor([planner.prompt_encoder.encode(text, "noto")]))
            for text in ("red heart", "heart red", "heart")
        )
    assert a.allclose(b, atol=1e-5) and not a.allclose(c, atol=1e-3)


def test_the_planner_is_frozen_within_a_token_model(token_model: Make) -> None:
    model = token_model().train()
    assert model.teller is not None
    assert not any(weight.requires_grad for weight in model.teller.planner.parameters())
    assert not model.teller.planner.training and model.teller.training
    ids = torch.tensor([model.prompt_encoder.encode("cat", "noto") + [3] * 5])
    model.nll(ids, torch.full((1, 5), 2)).mean().backward()
    assert model.teller.out.weight.grad is not None and model.teller.out.weight.grad.abs().sum() > 0


def test_the_network_has_the_conditioning_of_the_trained_model(token_model: Make) -> None:
    model = token_model()
    encoder, network = model.prompt_encoder, model.network()
    assert isinstance(network, PlannedNetwork) and model.teller is not None
    prompts = [encoder.encode("red heart", "noto"), encoder.encode("house", "fluent")]
    conditioning = network.condition([[*prompt, 5] for prompt in prompts])
    with torch.no_grad():
        assert conditioning[:, encoder.length :].allclose(model.teller(torch.tensor(prompts)), atol=1e-5)
    assert not conditioning[:, : encoder.length].any()
    target = decoder(network)
    target.begin([[*prompt, 5] for prompt in prompts], Sampling(), frozenset())
    target.end()


def test_a_draft_model_shares_the_planner_of_its_target(token_model: Make) -> None:
    large = token_model()
    small = TokenModel(large, **{**large.config, "layers": 1})  # type: ignore[arg-type]
    assert large.teller is not None and small.teller is not None
    assert small.teller.planner is large.teller.planner
    assert not any("embedding" in name for name in small.teller.state_dict())
    independent = TokenModel(**{**large.config, "layers": 1})  # type: ignore[arg-type]
    assert independent.teller is not None and independent.teller.planner is not large.teller.planner


def test_a_draft_model_can_share_the_embeddings_of_its_target(token_model: Make) -> None:
    large = token_model()
    small = TokenModel(large, **{**large.config, "width": 8, "heads": 2, "lent": True})  # type: ignore[arg-type]
    assert "embedding" not in small.state_dict()
    assert small.network().embedding.shape == (large.prompt_encoder.size, 8)
    small.through.weight.data.zero_()
    assert not small.network().embedding.any()
    with pytest.raises(InvalidOption, match="lent"):
        TokenModel(**small.config)  # type: ignore[arg-type]


def test_levels_that_do_not_multiply_to_the_number_of_codes_are_rejected() -> None:
    with pytest.raises(InvalidOption, match="levels"):
        LayoutPlanner(codes=36, styles=STYLES, words=WORDS, levels=(4, 3))
    assert PlanConditioning(make_planner(), 16).out.out_channels == 16
