"""A growing conversation: once its first rounds are over nothing is recorded any more, as recordings do not depend on
how full the cache is, and its tokens are those of the CPU.

In the suite 20 rounds up to 2,400 tokens, of which the first 10 record; under `OUTRIDER_SHADOW=all` 1,000 rounds up to
8,000 tokens, of which the first 100 do."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.engine.captured_passes import with_graphs
from outrider.core.engine.network import random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.testing.conformance import trial_drafter
from outrider.core.trace import Step
from tests.core.shadow.cases import ALL, DEVICES, SAMPLINGS, Device

CONFIG = Config(
    vocabulary=61, hidden_size=16, layers=3, heads=2, kv_heads=1, head_dim=8, intermediate_size=16, context=8192
)
LENGTH = 8_000 if ALL else 2_400
FIRST, ROUNDS, TURN = (100, 1_000, 50) if ALL else (10, 20, 5)  # rounds that record, of all turns, and of each
NAMES = [None, "eagle3", "draft-model", "medusa", "prompt-lookup", "suffix"] if ALL else [None, "eagle3"]


def decoder(device: str, seed: int = 1) -> Decoder:
    return Decoder(with_graphs(random_network(CONFIG, seed, dtype=torch.float64, device=device)))


def conversation(device: str, name: str | None) -> Iterator[Step]:
    """Rounds of turns that each continue the text so far. The first ones stay in the smallest bucket of cache columns;
    from then on the user writes much more."""
    target, smaller, user = decoder(device), decoder(device, 2), random.Random(1)
    drafter = None if name is None else trial_drafter(DRAFTERS[name], {}, lambda: smaller)
    text, turns = list[int](), ROUNDS // TURN
    for turn in range(turns):
        short = (turn + 1) * TURN <= FIRST
        length = 40 * (turn + 1) if short else LENGTH * (turn + 1) // turns - 6 * TURN
        text += [user.randrange(61) for _ in range(length - len(text))]
        limit = max(LENGTH - len(text), 1) if turn == turns - 1 else LENGTH
        steps = decode(target, drafter, make_rule(), [text], sampling=SAMPLINGS["greedy"], max_new_tokens=limit)
        for step in steps:
            text += step.emitted
            yield step
            if step.index == TURN - 1:
                break
        steps.close()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_recordings_do_not_depend_on_the_length(name: str | None, device: Device) -> None:
    captures, found = list[int](), list[tuple[int, ...]]()
    with device() as gpu:
        for step in conversation("cuda", name):
            captures.append(gpu.counts.captures)
            found.append(step.emitted)
    assert captures[-1] == captures[FIRST - 1] > 0, captures[9::10]
    assert found == [step.emitted for step in conversation("cpu", name)]
