"""Every drafter under an exact, a seed-matched and a relaxed rule, greedy and sampled, one row and three: on a device
the tokens are those of the CPU, with one wait a round."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.core.methods import DRAFTERS, RULES
from tests.core.shadow.cases import ALL, DEVICES, RELAXED, SAMPLINGS, WAITS, Device, generate

SEED = 39


def cases() -> list[tuple[str, str, str, int]]:
    """The whole product, in which the relaxed rules take turns; or a case of each drafter, which meets each rule."""
    draw, relaxed = random.Random(SEED), itertools.cycle(RELAXED)
    if ALL:
        return [
            (name, rule or next(relaxed), sampling, rows)
            for name in DRAFTERS
            for rule in ("exact", "gumbel-match", None)
            for sampling in SAMPLINGS
            for rows in (1, 3)
        ]
    rules = itertools.cycle(["exact", "gumbel-match", "token", *RELAXED, "exact", "sample-match", "block"])
    chosen = []
    for name, method in DRAFTERS.items():
        rule = next(rule for rule in rules if RULES[rule].can_verify(method))
        chosen.append((name, rule, draw.choice([*SAMPLINGS]), draw.choice([1, 3])))
    return chosen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "rule", "sampling", "rows"), cases())
def test_tokens_are_those_of_the_cpu(device: Device, name: str, rule: str, sampling: str, rows: int) -> None:
    expected = generate("cpu", name, rule, sampling, rows)
    with device() as gpu:
        found = generate("cuda", name, rule, sampling, rows, gpu)
    assert found.steps == expected.steps
    assert found.steady <= WAITS.get(name, 1), (found.waits, found.captures, found.places)


@pytest.mark.skipif(ALL, reason="the product has each rule by construction")
def test_each_drafter_and_each_rule_is_met() -> None:
    drawn = cases()
    assert {name for name, *_ in drawn} == {*DRAFTERS}
    without_tables = {name for name, rule in RULES.items() if not rule.inputs}
    assert {rule for _, rule, *_ in drawn} == without_tables
