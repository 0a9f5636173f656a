"""Trained drafters on a device over many rounds, with rows that enter and leave: no row's tokens change, and after 50
rounds hardly anything is recorded any more.

150 rounds each in the suite, 2,000 under `OUTRIDER_SHADOW=all`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import pytest

from outrider.core.batching import ContinuousBatch
from outrider.core.decode import decode
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.protocol import Drafter
from outrider.core.testing.soak import SoakRequest, decode_alone
from tests.core.shadow.cases import ALL, DEVICES, PROMPTS, SAMPLINGS, Device, drafter_on, network

ROUNDS = 2_000 if ALL else 150
TRAINED = ["eagle2", "eagle3", "mtp", "hydra", "medusa", "dspark", "kangaroo"]
LENGTHS = (7, 40, 19, 3, 64, 28)
SAMPLING = SAMPLINGS["greedy"]
Round = list[tuple[int, tuple[int, ...]]]  # (number of a request, tokens)


def request(number: int) -> SoakRequest:
    return SoakRequest(PROMPTS[number % len(PROMPTS)], LENGTHS[number % len(LENGTHS)], seed=0)


def together(shared: Network, drafter: Drafter, paged: bool) -> Iterator[Round]:
    """Rounds of a continuous batch that always has a request waiting."""
    batch = ContinuousBatch(Decoder(shared, paged=paged), lambda: drafter, make_rule(), sampling=SAMPLING, rows=3)
    number = 0
    try:
        while True:
            while not batch.waiting:
                asked = request(number)
                number = batch.add(asked.prompt, asked.limit) + 1
            yield [(step.row, step.emitted) for step in batch.round()]
    finally:
        batch.close()


def one_by_one(shared: Network, drafter: Drafter, paged: bool) -> Iterator[Round]:
    """Rounds of generations that follow each other: Kangaroo drafts with the target's own layers, which a row of a
    continuous batch does not give."""
    number = 0
    while True:
        asked, target = request(number), Decoder(shared, paged=paged)
        for step in decode(target, drafter, make_rule(), [asked.prompt], sampling=SAMPLING, max_new_tokens=asked.limit):
            yield [(number, step.emitted)]
        number += 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "paged"),
    [(name, paged) for place, name in enumerate(TRAINED) for paged in (False, True) if ALL or paged == place % 2],
)
def test_rows_enter_and_leave(name: str, paged: bool, device: Device) -> None:
    output: dict[int, list[int]] = {}
    captures: list[int] = []  # after each round
    with device() as gpu:
        drafter = drafter_on("cuda", DRAFTERS[name])
        rounds = (one_by_one if name == "kangaroo" else together)(network("cuda"), drafter, paged)
        for emitted in islice(rounds, ROUNDS):
            for number, tokens in emitted:
                output.setdefault(number, []).extend(tokens)
            captures.append(gpu.counts.captures)
        rounds.close()  # type: ignore[attr-defined]
    alone = [  # requests repeat
        decode_alone(request(number), Decoder(network("cpu")), None, make_rule(), sampling=SAMPLING)
        for number in range(math.lcm(len(PROMPTS), len(LENGTHS)))
    ]
    for number, tokens_found in output.items():
        assert tokens_found == alone[number % len(alone)][: len(tokens_found)], number
    late = [captures[start + 49] - captures[start - 1] for start in range(50, ROUNDS, 50)]
    assert max(late) <= 1, late
