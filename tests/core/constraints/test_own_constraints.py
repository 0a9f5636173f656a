"""Rows of a continuous batch under constraints of their own: each as alone, and none ends another's output."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.batching import ContinuousBatch
from outrider.core.constraint import Automaton, Constraint, Cursor, Free, PathMasks
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import InvalidOption, OutriderError, Unsatisfied
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.testing.conformance import KINDS, random_draft_head, trial_drafter

CONFIG = Config(vocabulary=11, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24)
LOOPS = Automaton({state: {(3 * state + k) % 11: (state + k) % 5 for k in range(1 + state)} for state in range(5)})
EVEN = Automaton({0: dict.fromkeys(range(0, 11, 2), 0)})
SHORT = Automaton({0: {1: 1}, 1: {2: 2}})  # nothing follows 1, 2
OWN: list[Constraint | None] = [LOOPS, None, EVEN, LOOPS, None]
PROMPTS = [[1, 2, 3], [4, 5], [7, 7, 8, 9], [10], [1, 2, 3, 4]]
NAMES = (*KINDS, "suffix", "draft-model", "eagle3", "medusa", "lookahead", "pearl", "ensemble")


@cache
def network(eps: float = 1e-6) -> Any:
    return Decoder.random(replace(CONFIG, norm_eps=eps), 1, dtype=torch.float64).network


def drafter(name: str) -> Any:
    method = DRAFTERS[name]
    if method.draft_head is not None:
        return method.make(random_draft_head(method, Decoder(network()), vocabulary=0))
    return trial_drafter(method, method.test_options[0], lambda: Decoder(network(0.3)))


def batched(own: list[Constraint | None], name: str | None, sampling: Sampling, **options: Any) -> list[list[int]]:
    make = None if name is None else partial(drafter, name)
    batch = ContinuousBatch(Decoder(network()), make, make_rule("exact"), sampling=sampling, rows=3, **options)
    numbers = [
        batch.add(prompt, 20, seed=seed, constraint=one)
        for seed, (prompt, one) in enumerate(zip(PROMPTS, own, strict=True))
    ]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    for step in batch:
        tokens[step.row] += step.emitted
    return [tokens[number] for number in numbers]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [None, *NAMES])
def test_each_row_obeys_its_own_constraint_as_alone(name: str | None, temperature: float) -> None:
    found = batched(OWN, name, Sampling(temperature=temperature, constraint=Free()))
    for seed, (prompt, one, output) in enumerate(zip(PROMPTS, OWN, found, strict=True)):
        alone = one or (Free() if name == "pearl" else None)  # pearl draws elsewhere under a constraint, of any kind
        steps = decode(
            Decoder(network()),
            None if name is None else drafter(name),
            make_rule("exact"),
            [prompt],
            sampling=Sampling(temperature=temperature, constraint=alone),
            max_new_tokens=20,
            seed=[seed],
        )
        assert [token for step in steps for token in step.emitted] == output
        assert len(output) == 20


@pytest.mark.parametrize("name", [None, "suffix", "draft-model"])  # one drafter a row, and one of all rows
def test_an_output_that_can_not_go_on_ends_alone(name: str | None) -> None:
    greedy = Sampling(temperature=0, constraint=Free())
    failures: list[tuple[int, OutriderError]] = []
    whole = batched(OWN, name, greedy)
    found = batched([*OWN[:2], SHORT, *OWN[3:]], name, greedy, failed=lambda *failure: failures.append(failure))
    assert [row for row, output in enumerate(found) if output != whole[row]] == [2]
    ((number, error),) = failures
    assert number == 2 and isinstance(error, Unsatisfied) and "request 2 emitted a token" in str(error)
    with pytest.raises(Unsatisfied, match="request 2"):
        batched([*OWN[:2], SHORT, *OWN[3:]], name, greedy)


class Breaking:
    """Allows everything, and its cursor breaks at the third token."""

    def start(self) -> Cursor:
        return BreakingCursor()


class BreakingCursor:
    complete = False

    def __init__(self) -> None:
        self.count = 0

    def advance(self, token: int) -> bool:
        if self.count == 2:
            raise OutriderError("too complex")
        self.count += 1
        return True

    def retreat(self, count: int) -> None:
        self.count -= count

    def fill(self, words: np.ndarray) -> None:
        words[:] = -1

    def forced(self) -> list[int]:
        return []


@pytest.mark.parametrize("name", [None, "suffix", "draft-model"])
def test_a_constraint_that_breaks_ends_its_own_output(name: str | None) -> None:
    greedy = Sampling(temperature=0, constraint=Free())
    failures: list[tuple[int, OutriderError]] = []
    found = batched([Breaking(), *OWN[1:]], name, greedy, failed=lambda *failure: failures.append(failure))
    assert [(number, str(error)) for number, error in failures] == [(0, "too complex")]
    assert found[1:] == batched(OWN, name, greedy)[1:]
    alone = Sampling(constraint=Breaking())
    with pytest.raises(OutriderError, match="too complex"):
        list(decode(Decoder(network()), None, make_rule("exact"), [[1]], sampling=alone, max_new_tokens=9))


def test_own_constraints_need_a_batch_with_one() -> None:
    with pytest.raises(InvalidOption, match=r"the batch has no constraint; .* such as Free\(\)"):
        batched(OWN, None, Sampling())


def test_a_free_row_has_no_mask() -> None:
    assert PathMasks.of(Free(), [[1]]).bits([[[], [4]]], 40).eq(-1).all()
