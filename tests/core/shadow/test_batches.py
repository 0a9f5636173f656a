"""Continuous batches on a device: rows come and go in one buffer, so that recorded passes stay valid, and each
row's tokens are those it has alone on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.batching import ContinuousBatch
from outrider.core.engine.cuda_graphs import GraphPool
from outrider.core.engine.transformer import Decoder
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.testing.shadow.device import shadow_device
from outrider.core.testing.soak import SoakRequest, decode_alone
from tests.core.shadow.cases import CONFIG, DEVICES, PROMPTS, SAMPLINGS, Device, drafter_on, network

REQUESTS = [(PROMPTS[number % 3], 6 + 5 * number % 11) for number in range(12)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [None, "prompt-lookup", "eagle3"])
@pytest.mark.parametrize("paged", [False, True])
def test_rows_come_and_go_in_one_buffer(
    paged: bool, name: str | None, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed: list[int] = []
    borrow = GraphPool.borrow

    def counted(pool: GraphPool, *given: Any, **more: Any) -> object:
        store = borrow(pool, *given, **more)
        borrowed.append(store.data_ptr())
        return store

    monkeypatch.setattr(GraphPool, "borrow", counted)
    sampling = SAMPLINGS["greedy"]
    with device():
        shared = network("cuda")
        for attempt in range(2):
            borrowed.clear()
            batch = ContinuousBatch(
                Decoder(shared, paged=paged),
                None if name is None else lambda: drafter_on("cuda", DRAFTERS[str(name)]),
                make_rule(),
                sampling=sampling,
                rows=4,
            )
            output: dict[int, list[int]] = {}
            captured = shared.graphs.pool.captured if shared.graphs is not None else 0
            for prompt, limit in REQUESTS:
                output[batch.add(prompt, limit)] = []
            for step in batch:
                output[step.row] += step.emitted
            batch.close()
            assert shared.graphs is not None
            captures, kept = shared.graphs.pool.captured - captured, [*shared.graphs.pool._stores]
            assert len({store.data_ptr() for store in kept}) == len(kept) == 1
            if name is None:
                assert len(borrowed) == 1, "the batch's rows have moved to another buffer"
                longer = 3 if paged else 0  # torch's attention reads a quarter of the 3,072 slots, or all
                assert captures <= longer + (0 if attempt else 6)
    for number, (prompt, limit) in enumerate(REQUESTS):
        alone = decode_alone(
            SoakRequest(prompt, limit, seed=0), Decoder(network("cpu")), None, make_rule(), sampling=sampling
        )
        assert output[number] == alone, number


def test_a_longer_request_takes_pages_and_moves_nothing() -> None:
    with shadow_device():
        target = Decoder(network("cuda"), paged=True)
        batch = ContinuousBatch(target, None, make_rule(), sampling=SAMPLINGS["greedy"], rows=2)
        places = set()
        asked = [[place % 57 + 4 for place in range(size)] for size in (5, 1100, 70)]
        found: dict[int, list[int]] = {batch.add(prompt, 4): [] for prompt in asked}
        while not batch.idle:
            for step in batch.round():
                found[step.row] += step.emitted
            places.add((target.cache.store.data_ptr(), target.cache.slots))
        assert len(places) == 1 and target.cache.slots == CONFIG.context + 1024
        batch.close()
    for number, prompt in enumerate(asked):
        alone = decode_alone(
            SoakRequest(prompt, 4, 0), Decoder(network("cpu")), None, make_rule(), sampling=SAMPLINGS["greedy"]
        )
        assert found[number] == alone
