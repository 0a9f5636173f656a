"""PEARL: no draft waits for the drafter, and its next token is verified in the pass that it was drawn beside."""

from __future__ import annotations

import pytest

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.draft_model.pearl import Pearl
from outrider.core.errors import InvalidOption
from outrider.core.methods import make_rule
from outrider.core.testing.conformance import Case, enumerate_output, target_distribution, total_variation
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step

PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5]]
RULES = ("exact", "token", "block", "lenience")


def run(drafter: Pearl, sampling: Sampling, rule: str = "exact", limit: int = 40) -> list[Step]:
    target = TableTarget(40, seed=5, sharpness=2)
    return list(decode(target, drafter, make_rule(rule), PROMPTS, sampling=sampling, max_new_tokens=limit))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(), Sampling(top_k=8, temperature=0.7)])
def test_a_drafter_identical_to_the_target_never_misses(rule: str, sampling: Sampling) -> None:
    drafter = Pearl(TableTarget(40, seed=5, sharpness=2), length=4)
    steps = run(drafter, sampling, rule)
    assert drafter.hits == drafter.tries > 10
    for row in range(len(PROMPTS)):
        sizes = [len(step.drafted) for step in steps if step.row == row]
        assert sizes[0] == 0 and set(sizes[1:-1]) == {3}, "the first is drafted beside the first pass"
        emitted = [len(step.emitted) for step in steps if step.row == row]
        assert emitted[0] == 1 and set(emitted[1:-1]) == {4}


def test_after_a_miss_the_next_token_is_verified_while_others_are_drafted() -> None:
    drafter = Pearl(TableTarget(40, seed=5, sharpness=2, blur=0.3), length=4)
    steps = run(drafter, Sampling(temperature=0), limit=100)
    sizes = {"prepared": set[int](), "": set[int]()}
    for step in steps:
        if len(step.emitted) + 4 < 100 and step.finish is None:
            sizes[step.note].add(len(step.drafted))
    assert 3 in sizes["prepared"] and sizes[""] == {0}
    assert 0 < drafter.hits < drafter.tries


def test_a_late_guess_is_accepted_as_often_as_it_should_be() -> None:
    """By 1 - TV(p, q), the chance of rejection; a guess that had to equal the target's own draw would hit less."""
    rates = {}
    for rule in ("token", "sample-match"):
        drafter = Pearl(TableTarget(40, seed=5, sharpness=1, blur=0.2), length=1)
        run(drafter, Sampling(), rule, limit=150)
        rates[rule] = drafter.hits / drafter.tries
    assert rates["token"] > rates["sample-match"] + 0.2, rates


@pytest.mark.parametrize("rule", ["exact", "token", "sample-match"])
def test_every_late_guess_keeps_the_distribution(rule: str) -> None:
    prompts, limits = [(0, 1), (2, 1, 0, 1)], (3, 2)
    case = Case(
        target=lambda: TableTarget(3, seed=1, sharpness=0.7),
        drafter=lambda: Pearl(TableTarget(3, seed=1, sharpness=0.7, blur=0.5), length=2),
        rule=make_rule(rule),
        prompts=prompts,
        limits=limits,
    )
    for row, distribution in enumerate(enumerate_output(case)):
        wanted = target_distribution(TableTarget(3, seed=1, sharpness=0.7), prompts[row], Sampling(), limits[row])
        assert total_variation(distribution, wanted) < 1e-12


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(InvalidOption, match="1 or more"):
        Pearl(TableTarget(9), length=0)
