"""Guidance is exact: the distribution of the real loop's output is that of the guided target, whoever drafts; and the
two streams of a real decoder are what they are alone."""

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
ASKED, FREE = ((2, 0), (1, 1)), (0, 0)
LIMITS = (3, 2)


def guided(blur: float = 0.0, guidance: float = 2.5) -> Guided:
    """A table under guidance, or a blurred one that drafts for it."""
    return Guided(TableTarget(3, seed=1, sharpness=0.7, blur=blur), ASKED, FREE, guidance)


class Many(Guided):
    """As many rows as asked for, each with the condition that belongs to its prompt."""

    def begin(self, prompts: Any, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Any:
        self.asked = [ASKED[PROMPTS.index(tuple(prompt))] for prompt in prompts]
        return super().begin(prompts, sampling, needs)


def many(blur: float = 0.0, guidance: float = 2.5) -> Many:
    return Many(TableTarget(3, seed=1, sharpness=0.7, blur=blur), ASKED, FREE, guidance)


def settings() -> list[Any]:
    found = []
    for name in (*KINDS, "suffix", "token-recycling", "dynamic-tree"):
        method = DRAFTERS[name]
        found += [pytest.param(method, options, id=f"{name}{i}") for i, options in enumerate(method.trials)]
    return found


@pytest.mark.parametrize(("method", "options"), settings())
@pytest.mark.parametrize("rule", [Exact(), Token()], ids=["exact", "token"])
def test_the_law_is_the_guided_one(method: Method, options: Mapping[str, Any], rule: Rule) -> None:
    case = Case(
        target=many,
        drafter=partial(trial_drafter, method, options, lambda: many(blur=0.4)),
        rule=rule,
        prompts=PROMPTS,
        limits=LIMITS,
    )
    for row, distribution in enumerate(enumerate_output(case)):
        wanted = target_distribution(many(), PROMPTS[row], Sampling(), LIMITS[row])
        assert total_variation(distribution, wanted) < 1e-12


def test_guidance_changes_the_law_and_one_is_none() -> None:
    alone = target_distribution(TableTarget(3, seed=1, sharpness=0.7), (*ASKED[0], *PROMPTS[0]), Sampling(), 3)
    assert total_variation(target_distribution(many(guidance=1.0), PROMPTS[0], Sampling(), 3), alone) < 1e-12
    assert total_variation(target_distribution(many(), PROMPTS[0], Sampling(), 3), alone) > 0.05
    nothing = target_distribution(TableTarget(3, seed=1, sharpness=0.7), (*FREE, *PROMPTS[0]), Sampling(), 3)
    assert total_variation(target_distribution(many(guidance=0.0), PROMPTS[0], Sampling(), 3), nothing) < 1e-12


@pytest.mark.parametrize("guidance", [-0.5, float("nan"), float("inf")])
def test_guidance_out_of_range(guidance: float) -> None:
    with pytest.raises(InvalidOption, match="guidance"):
        guided(guidance=guidance)


def test_conditions_fit_the_prompts() -> None:
    with pytest.raises(InvalidOption, match="differ in length"):
        Guided(TableTarget(3), ((1,), (1, 2)), (0,))
    with pytest.raises(InvalidOption, match="2 conditions for 1 prompts"):
        guided().begin([(0,)], Sampling())


def test_a_decoder_s_streams_are_what_they_are_alone(tokens: TokenModel) -> None:
    network, names = tokens.network(torch.float64), tokens.prompt_encoder
    asked = [names.encode("red heart", "noto"), names.encode("cat")]
    target = Guided(decoder(network), asked, names.unconditional, 3.0)
    roots = [[35], [35]]
    target.begin(roots, Sampling())
    draft = Draft.guess(torch.tensor([[3, 4, 5], [6, 7, 8]]), Tree.of((-1, 0, 0)), torch.ones(2, 3, dtype=torch.bool))
    found = target.score(draft).logits()
    alone = []
    for one in (asked, [names.unconditional, names.unconditional]):
        inner = decoder(network)
        inner.begin([[*ids, 35] for ids in one], Sampling())
        alone.append(inner.score(draft).logits())
    torch.testing.assert_close(found, alone[1] + 3.0 * (alone[0] - alone[1]))


def test_a_decoder_s_laws_are_those_it_learned_with(tokens: TokenModel) -> None:
    ids = torch.randint(0, 36, (2, 12))
    before = torch.tensor([tokens.prompt_encoder.encode("red heart", "noto"), tokens.prompt_encoder.unconditional])
    read = torch.cat([before, torch.full((2, 1), 35), ids[:, :-1]], 1)
    said = tokens.double().logits(tokens.states(read))[:, -12:]
    tokens.float()
    target = decoder(tokens.network(torch.float64))
    target.begin(torch.cat([before, torch.full((2, 1), 35)], 1).tolist(), Sampling())
    chain = Draft.guess(ids, Tree.chain(12), torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(target.score(chain).logits()[:, :12], said.detach(), atol=1e-4, rtol=1e-4)


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
def test_one_seed_one_picture(im: ImageModel, drafter: str, options: dict[str, Any]) -> None:
    asked = ["red heart", "cat face", "house"]
    plain = im.generate(asked, drafter=None, rule="gumbel-match", guidance_scale=2.0, seed=5)
    found = im.generate(
        asked, drafter=drafter, drafter_options=options, rule="gumbel-match", guidance_scale=2.0, seed=5
    )
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert all(len(one.tokens) == 256 for one in found)


def test_rows_do_not_notice_each_other(im: ImageModel) -> None:
    def run(prompts: list[str], seeds: list[int]) -> list[list[int]]:
        asked = [im.names.encode_checked(one) for one in prompts]
        out: list[list[int]] = [[] for _ in prompts]
        roots = [[im.root]] * len(prompts)
        for step in decode(im.target(asked, 2.0), None, GumbelMatch(), roots, max_new_tokens=40, seed=seeds):
            out[step.row] += step.emitted
        return out

    together = run(["red heart", "cat", "house"], [1, 2, 3])
    assert together == [run([one], [seed])[0] for one, seed in (("red heart", 1), ("cat", 2), ("house", 3))]


ALONE = [name for name in drafters() if "draft_head" not in DRAFTERS[name].needs]


@pytest.fixture(scope="module")
def small(tokens: TokenModel) -> ImageModel:
    """Pictures of 8x8 codes, and a draft model that is not the target."""
    torch.manual_seed(1)
    codec = Tokenizer(Layout(levels=(4, 3, 3), channels=(8, 16, 16, 16))).eval()
    other = TokenModel(**{**tokens.config, "layers": 1})
    return ImageModel(tokens.network(), tokens.prompt_encoder, codec, name="small", draft=other.network)


@pytest.mark.parametrize("drafter", ALONE)
def test_every_drafter_draws_plain_decoding_s_picture(small: ImageModel, drafter: str) -> None:
    plain = small.generate(["red cat", "house"], drafter=None, rule="gumbel-match", guidance_scale=2.0, seed=9)
    found = small.generate(["red cat", "house"], drafter=drafter, rule="gumbel-match", guidance_scale=2.0, seed=9)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert len(found[0].tokens) == 64
