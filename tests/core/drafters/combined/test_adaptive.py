"""Adaptive choice: which drafter is chosen, and that models stay in step when others draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.combined.adaptive import Adaptive, Bandit, Complexity
from outrider.core.drafters.draft_model.model import DraftModel, DynamicTree
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup, chain_draft
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Drafter, Plain, Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact, GumbelMatch, Token
from outrider.core.testing.conformance import Case, enumerate_output, target_distribution, total_variation
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step

SHAPE = Config(vocabulary=31, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)
GREEDY = Sampling(temperature=0)
PROMPTS = [[3, 9, 4, 17, 9], [8], [20, 21, 22, 1]]


class Always(WeightFree):
    """Guesses the same tokens in every round."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        """Nothing to prepare."""

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        return chain_draft([self.tokens[: max(left, 0)] for left in room.tolist()], rng.device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        """Nothing to learn."""

    def end(self) -> None:
        """Nothing to free."""


class Right(Always):
    """Drafts the true continuation."""

    def __init__(self, texts: Sequence[Sequence[int]], length: int) -> None:
        super().__init__(())
        self.texts, self.length = texts, length

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.at = [0 for _ in prompts]

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        pairs = zip(self.texts, self.at, room.tolist(), strict=True)
        return chain_draft([text[at : at + min(self.length, max(left, 0))] for text, at, left in pairs], rng.device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self.at = [at + len(tokens) for at, tokens in zip(self.at, verdict.rows(draft), strict=True)]


def run(drafter: Drafter | None, limit: int = 30, **how: Any) -> tuple[list[list[int]], list[Step]]:
    out: list[list[int]] = [[] for _ in PROMPTS]
    steps = list(
        decode(Decoder.random(SHAPE, seed=1), drafter, how.pop("rule", Exact()), PROMPTS, max_new_tokens=limit, **how)
    )
    for step in steps:
        out[step.row] += step.emitted
    return out, steps


def named(*drafters: Drafter) -> dict[str, Drafter]:
    return {type(drafter).__name__: drafter for drafter in drafters}


def model() -> Decoder:
    return Decoder.random(SHAPE, seed=1)


@pytest.mark.parametrize("rule", [Exact(), GumbelMatch()], ids=["greedy", "gumbel-match"])
def test_models_keep_step_when_others_draft(rule: Any) -> None:
    """The draft models are the target: one that is out of step would no longer be always right."""
    sampling = GREEDY if isinstance(rule, Exact) else Sampling()
    arms: list[Drafter] = [
        DraftModel(model(), length=3),
        Always((29, 28)),
        DynamicTree(model(), nodes=4, depth=3),
    ]
    drafter = Adaptive(drafters=named(*arms), settings={"explore": 5.0}, costs={"Always": 0.01})
    found, steps = run(drafter, rule=rule, sampling=sampling)
    assert found == run(None, rule=rule, sampling=sampling)[0]
    assert {step.note for step in steps} == {"DraftModel", "Always", "DynamicTree"}
    if sampling.greedy:
        assert all(step.accepted == len(step.drafted) for step in steps if step.note == "DraftModel")


@pytest.mark.parametrize("rule", [Exact(), Token()], ids=["exact", "token"])
@pytest.mark.parametrize("by", ["bandit", "complexity"])
def test_models_among_the_drafters_keep_the_law(by: str, rule: Any) -> None:
    def adaptive() -> Drafter:
        small = TableTarget(3, seed=1, sharpness=0.7, blur=0.4)
        return Adaptive(drafters=named(DraftModel(small, length=2), PromptLookup(length=2)), by=by)

    prompts = [(0, 1), (2, 1, 0, 1, 2, 1)]
    case = Case(
        target=lambda: TableTarget(3, seed=1, sharpness=0.7),
        drafter=adaptive,
        rule=rule,
        prompts=prompts,
        limits=(3, 3) if isinstance(rule, Token) else (2, 2),
    )
    together = isinstance(rule, Token)  # one walk for drawn and fixed guesses; `exact` has several
    for row, distribution in enumerate(enumerate_output(case, together=together)):
        wanted = target_distribution(TableTarget(3, seed=1, sharpness=0.7), prompts[row], Sampling(), case.limits[row])
        assert total_variation(distribution, wanted) < 1e-12


def test_the_better_drafter_is_found_and_its_rival_judged_unasked() -> None:
    texts = run(None, sampling=GREEDY)[0]
    drafter = Adaptive(drafters=named(Always((29, 28)), Right(texts, 4)))
    found, steps = run(drafter, sampling=GREEDY)
    assert found == texts
    for row in range(3):
        notes = [step.note for step in steps if step.row == row]
        assert notes.count("Right") >= len(notes) - 2
    bandit = drafter._choosers[0]
    assert isinstance(bandit, Bandit) and bandit._count[0] == pytest.approx(bandit._count[1]), "both are always judged"


def test_costs_decide_between_equals_and_a_clock_measures() -> None:
    texts = run(None, sampling=GREEDY)[0]
    arms = [Right(texts, 6), Always((29,))]
    dear = Adaptive(
        drafters=named(*arms),
        costs={"Right": 5.0},
        verify=lambda rows, tokens: 1 + 0.01 * rows * tokens,
        settings={"explore": 0.05},
    )
    notes = [step.note for step in run(dear, sampling=GREEDY)[1] if step.row == 0]
    assert notes.count("Always") > len(notes) / 2
    ticks = iter(range(10_000))
    timed = Adaptive(drafters=named(*arms), clock=lambda: float(next(ticks)))
    found, steps = run(timed, sampling=GREEDY)
    assert found == texts and sum(step.note == "Right" for step in steps) > len(steps) / 2


def test_a_seed_gives_the_same_choices_alone_and_in_company() -> None:
    def notes(prompts: list[list[int]]) -> list[str]:
        drafter = Adaptive(drafters=named(DraftModel(model(), length=2), PromptLookup(length=3), Plain()))
        steps = decode(
            Decoder.random(SHAPE, seed=1), drafter, Exact(), prompts, sampling=GREEDY, max_new_tokens=20, seed=5
        )
        return [step.note for step in steps if step.row == 0]

    assert notes(PROMPTS) == notes(PROMPTS[:1])


def test_simple_text_is_told_from_complex_text() -> None:
    judge = Complexity(2, longest=10)
    simple, hard = [1, 2] * 20, list(range(600))
    assert judge.complexity(simple) < 0.2 < 0.9 < judge.complexity(hard)
    assert (judge.order(simple), judge.order(hard)) == ([0, 1], [1, 0])
    assert (judge.max_tokens(simple) or 0) > (judge.max_tokens(hard) or 0) == 1


def test_what_cannot_be_chosen_from_is_refused() -> None:
    with pytest.raises(InvalidOption, match="at least one"):
        Adaptive(drafters={})
    with pytest.raises(InvalidOption, match="bandit"):
        Adaptive(drafters=named(Always(())), by="luck")
