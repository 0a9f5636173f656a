"""Rung 3: twenty thousand seeded rows against the enumerated distribution. Exact rules pass; seeded faults and relaxed
rules must not. The real random generator roll here, so this is also their test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from outrider.core.distribution import Sampling
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.methods import DRAFTERS, RULES, Method
from outrider.core.protocol import Drafter, Rule
from outrider.core.rules.exact import Exact, Token
from outrider.core.testing.broken_rules import BonusFromTheRowBefore, Misreport, RatioFlipped, ResampleFromP
from outrider.core.testing.conformance import (
    KINDS,
    Case,
    chi_square_z,
    sample_output,
    target_distribution,
    trial_drafter,
)
from outrider.core.testing.table_target import TableTarget
from tests.turns import takes_turn

pytestmark = pytest.mark.slow
DRAWS = 20_000
PROMPT = (0, 1, 3)
SAMPLINGS = {
    "T=1": Sampling(),
    "T=0.7, top-k": Sampling(temperature=0.7, top_k=3),
    "T=0.7, top-p": Sampling(temperature=0.7, top_p=0.8),
}


def target() -> TableTarget:
    return TableTarget(5, seed=3)


def model() -> TableTarget:
    return TableTarget(5, seed=3, blur=0.4)


def z_score(drafter: Callable[[], Drafter], rule: Rule, sampling: Sampling) -> float:
    case = Case(target=target, drafter=drafter, rule=rule, prompts=[PROMPT], sampling=sampling, limits=(3,))
    return chi_square_z(sample_output(case, DRAWS)[0], target_distribution(target(), PROMPT, sampling, 3))


SHAPES = [name for name in KINDS if name not in ("prompt-lookup", "ensemble")]


def meets(method: Method, number: int, rule: Method) -> bool:
    """Every rule meets a drawn chain, drawn trees with and without replacement, a fixed tree and a window. The default
    meets every setting of those, and in turns one of every other drafter: one that draws, if there is one."""
    if rule.name != "exact":
        return method.name in SHAPES and not number and (rule.name != "block" or method.name == "draft-model")
    draws = [place for place, one in enumerate(method.test_options) if one.get("draft_kind") in ("chain", "sampled")]
    return method.name in SHAPES or (number == (draws or [0])[-1] and takes_turn(method.name))


COMBINATIONS = [
    pytest.param(method, options, rule, id=f"{method.name}{i}-{rule.name}")
    for method in DRAFTERS.values()
    for i, options in enumerate(method.test_options)
    for rule in RULES.values()
    if rule.lossless and meets(method, i, rule)
]


@pytest.mark.parametrize(("method", "options", "rule"), COMBINATIONS)
def test_exact_rules_keep_the_law(method: Method, options: Mapping[str, Any], rule: Method, measured: Any) -> None:
    """The default rule under every sampling for those shapes' first options; else one, all being enumerated."""
    every = method.name in SHAPES and rule.name == "exact" and options is method.test_options[0]
    for name, sampling in SAMPLINGS.items() if every else [("T=1", SAMPLINGS["T=1"])]:
        found = z_score(partial(trial_drafter, method, options, model), rule.make(), sampling)
        measured(f"{DRAWS:,} draws: z of the chi-square, exact rules", name=rule.name, value=found)
        assert abs(found) < 5, name


def test_the_default_rule_keeps_the_law(measured: Any) -> None:
    found = z_score(lambda: DraftModel(model(), length=3), Exact(), Sampling())
    measured(f"{DRAWS:,} draws: z of the chi-square, exact rules", name="exact", value=found)
    assert abs(found) < 5


# ---- seeded faults


def chain() -> Drafter:
    return DraftModel(model(), length=2)


FAULTS: dict[str, tuple[Callable[[], Drafter], Rule, Sampling]] = {
    "resampled from p": (chain, ResampleFromP(), Sampling()),
    "bonus from the row before": (chain, BonusFromTheRowBefore(), Sampling()),
    "ratio flipped": (chain, RatioFlipped(), Sampling()),
    "q at the wrong temperature": (
        lambda: Misreport(model(), Sampling(), Sampling(temperature=0.7)),
        Token(),
        Sampling(),
    ),
    "raw q under top-k": (lambda: Misreport(model(), Sampling(top_k=3), Sampling()), Token(), Sampling(top_k=3)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_caught(name: str, measured: Any) -> None:
    found = z_score(*FAULTS[name])
    measured(f"{DRAWS:,} draws: z of seeded faults, which must be caught", name=name, value=found)
    assert found > 10


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, id=rule.name) for rule in RULES.values() if not rule.lossless],
)
def test_relaxed_rules_are_caught(rule: Method, measured: Any) -> None:
    found = z_score(chain, rule.make(**rule.test_options[0]), Sampling())
    measured(f"{DRAWS:,} draws: z of relaxed rules, which must be caught", name=rule.name, value=found)
    assert found > 10
