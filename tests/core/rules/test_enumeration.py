"""Rung 1: the distribution of the real loop's output, every branch of chance walked, against the target's own.

Over 400 lines: every rule meets the same drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Distribution, Sampling
from outrider.core.draft import Draft, Verdict, select
from outrider.core.drafters.draft_model.model import DraftModel, SampledTree, TopKTree
from outrider.core.drafters.length_policies import Confidence
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.methods import DRAFTERS, RULES, Method
from outrider.core.protocol import Drafter, Prefill, Prompts, Rule, Scores
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.rules.block import block
from outrider.core.rules.exact import Block, Exact, SampleMatch, Token
from outrider.core.rules.relaxed import Lenience, Trust, Typical
from outrider.core.testing.broken_rules import Hindsight, Misreport, ResampleFromP, Survivors
from outrider.core.testing.conformance import (
    KINDS,
    Case,
    Enumerator,
    SequenceDistribution,
    enumerate_output,
    target_distribution,
    total_variation,
    trial_drafter,
)
from outrider.core.testing.table_target import TableTarget
from outrider.core.tree import Tree
from tests.turns import takes_turn

PROMPTS = ((0, 1), (2, 1, 0, 1))
LIMITS = (3, 2)


def turned(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that depends on all tokens before."""
    return logits.roll(int(ids.sum()) % 3, -1) / ids.shape[1]


SAMPLINGS = {
    "T=1": Sampling(),
    "T=0.7, top-k 2": Sampling(temperature=0.7, top_k=2),
    "top-p 0.8": Sampling(top_p=0.8),
    "min-p 0.3": Sampling(min_p=0.3),
    "greedy": Sampling(temperature=0),
    "penalties, end": Sampling(
        repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, end=(2,), temperature=1.2
    ),
    "processor": Sampling(processors=(turned,)),
}


def target() -> TableTarget:
    return TableTarget(3, seed=1, sharpness=0.7)


def model() -> TableTarget:
    return TableTarget(3, seed=1, sharpness=0.7, blur=0.4)


def distance(drafter: Callable[[], Drafter], rule: Rule, sampling: Sampling, **how: Any) -> float:
    """The worst total variation over the prompts, which share a batch."""
    case = Case(
        target=target, drafter=drafter, rule=rule, prompts=PROMPTS, sampling=sampling, limits=how.pop("limits", LIMITS)
    )
    distributions = enumerate_output(case, **how)
    wanted = [target_distribution(target(), p, sampling, case.limits[row]) for row, p in enumerate(PROMPTS)]
    return max(total_variation(one, other) for one, other in zip(distributions, wanted, strict=True))


def fits(method: Method, options: Mapping[str, Any], rule: Method) -> bool:
    return rule.name != "block" or method.name == "draft-model"


EXACT = [rule for rule in RULES.values() if rule.lossless]
RELAXED = [rule for rule in RULES.values() if not rule.lossless]
COMBINATIONS = [
    pytest.param(method, options, rule, id=f"{method.name}{i}-{rule.name}")
    for method in DRAFTERS.values()
    for i, options in enumerate(method.test_options)
    for rule in EXACT
    if fits(method, options, rule)
]


def slowly(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters of which only some run in the fast part."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


def settings() -> list[Any]:
    """Kinds of drafts meet every rule and sampling (a processor under rules that compare distributions only); further
    drafters of those kinds meet the default rule, and in turns every rule and every sampling under the default; further
    options of a drafter take turns. The fast part has kinds under every rule, and every drafter under the default,
    once."""
    found = []
    for one in COMBINATIONS:
        method, options, rule = one.values
        for sampling in SAMPLINGS:
            if sampling == "processor" and rule.same_tokens:
                continue
            kind, usual, first = method.name in KINDS, rule.name == "exact", options is method.test_options[0]
            quick = (
                first
                and (kind or usual)
                and (sampling == "T=1" or (kind and usual and sampling in ("penalties, end", "processor")))
            )
            always = quick or (kind and first)
            if (kind or usual or sampling == "T=1") and (always or takes_turn(one.id, sampling)):
                marks = [] if quick else [pytest.mark.slow]
                found.append(pytest.param(*one.values, sampling, id=f"{one.id}-{sampling}", marks=marks))
    return found


@pytest.mark.parametrize(("method", "options", "rule", "sampling"), settings())
def test_exact_rules_keep_the_law(
    method: Method, options: Mapping[str, Any], rule: Method, sampling: str, measured: Any
) -> None:
    alike = "columns" not in options  # guesses from above or the left: in other steps for each row of a batch
    found = distance(partial(trial_drafter, method, options, model), rule.make(), SAMPLINGS[sampling], together=alike)
    measured("enumeration: total variation from the target, exact rules", name=rule.name, value=found)
    assert found < 1e-12


@pytest.mark.parametrize("rule", RELAXED, ids=lambda rule: rule.name)
@pytest.mark.parametrize("name", slowly(KINDS, ("draft-model", "top-k-tree")))
def test_relaxed_rules_are_exact_at_their_anchor(name: str, rule: Method, measured: Any) -> None:
    method = DRAFTERS[name]
    anchored = rule.make(**(rule.exact_at or {}))
    assert rule.exact_at is not None and anchored.lossless and not rule.make().lossless
    found = distance(partial(trial_drafter, method, method.test_options[0], model), anchored, Sampling())
    measured("enumeration: total variation from the target, relaxed rules at their anchor", name=rule.name, value=found)
    assert found < 1e-12


class Blend:
    """Drawn and fixed nodes as siblings, parents and children of one another."""

    vocabulary, needs, bytes_read = None, frozenset[str](), 0

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.model = model()
        self.model.begin(prompts, sampling)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        rows = len(room)
        tree = Tree.of((-1, -1, 0, 1, 1, -1))
        root = self.model.score(Draft.empty(rows)).distribution(torch.zeros(rows, dtype=torch.long))
        first = rng.sample(root, 0, Purpose.DRAW)
        guessed = torch.ones_like(first)
        both = Draft.guess(torch.stack([first, guessed], 1), Tree.of((-1, -1)), torch.ones(rows, 2, dtype=torch.bool))
        after = self.model.score(both).distribution(torch.full((rows,), 2))
        second = rng.sample(after, 3, Purpose.DRAW)
        last = rng.sample(root.without(first, torch.ones_like(first, dtype=torch.bool)), 5, Purpose.DRAW)
        tokens = torch.stack([first, guessed, guessed * 2, second, guessed * 0, last], 1)
        distributions = [root.dense().probs, after.dense().probs]
        live = tree.depths < room[:, None]
        live[:, 5] &= (root.dense().probs > 0).sum(1) > 1  # something is left to draw
        source = torch.tensor([[0, -1, -1, 1, -1, 0]]).expand(rows, -1)
        return Draft(tokens, tree, live, Distribution(torch.stack(distributions, 1), None, 3), source)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self.model.keep(draft, verdict, verdict.accepted + 1)

    def end(self) -> None:
        self.model.end()


class Company:
    """Several kinds of draft in one batch, the prompt's length deciding which kind a row gets."""

    vocabulary, needs, bytes_read = None, frozenset[str](), 0

    def __init__(self) -> None:
        self.members: list[Drafter] = [
            DraftModel(model(), length=2),
            TopKTree(model(), tree=(-1, -1, 0)),
            PromptLookup(length=2),
            SampledTree(model(), tree=(-1, -1, 1)),
            Jacobi(window=2),
        ]

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.which = torch.tensor([len(prompt) % len(self.members) for prompt in prompts])
        for member in self.members:
            member.begin(prefill, prompts, sampling)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        rooms = [torch.where(self.which == i, room, -1) for i in range(len(self.members))]
        drafts = [
            member.propose(room, rng.fork(i)) for i, (member, room) in enumerate(zip(self.members, rooms, strict=True))
        ]
        return select(drafts, self.which)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for i, member in enumerate(self.members):
            member.observe(draft, scores, verdict, rng.fork(i))

    def end(self) -> None:
        for member in self.members:
            member.end()


@pytest.mark.parametrize("rule", [Exact(), Token()], ids=["exact", "token"])
@pytest.mark.parametrize("sampling", ["T=1", "T=0.7, top-k 2", "greedy"])
def test_kinds_may_mix_within_a_tree(rule: Rule, sampling: str) -> None:
    assert distance(Blend, rule, SAMPLINGS[sampling]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Exact(), Token(), SampleMatch()], ids=["exact", "token", "sample-match"])
def test_kinds_may_mix_within_a_batch(rule: Rule) -> None:
    prompts = [(1,), (0, 1), (2, 0, 2), (1, 0, 1, 0), (0, 0, 1, 0, 0)]
    case = Case(target=target, drafter=Company, rule=rule, prompts=prompts, limits=(3, 2))
    for row, distribution in enumerate(enumerate_output(case)):
        wanted = target_distribution(target(), prompts[row], Sampling(), case.limits[row % 2])
        assert total_variation(distribution, wanted) < 1e-12


@pytest.mark.parametrize("rule", [Exact(), Token()], ids=["exact", "token"])
def test_what_a_sure_law_leaves_to_later_siblings_is_not_lost(rule: Rule) -> None:
    def sure() -> TableTarget:
        return TableTarget(3, seed=1, sharpness=20, blur=0.4)

    assert distance(lambda: SampledTree(sure(), tree=(-1, -1, 0)), rule, Sampling()) < 1e-12


@pytest.mark.parametrize(
    "policy", [Confidence(3, threshold=0.45), Confidence(2, threshold=0.6), Confidence(3, threshold=0.3, joint=True)]
)
@pytest.mark.parametrize("rule", [Block(), Token()], ids=["block", "token"])
def test_a_length_decided_before_the_draw_is_exact(rule: Rule, policy: Confidence) -> None:
    assert distance(lambda: DraftModel(model(), policy=policy), rule, Sampling()) < 1e-12


# ---- negative controls: what must be caught


class Reused(Enumerator):
    """Uniforms that belong to absolute positions and are used again at each new attempt: what is known of each is an
    interval, which every decision narrows."""

    lengths: Tensor

    def accept(
        self, chance: Tensor, node: Tensor, purpose: Purpose = Purpose.ACCEPT, where: Tensor | None = None
    ) -> Tensor:
        if not hasattr(self, "low"):
            self.low, self.high = np.zeros((len(self.tapes), 32)), np.ones((len(self.tapes), 32))
        columns = []
        for i in range(node.shape[1]):
            rows, place = np.arange(len(node)), (self.lengths + node[:, i]).numpy()
            low, high, cut = self.low[rows, place], self.high[rows, place], chance[:, i].double().numpy()
            below = np.clip((cut - low) / (high - low), 0, 1)
            wanted = np.ones(len(node), dtype=bool) if where is None else where[:, i].numpy()
            passed = self._decide(np.stack([1 - below, below], 1), wanted) > 0
            self.high[rows, place] = np.where(wanted & passed, np.minimum(high, cut), high)
            self.low[rows, place] = np.where(wanted & ~passed, np.maximum(low, cut), low)
            columns.append(passed)
        return torch.from_numpy(np.stack(columns, 1))


class KeyedBlock:
    """Block verification that tells the random generator where in the sequence it is."""

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        assert isinstance(rng, Reused)
        rng.lengths = scores.lengths
        return block(draft, scores, rng)


TOP = Sampling(top_k=2)
CONTROLS: dict[str, tuple[Callable[[], Drafter], Rule, Sampling, dict[str, Any], float]] = {
    "residual drawn from p": (lambda: DraftModel(model(), length=2), ResampleFromP(), Sampling(), {}, 0.05),
    "raw q under top-k": (lambda: Misreport(model(), TOP, Sampling()), Token(), TOP, {}, 0.05),
    "q at another temperature": (
        lambda: Misreport(model(), Sampling(), Sampling(temperature=0.5)),
        Token(),
        Sampling(),
        {},
        0.05,
    ),
    "length chosen after the fact": (lambda: Hindsight(model(), length=2), Token(), Sampling(), {}, 0.05),
    "lenience 0.5": (lambda: DraftModel(model(), length=2), Lenience(lenience=0.5), Sampling(), {}, 0.05),
    "block verification on surviving drafts": (
        Survivors,
        Exact(),
        Sampling(),
        {"limits": (4, 1)},
        0.001,
    ),
    "uniforms reused": (
        lambda: DraftModel(model(), length=3),
        KeyedBlock(),
        Sampling(),
        {"rng": Reused, "limits": (4, 3)},
        0.001,
    ),
}


@pytest.mark.parametrize("name", slowly(CONTROLS, set(CONTROLS) - {"block verification on surviving drafts"}))
def test_negative_controls_are_caught(name: str, measured: Any) -> None:
    drafter, rule, sampling, how, least = CONTROLS[name]
    found = distance(drafter, rule, sampling, **dict(how))
    measured("enumeration: negative controls, which must differ", name=name, value=found)
    assert found > least


# ---- the price of relaxed rules


def first_token(distribution: SequenceDistribution) -> SequenceDistribution:
    found: SequenceDistribution = {}
    for output, weight in distribution.items():
        found[output[:1]] = found.get(output[:1], 0.0) + weight
    return found


PRICED: dict[str, Callable[[], Drafter]] = {
    "drawn chain": lambda: DraftModel(model(), length=2),
    "drawn with replacement": lambda: SampledTree(model(), tree=(-1, -1, 0), replacement=True),
    "fixed tree": lambda: TopKTree(model(), tree=(-1, -1, 0, 1)),
    "fixed chain": lambda: PromptLookup(length=2),
}
BENT = [
    pytest.param(rule.make(**options), id=f"{rule.name}{i}")
    for rule in RELAXED
    for i, options in enumerate(rule.test_options)
]


@pytest.mark.parametrize("kind", slowly(PRICED, list(PRICED)[:1]))
@pytest.mark.parametrize("rule", BENT)
@pytest.mark.parametrize("sampling", slowly(["T=1", "T=0.7, top-k 2", "greedy"], ["T=1"]))
def test_the_price_is_the_total_variation(kind: str, rule: Rule, sampling: str, measured: Any) -> None:
    options, prompt = SAMPLINGS[sampling], PROMPTS[1]
    case = Case(target=target, drafter=PRICED[kind], rule=rule, prompts=[prompt], sampling=options)
    distribution, wanted = enumerate_output(case)[0], target_distribution(target(), prompt, options, 1)
    step = next(decode(target(), PRICED[kind](), rule, [prompt], sampling=options, max_new_tokens=3))
    error = abs(total_variation(first_token(distribution), wanted) - step.total_variation[0])
    measured("enumeration: computed price against total variation, error", name=type(rule).__name__, value=error)
    assert error < 1e-12


@pytest.mark.parametrize("rule", [Lenience(lenience=0.5), Trust(), Typical(epsilon=0.3, delta=0.6)])
def test_the_price_of_a_later_token_holds_given_the_accepted_one(rule: Rule) -> None:
    prompt = PROMPTS[0]
    case = Case(target=target, drafter=lambda: TopKTree(model(), tree=(-1, 0)), rule=rule, prompts=[prompt])
    distribution = enumerate_output(case)[0]
    steps = (next(decode(target(), case.drafter(), rule, [prompt], max_new_tokens=3, seed=seed)) for seed in range(50))
    step = next(step for step in steps if step.accepted)
    kept = {output[1:2]: 0.0 for output in distribution if output[0] == step.emitted[0]}
    for output, weight in distribution.items():
        if output[0] == step.emitted[0]:
            kept[output[1:2]] += weight
    total = sum(kept.values())
    after = target_distribution(target(), [*prompt, step.emitted[0]], Sampling(), 1)
    assert total_variation({key: weight / total for key, weight in kept.items()}, after) == pytest.approx(
        step.total_variation[1], abs=1e-12
    )


def test_without_replacement_the_mean_price_bounds_the_total_variation() -> None:
    prompt, rule = PROMPTS[1], Lenience(lenience=0.5)
    case = Case(target=target, drafter=lambda: SampledTree(model(), tree=(-1, -1)), rule=rule, prompts=[prompt])
    found = total_variation(
        first_token(enumerate_output(case)[0]), target_distribution(target(), prompt, Sampling(), 1)
    )
    prices = [
        next(decode(target(), case.drafter(), rule, [prompt], max_new_tokens=3, seed=seed)).total_variation[0]
        for seed in range(200)
    ]
    assert np.mean(prices) >= found


@pytest.mark.parametrize("rule", RELAXED, ids=lambda rule: rule.name)
def test_end_tokens_are_tried_strictly(rule: Method) -> None:
    """With every token an end token, a relaxed rule has nothing left to relax."""
    found = distance(
        partial(trial_drafter, DRAFTERS["top-k-tree"], {"tree": (-1, -1, 0)}, model),
        rule.make(),
        Sampling(end=(0, 1, 2)),
    )
    assert found < 1e-12


def test_the_enumeration_weighs_every_branch_once() -> None:
    case = Case(
        target=target, drafter=lambda: DraftModel(model(), length=2), rule=Exact(), prompts=PROMPTS, limits=LIMITS
    )
    for distribution in enumerate_output(case):
        assert sum(distribution.values()) == pytest.approx(1, abs=1e-12)


def test_what_rounding_alone_makes_possible_is_no_decision() -> None:
    """Sums differ in their last bit between batches; the tape must not."""
    rng = Enumerator([(1,), ()])
    rng.at(0, [True, True])
    sure = torch.full((2,), 1 - 2**-53, dtype=torch.float64)
    assert rng.accept(sure, torch.zeros(2)).all() and rng.branches == [[], []]
    assert rng.accept(torch.full((2,), 0.25), torch.zeros(2)).tolist()[0]
    assert rng.branches == [[], [(0,), (1,)]] and rng.weight[0] == 0.25
