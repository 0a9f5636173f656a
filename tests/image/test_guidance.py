"""Guidance: the output's distribution equals the guided target's under every drafter, and a guided decoder combines the
logits of two separate streams."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS, Method
from outrider.core.protocol import Rule
from outrider.core.rules.exact import Exact, GumbelMatch, Token
from outrider.core.testing.conformance import (
    KINDS,
    Case,
    enumerate_output,
    target_distribution,
    total_variation,
    trial_drafter,
)
from outrider.core.testing.table_target import TableTarget
from outrider.core.tree import Tree
from outrider.image.layout_planner import decoder
from outrider.image.model import ImageModel
from outrider.image.resolve_drafter import drafters
from outrider.image.token_model import TokenModel
from outrider.image.tokenizer import Layout, Tokenizer

pytestmark = pytest.mark.slow
PROMPTS = ((0, 1), (1, 0))
CONDITIONAL, UNCONDITIONAL = ((2, 0), (1, 1)), (0, 0)
LIMITS = (3, 2)


def guided(blur: float = 0.0, guidance: float = 2.5) -> Guided:
    """A guided table, or with `blur` a guided draft model of it."""
    return Guided(TableTarget(3, seed=1, sharpness=0.7, blur=blur), CONDITIONAL, UNCONDITIONAL, guidance)


class AnyRows(Guided):
    """A guided target of any number of rows, whose conditions are looked up by prompt."""

    def begin(self, prompts: Any, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Any:
        self.conditions = [CONDITIONAL[PROMPTS.index(tuple(prompt))] for prompt in prompts]
        return super().begin(prompts, sampling, needs)


def any_rows(blur: float = 0.0, guidance: float = 2.5) -> AnyRows:
    return AnyRows(TableTarget(3, seed=1, sharpness=0.7, blur=blur), CONDITIONAL, UNCONDITIONAL, guidance)


def settings() -> list[Any]:
    parameters = []
    for name in (*KINDS, "suffix", "token-recycling", "dynamic-tree"):
        method = DRAFTERS[name]
        parameters += [pytest.param(method, options, id=f"{name}{i}") for i, options in enumerate(method.test_options)]
    return parameters


@pytest.mark.parametrize(("method", "options"), settings())
@pytest.mark.parametrize("rule", [Exact(), Token()], ids=["exact", "token"])
def test_the_distribution_is_the_guided_one(method: Method, options: Mapping[str, Any], rule: Rule) -> None:
    case = Case(
        target=any_rows,
        drafter=partial(trial_drafter, method, options, lambda: any_rows(blur=0.4)),
        rule=rule,
        prompts=PROMPTS,
        limits=LIMITS,
    )
    for row, distribution in enumerate(enumerate_output(case)):
        expected = target_distribution(any_rows(), PROMPTS[row], Sampling(), LIMITS[row])
        assert total_variation(distribution, expected) < 1e-12


def test_guidance_of_one_and_zero_are_the_streams_alone() -> None:
    conditional = target_distribution(
        TableTarget(3, seed=1, sharpness=0.7), (*CONDITIONAL[0], *PROMPTS[0]), Sampling(), 3
    )
    assert total_variation(target_distribution(any_rows(guidance=1.0), PROMPTS[0], Sampling(), 3), conditional) < 1e-12
    assert total_variation(target_distribution(any_rows(), PROMPTS[0], Sampling(), 3), conditional) > 0.05
    unconditional = target_distribution(
        TableTarget(3, seed=1, sharpness=0.7), (*UNCONDITIONAL, *PROMPTS[0]), Sampling(), 3
    )
    assert (
        total_variation(target_distribution(any_rows(guidance=0.0), PROMPTS[0], Sampling(), 3), unconditional) < 1e-12
    )


@pytest.mark.parametrize("guidance", [-0.5, float("nan"), float("inf")])
def test_guidance_out_of_range_is_refused(guidance: float) -> None:
    with pytest.raises(InvalidOption, match="guidance"):
        guided(guidance=guidance)


def test_conditions_must_match_the_prompts() -> None:
    with pytest.raises(InvalidOption, match="pad all to the same length"):
        Guided(TableTarget(3), ((1,), (1, 2)), (0,))
    with pytest.raises(InvalidOption, match="2 conditions for 1 prompts"):
        guided().begin([(0,)], Sampling())


def test_guided_logits_combine_two_separate_streams(tokens: TokenModel) -> None:
    network, encoder = tokens.network(torch.float64), tokens.prompt_encoder
    prompts = [encoder.encode("red heart", "noto"), encoder.encode("cat")]
    target = Guided(decoder(network), prompts, encoder.unconditional, 3.0)
    roots = [[35], [35]]
    target.begin(roots, Sampling())
    draft = Draft.guess(torch.tensor([[3, 4, 5], [6, 7, 8]]), Tree.of((-1, 0, 0)), torch.ones(2, 3, dtype=torch.bool))
    logits = target.score(draft).logits()
    streams = []
    for stream in (prompts, [encoder.unconditional, encoder.unconditional]):
        inner = decoder(network)
        inner.begin([[*ids, 35] for ids in stream], Sampling())
        streams.append(inner.score(draft).logits())
    conditional, unconditional = streams
    torch.testing.assert_close(logits, unconditional + 3.0 * (conditional - unconditional))


def test_inference_equals_training(tokens: TokenModel) -> None:
    ids = torch.randint(0, 36, (2, 12))
    prompts = torch.tensor([tokens.prompt_encoder.encode("red heart", "noto"), tokens.prompt_encoder.unconditional])
    inputs = torch.cat([prompts, torch.full((2, 1), 35), ids[:, :-1]], 1)
    expected = tokens.double().logits(tokens.states(inputs))[:, -12:]
    tokens.float()
    target = decoder(tokens.network(torch.float64))
    target.begin(torch.cat([prompts, torch.full((2, 1), 35)], 1).tolist(), Sampling())
    chain = Draft.guess(ids, Tree.chain(12), torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(target.score(chain).logits()[:, :12], expected.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("jacobi", {"window": 12, "renew": "gumbel", "filler": "above"}),
        ("jacobi", {"window": 12, "renew": "couple", "filler": "left"}),
        ("draft-model", {"length": 4}),
        ("sampled-tree", {}),
        ("suffix", {}),
        ("token-recycling", {}),
    ],
)
def test_drafting_changes_no_code(im: ImageModel, drafter: str, options: dict[str, Any]) -> None:
    prompts = ["red heart", "cat face", "house"]
    plain = im.generate(prompts, drafter=None, rule="gumbel-match", guidance_scale=2.0, seed=5)
    drafted = im.generate(
        prompts, drafter=drafter, drafter_options=options, rule="gumbel-match", guidance_scale=2.0, seed=5
    )
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    assert all(len(result.tokens) == 256 for result in drafted)


def test_rows_of_a_batch_are_independent(im: ImageModel) -> None:
    def run(prompts: list[str], seeds: list[int]) -> list[list[int]]:
        prompt_ids = [im.prompt_encoder.encode_checked(prompt) for prompt in prompts]
        out: list[list[int]] = [[] for _ in prompts]
        roots = [[im.root]] * len(prompts)
        for step in decode(im.target(prompt_ids, 2.0), None, GumbelMatch(), roots, max_new_tokens=40, seed=seeds):
            out[step.row] += step.emitted
        return out

    batch = run(["red heart", "cat", "house"], [1, 2, 3])
    assert batch == [run([prompt], [seed])[0] for prompt, seed in (("red heart", 1), ("cat", 2), ("house", 3))]


UNTRAINED = [name for name in drafters() if DRAFTERS[name].draft_head is None]


@pytest.fixture(scope="module")
def small(tokens: TokenModel) -> ImageModel:
    """A model of 8x8 codes with a draft model that differs from the target."""
    torch.manual_seed(1)
    codec = Tokenizer(Layout(levels=(4, 3, 3), channels=(8, 16, 16, 16))).eval()
    other = TokenModel(**{**tokens.config, "layers": 1})
    return ImageModel(tokens.network(), tokens.prompt_encoder, codec, name="small", draft=other.network)


@pytest.mark.parametrize("drafter", UNTRAINED)
def test_every_untrained_drafter_equals_plain_decoding(small: ImageModel, drafter: str) -> None:
    plain = small.generate(["red cat", "house"], drafter=None, rule="gumbel-match", guidance_scale=2.0, seed=9)
    drafted = small.generate(["red cat", "house"], drafter=drafter, rule="gumbel-match", guidance_scale=2.0, seed=9)
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    assert len(drafted[0].tokens) == 64
