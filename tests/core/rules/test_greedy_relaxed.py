"""Relaxed rules at temperature 0: what they accept beyond exact rules, at what price, and that they never draw lots."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Distribution, LogitsPipeline, Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import DraftModel, SampledTree, TopKTree
from outrider.core.errors import InvalidOption
from outrider.core.methods import RULES
from outrider.core.protocol import Drafter, Rule, Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules import native_walk
from outrider.core.rules.codebook import Annealed, Lantern, LanternPlus
from outrider.core.rules.exact import Exact
from outrider.core.rules.neighbours import TopKMembership
from outrider.core.rules.relaxed import Distance, Lenience, Threshold, TopBeta, Typical, VerifyEvery
from outrider.core.testing.conformance import Case, enumerate_output, target_distribution, total_variation
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step
from outrider.core.tree import Tree

GREEDY = Sampling(temperature=0)
PROMPT = [2, 1, 0, 1]
RULES_AT_0: dict[str, Rule] = {
    "bild": Distance(distance=1.5),
    "top-beta": TopBeta(beta=3, gap=1.5),
    "typical": Typical(epsilon=0.2, delta=0.5),
    "lenience": Lenience(lenience=0.4),
    "threshold": Threshold(threshold=0.4),
    "lantern": Lantern(delta=0.4, k=2),
    "lantern-plus-plus": LanternPlus(ratio=2.0, k=2),
    "annealed": Annealed(weight=3.0),
    "top-k-membership": TopKMembership(k=2),
}


def table(blur: float = 0.0, size: int = 5) -> TableTarget:
    return TableTarget(size, seed=1, sharpness=0.7, blur=blur)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: DraftModel(table(0.5), length=3),
    "tree": lambda: TopKTree(table(0.5), tree=(-1, -1, 0, 1)),
    "drawn chain": lambda: DraftModel(table(0.5), length=2, sampling=Sampling()),
    "drawn tree": lambda: SampledTree(table(0.5), tree=(-1, -1, 0), sampling=Sampling()),
}


def run(drafter: Drafter | None, rule: Rule, tokens: int = 24, **sampling: Any) -> list[Step]:
    return list(
        decode(table(), drafter, rule, [PROMPT], sampling=Sampling(temperature=0, **sampling), max_new_tokens=tokens)
    )


def output(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.emitted]


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("name", RULES_AT_0)
def test_it_accepts_more_than_exact_and_pays_1_for_each_other_token(name: str, kind: str) -> None:
    steps = run(DRAFTERS[kind](), RULES_AT_0[name])
    assert len(steps) < len(run(DRAFTERS[kind](), Exact()))
    emitted, price = output(steps), [p for step in steps for p in step.total_variation[: len(step.emitted)]]
    own = [
        next(iter(target_distribution(table(), [*PROMPT, *emitted[:place]], GREEDY, 1)))[0]
        for place in range(len(emitted))
    ]
    assert price == [float(token != ours) for token, ours in zip(emitted, own, strict=True)]
    assert sum(price) > 0


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", RULES_AT_0)
def test_the_anchor_is_exact(name: str, kind: str) -> None:
    anchor = RULES[name].make(**(RULES[name].exact_at or {}))
    assert anchor.lossless and output(run(DRAFTERS[kind](), anchor)) == output(run(None, Exact()))


@pytest.mark.parametrize("kind", ["chain", "tree", "drawn chain"])
@pytest.mark.parametrize("name", RULES_AT_0)
def test_the_price_is_the_total_variation(name: str, kind: str, measured: Any) -> None:
    case = Case(target=table, drafter=DRAFTERS[kind], rule=RULES_AT_0[name], prompts=[PROMPT], sampling=GREEDY)
    first = dict[tuple[int, ...], float]()
    for tokens, weight in enumerate_output(case)[0].items():
        first[tokens[:1]] = first.get(tokens[:1], 0.0) + weight
    found = total_variation(first, target_distribution(table(), PROMPT, GREEDY, 1))
    error = abs(found - run(DRAFTERS[kind](), RULES_AT_0[name], 3)[0].total_variation[0])
    measured("enumeration: computed price against total variation at temperature 0, error", name=name, value=error)
    assert error < 1e-12


@pytest.mark.parametrize("name", RULES_AT_0)
def test_what_is_excluded_and_end_tokens_stay_out(name: str) -> None:
    plain = output(run(None, Exact()))
    assert output(run(DRAFTERS["tree"](), RULES_AT_0[name], end=tuple(range(5)))) == plain[:1]

    def only(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        allowed = torch.arange(5) == ids.shape[1] % 5
        return torch.where(allowed, logits, -torch.inf)

    steps = run(DRAFTERS["chain"](), RULES_AT_0[name], processors=(only,))
    assert output(steps) == [place % 5 for place in range(4, 28)]


@pytest.mark.parametrize("rule", [Threshold(threshold=0.4), VerifyEvery(every=2), Lenience(lenience=0.4)])
def test_what_has_a_formula_is_compiled_on_trees(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formula and not by the rule in torch, which would give the same."""
    if native_walk.library() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr("outrider.core.rules.rejection.down_tree", lambda *_, **__: pytest.fail("in torch"))
    monkeypatch.setattr(type(rule), "accept", lambda *_: pytest.fail("in torch"))
    steps = decode(table(), DRAFTERS["tree"](), rule, [PROMPT], sampling=Sampling(), max_new_tokens=24, seed=1)
    assert sum(step.accepted for step in steps) > 0


@pytest.mark.parametrize("prompt", [PROMPT, [0, 0], [3, 4]])
def test_what_top_k_membership_draws_after_a_tree_is_among_the_k_likeliest(prompt: list[int]) -> None:
    """The residual, from which other rules draw, holds all the others."""
    drafter = partial(TopKTree, table(5.0), tree=(-1, -1, 0))  # drafts that are often refused
    case = Case(target=table, drafter=drafter, rule=TopKMembership(k=2), prompts=[prompt], sampling=Sampling())
    own = target_distribution(table(), prompt, Sampling(), 1)
    likeliest = sorted(own, key=own.__getitem__)[-2:]
    assert {tokens[:1] for tokens, weight in enumerate_output(case)[0].items() if weight > 0} <= set(likeliest)


P = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]], dtype=torch.float64)
ENTROPY = -float(torch.xlogy(P, P).sum())


@pytest.mark.parametrize(("beta", "gap"), [(-1, 1.0), (1, -0.5), (1, math.nan)])
def test_options_of_top_beta_are_checked_one_by_one(beta: int, gap: float) -> None:
    with pytest.raises(InvalidOption, match="both must be 0 or more"):
        TopBeta(beta=beta, gap=gap)


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY], ids=["sampled", "greedy"])
def test_typical_tries_the_longest_typical_path_first(sampling: Sampling) -> None:
    """Of two guesses with one child of the second, the second one where all are typical, the first where none is, and
    the second again where it and its child are. At temperature 0 the model's own distribution says what is typical."""
    target = table()
    target.begin([PROMPT], sampling, frozenset())
    draft = Draft.guess(torch.tensor([[0, 1, 2]]), Tree.of((-1, -1, 1)), torch.ones(1, 3, dtype=torch.bool))
    scores = target.score(draft)
    assert Typical(epsilon=1e-9)._longest_first(draft, scores).tolist() == [[1, 0, 0]]
    assert Typical(epsilon=1.0, delta=1e9)._longest_first(draft, scores).tolist() == [[0, 1, 0]]
    rare = float(scores.softmax(torch.tensor([[0]])).at(torch.tensor([[[0]]])))
    assert Typical(epsilon=rare * 1.01, delta=1e9)._longest_first(draft, scores).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (Distance(distance=-math.log(0.25)), [1, 1, 0, 0, 0]),
        (TopBeta(beta=3, gap=0.5), [1, 1, 0, 0, 0]),
        (TopBeta(beta=2, gap=9.0), [1, 1, 0, 0, 0]),
        (Typical(epsilon=0.15, delta=9.0), [1, 1, 1, 0, 0]),
        (Typical(epsilon=1.0, delta=0.25 * math.exp(ENTROPY)), [1, 1, 0, 0, 0]),
        (Lenience(lenience=0.45), [1, 1, 1, 0, 0]),
        (Threshold(threshold=0.7), [1, 1, 0, 0, 0]),
        (Annealed(weight=1.5, length=0), [1, 1, 0, 0, 0]),
        (Annealed(weight=1.1, nu=0.7, length=5), [1, 1, 1, 0, 0]),  # w = 2.86: 0.57 exceeds 0.4
        (Lantern(k=1, delta=0.25), [1, 0, 0, 0, 0]),  # neighbours: 1, 0, 1, 2, 3; only those of 3 and 4 are light
        (Lantern(k=1, delta=0.35), [1, 0, 1, 0, 0]),  # code 2 with code 1: 0.5
        (LanternPlus(k=1, ratio=1.5), [1, 1, 1, 0, 0]),  # 1 with 0: 0.7; 2 with 1: 0.5; 2 is too heavy for 3
        (TopKMembership(k=2), [1, 1, 0, 0, 0]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_accepted_tokens_by_hand(rule: Any, wanted: list[int]) -> None:
    """One guess of each token, each the only one: accepted or not, without chance."""
    accepted = []
    for token in range(5):
        draft = Draft.guess(torch.tensor([[token]]), Tree.chain(1), torch.ones(1, 1, dtype=torch.bool))
        pipeline = LogitsPipeline(GREEDY, [[0]], 5, P.device)
        scores = Scores(draft, pipeline, torch.tensor([1]), P.log().expand(1, 2, 5))
        verdict = rule(draft, scores, CounterRNG.of(token, 1))
        accepted.append(int(verdict.accepted[0]))
        assert verdict.chance[0, 0] in (0, 1) and int(verdict.total_variation[0, 0]) == (accepted[-1] and token != 0)
    assert accepted == wanted


def test_ties_of_the_likeliest_token_are_no_rivals_at_the_anchor() -> None:
    even = Distribution(torch.tensor([[0.4, 0.4, 0.2]]), None, 3)
    rules = (
        Lenience(lenience=1),
        Threshold(threshold=1),
        Annealed(weight=1, nu=0),
        Lantern(delta=0),
        LanternPlus(ratio=0),
    )
    for rule in rules:
        assert not rule.greedy(even, torch.zeros(1, 1)).any()  # type: ignore[attr-defined]


def test_rows_decide_alike_alone_and_together() -> None:
    prompts, rule = [[1], [2, 0, 1], PROMPT], RULES_AT_0["bild"]
    make = partial(DraftModel, length=3)
    together = dict[int, list[int]]()
    for step in decode(table(), make(table(0.5)), rule, prompts, sampling=GREEDY, max_new_tokens=12):
        together.setdefault(step.row, []).extend(step.emitted)
    for row, prompt in enumerate(prompts):
        alone = decode(table(), make(table(0.5)), rule, [prompt], sampling=GREEDY, max_new_tokens=12)
        assert [token for step in alone for token in step.emitted] == together[row]
