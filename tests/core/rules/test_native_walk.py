"""Compiled rules: what people run is what is enumerated, seeded faults in it are caught, and it decides, number by
number, what its reference decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import DraftModel, SampledTree
from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.methods import DRAFTERS, RULES, Method
from outrider.core.protocol import Drafter, Rule, Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules import native_walk
from outrider.core.rules.exact import Block, Exact, Token
from outrider.core.testing.broken_rules import NATIVE_FAULTS, native_fault
from outrider.core.testing.conformance import (
    KINDS,
    Case,
    Enumerator,
    FeedCounter,
    HighEnd,
    NativeEnumerator,
    Tape,
    chi_square_z,
    enumerate_output,
    sample_output,
    target_distribution,
    total_variation,
    trial_drafter,
)
from outrider.core.testing.table_target import TableTarget
from tests.turns import takes_turn

needs_compiler = pytest.mark.skipif(native_walk.library() is None, reason="there is no compiler")
PROMPTS = ((0, 1), (2, 1, 0, 1))
LIMITS = (3, 2)
SAMPLINGS = {
    "T=1": Sampling(),
    "T=0.7, top-k 2": Sampling(temperature=0.7, top_k=2),
    "top-p 0.8": Sampling(top_p=0.8),
    "greedy": Sampling(temperature=0),
    "penalties, end": Sampling(repetition_penalty=1.3, frequency_penalty=0.2, end=(2,), temperature=1.2),
}


def target() -> TableTarget:
    return TableTarget(3, seed=1, sharpness=0.7)


def model() -> TableTarget:
    return TableTarget(3, seed=1, sharpness=0.7, blur=0.4)


class Watched:
    """A rule; counts the drafts for which there is compiled code."""

    lossless = True

    def __init__(self, rule: Rule) -> None:
        self.rule, self.expected = rule, 0

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        rejects = isinstance(self.rule, Token | Block) or (isinstance(self.rule, Exact) and draft.distributions)
        self.expected += bool(draft.size and (rejects or scores.sampling.greedy))
        return self.rule(draft, scores, rng)


def distance(
    drafter: Callable[[], Drafter],
    rule: Rule,
    sampling: Sampling,
    *,
    make: Callable[[], TableTarget] = target,
    limits: Sequence[int] = LIMITS,
    together: bool = True,
) -> tuple[float, int, int]:
    """The worst total variation of what compiled code emits, over the prompts and both ends of the uniforms; how often
    compiled code decided; and how often it should have."""
    watched, made = Watched(rule), list[NativeEnumerator]()
    case = Case(target=make, drafter=drafter, rule=watched, prompts=PROMPTS, sampling=sampling, limits=limits)
    wanted = [target_distribution(make(), p, sampling, limits[row]) for row, p in enumerate(PROMPTS)]
    worst = 0.0

    def enumerator(kind: type[NativeEnumerator], tapes: list[Tape]) -> Enumerator:
        made.append(kind(tapes))
        return made[-1]

    for kind in (NativeEnumerator, HighEnd):
        distributions = enumerate_output(case, partial(enumerator, kind), together=together)  # type: ignore[arg-type]
        worst = max(worst, *(total_variation(one, other) for one, other in zip(distributions, wanted, strict=True)))
    return worst, sum(one.fed for one in made), watched.expected


def settings() -> list[Any]:
    """Every kind of draft under every rule and sampling, in turns; the fast part has all with compiled code,
    and every way to renew a window."""
    cases = []
    for name in KINDS:
        for number, options in enumerate(DRAFTERS[name].test_options):
            for rule in RULES.values():
                if not rule.lossless or (rule.name == "block" and name != "draft-model"):
                    continue
                if number and rule.same_tokens:  # these have no compiled code, under any option
                    continue
                for sampling in SAMPLINGS:
                    quick = (
                        number < (3 if name == "jacobi" else 1)
                        and sampling in ("T=1", "T=0.7, top-k 2", "greedy")
                        and (rule.name in ("exact", "token", "block") or sampling == "greedy")
                    )
                    marks = [] if quick else [pytest.mark.slow]
                    case = f"{name}{number}-{rule.name}-{sampling}"
                    if not quick and not takes_turn(case, sampling):
                        continue
                    cases.append(pytest.param(DRAFTERS[name], options, rule, sampling, id=case, marks=marks))
    return cases


@needs_compiler
@pytest.mark.parametrize(("method", "options", "rule", "sampling"), settings())
def test_what_people_run_is_enumerated(
    method: Method, options: Mapping[str, Any], rule: Method, sampling: str, measured: Any
) -> None:
    """The reference of a rule without compiled code is enumerated in test_enumeration.py; here it must not have any."""
    drafter, together = partial(trial_drafter, method, options, model), "columns" not in options
    worst, fed, expected = distance(drafter, rule.make(), SAMPLINGS[sampling], together=together)
    measured("enumeration: total variation from the target, compiled rules", name=rule.name, value=worst)
    assert worst < 1e-12
    assert fed >= expected and (expected > 0) == ((fed > 0 and options.get("renew") != "couple") or expected > 0)
    assert expected or rule.name in ("exact", "sample-match", "gumbel-match")


@needs_compiler
@pytest.mark.parametrize(
    ("drafter", "limits"),
    [
        (lambda: DraftModel(model(), length=2), (2, 2)),
        (lambda: SampledTree(model(), tree=(-1, -1, 0)), (2, 2)),
        (lambda: Jacobi(window=2, renew="couple"), LIMITS),
    ],
    ids=["chain", "tree", "window"],
)
@pytest.mark.parametrize("rule", [Exact(), Token()], ids=["exact", "token"])
def test_one_row_alone_is_enumerated(drafter: Callable[[], Drafter], limits: Sequence[int], rule: Rule) -> None:
    worst, fed, expected = distance(drafter, rule, Sampling(), limits=limits, together=False)
    assert worst < 1e-12 and fed >= expected > 0


# ---- seeded faults


def other() -> TableTarget:
    """A draft model that differs much from the target, so that every kind of decision is frequent."""
    return TableTarget(3, seed=2, sharpness=1.5)


FLAT = partial(TableTarget, 3, seed=4, sharpness=0.7)  # whose likeliest tokens a sharper draft model drafts too often


TOP = Sampling(top_k=2)
FAULTS: dict[str, tuple[Callable[[], Drafter], Rule, Sampling, dict[str, Any]]] = {
    "token after a rejection drawn from p": (lambda: DraftModel(other(), length=2), Token(), Sampling(), {}),
    "residual not normalised": (lambda: SampledTree(other(), tree=(-1, -1)), Token(), Sampling(), {}),
    "earlier sibling left in q": (lambda: SampledTree(other(), tree=(-1, -1)), Token(), Sampling(), {}),
    "ratio flipped": (lambda: DraftModel(other(), length=2), Token(), Sampling(), {}),
    "bonus from the row before": (lambda: DraftModel(other(), length=2), Token(), Sampling(), {}),
    "uniform used twice": (lambda: SampledTree(other(), tree=(-1, -1)), Exact(), Sampling(), {}),
    "rejected sibling forgotten": (lambda: SampledTree(other(), tree=(-1, -1)), Exact(), Sampling(), {}),
    "block residual without its weight": (
        lambda: DraftModel(TableTarget(3, seed=4, sharpness=2.0), length=2),
        Exact(),
        Sampling(),
        {"make": FLAT},
    ),
    "block stops at the first failure": (lambda: DraftModel(other(), length=3), Block(), Sampling(), {}),
    "coupling draws from the new distribution": (
        lambda: Jacobi(window=2, renew="couple"),
        Token(),
        Sampling(),
        {"limits": (4, 1), "make": partial(TableTarget, 3, seed=3)},
    ),
    "greedy token from the row before": (lambda: DraftModel(other(), length=2), Exact(), Sampling(temperature=0), {}),
    "support of q ignored": (lambda: DraftModel(other(), length=2), Token(), TOP, {}),
}


@needs_compiler
@pytest.mark.parametrize("name", NATIVE_FAULTS)
def test_faults_in_compiled_code_are_caught(name: str, measured: Any) -> None:
    drafter, rule, sampling, how = FAULTS[name]
    right, fed, _ = distance(drafter, rule, sampling, **how)
    with native_fault(name):
        wrong, _, _ = distance(drafter, rule, sampling, **how)
    measured("enumeration: faults in compiled code, which must differ", name=name, value=wrong)
    assert right < 1e-12 and fed and wrong > 0.001


def z_score(
    drafter: Callable[[], Drafter], rule: Rule, sampling: Sampling, how: Mapping[str, Any]
) -> tuple[float, int]:
    made = list[FeedCounter]()

    def counter(seeds: Any) -> CounterRNG:
        made.append(FeedCounter(CounterRNG.of(seeds, len(seeds)).seeds))
        return made[-1]

    make, (limit, *_) = how.get("make", target), how.get("limits", LIMITS)
    case = Case(target=make, drafter=drafter, rule=rule, prompts=PROMPTS, sampling=sampling, limits=(limit,))
    counts = sample_output(case, 10_000, rng=counter)
    expected = [target_distribution(make(), prompt, sampling, limit) for prompt in PROMPTS]
    scores = [chi_square_z(*pair) for pair in zip(counts, expected, strict=True)]
    return max(scores, key=abs), made[0].fed


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE_FAULTS)
def test_faults_in_compiled_code_are_seen_in_draws(name: str, measured: Any) -> None:
    right, fed = z_score(*FAULTS[name])
    with native_fault(name):
        wrong, _ = z_score(*FAULTS[name])
    measured("20,000 draws, half a prompt: z of faults in compiled code, which must be caught", name=name, value=wrong)
    assert abs(right) < 5 and fed and wrong > 10
