"""On a CUDA device: the same tokens as on a CPU, and one wait a step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.methods import DRAFTERS, Method, make_rule
from outrider.core.protocol import Drafter
from outrider.core.testing.conformance import trial_drafter
from outrider.core.testing.table_target import TableTarget

PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5]]


def table(device: str, blur: float = 0.0) -> TableTarget:
    return TableTarget(50, seed=5, sharpness=2, blur=blur, device=device)


def drafter(method: Method, device: str) -> Drafter:
    return trial_drafter(method, {}, lambda: table(device, 0.4))


@pytest.mark.gpu
@pytest.mark.parametrize("method", DRAFTERS.values(), ids=lambda method: method.name)
@pytest.mark.parametrize("rule", ["exact", "token", "gumbel-match", "lenience"])
def test_the_device_changes_nothing(method: Method, rule: str) -> None:
    found: list[list[Any]] = []
    for device in ("cpu", "cuda"):
        steps = decode(
            table(device),
            drafter(method, device),
            make_rule(rule),
            PROMPTS,
            sampling=Sampling(top_k=9),
            max_new_tokens=40,
        )
        found.append([(step.row, step.emitted, step.sources) for step in steps])
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("method", DRAFTERS.values(), ids=lambda method: method.name)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(), Sampling(top_p=0.9)])
def test_one_wait_a_step(method: Method, sampling: Sampling) -> None:
    guesses = drafter(method, "cuda")
    waits_each = 2 if hasattr(guesses, "ahead") else 1  # what came of drafts made ahead must be known to draft on
    steps = decode(table("cuda"), guesses, make_rule(), PROMPTS, sampling=sampling, max_new_tokens=60)
    for _ in range(6):  # shapes and constants are uploaded once
        next(steps)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            index = next(steps).index
            later = next(step for step in steps if step.index > index + 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [one for one in waits if "synchroniz" in str(one.message)]
    assert len(found) <= waits_each * (later.index - index)
