"""Continuous batches on a device: rows come and go in one buffer, so that recorded passes stay valid, and each
row's tokens are those it has alone on the CPU."""

from __future__ import annotations

import pytest

from outrider.core.batching import ContinuousBatch
from outrider.core.engine.cuda_graphs import GraphPool
from outrider.core.engine.transformer import Decoder
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.testing.soak import SoakRequest, decode_alone
from tests.core.shadow.cases import DEVICES, PROMPTS, SAMPLINGS, Device, drafter_on, network

REQUESTS = [(PROMPTS[number % 3], 6 + 5 * number % 11) for number in range(12)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [None, "prompt-lookup", "eagle3"])
def test_rows_come_and_go_in_one_buffer(name: str | None, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed: list[int] = []
    borrow = GraphPool.borrow

    def counted(pool: GraphPool, shape: tuple[int, ...], dtype: object) -> object:
        store = borrow(pool, shape, dtype)  # type: ignore[arg-type]
        borrowed.append(store.data_ptr())
        return store

    monkeypatch.setattr(GraphPool, "borrow", counted)
    sampling = SAMPLINGS["greedy"]
    with device():
        shared = network("cuda")
        for attempt in range(2):
            borrowed.clear()
            batch = ContinuousBatch(
                Decoder(shared),
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
                assert captures == 0 if attempt else captures <= 6
    for number, (prompt, limit) in enumerate(REQUESTS):
        alone = decode_alone(
            SoakRequest(prompt, limit, seed=0), Decoder(network("cpu")), None, make_rule(), sampling=sampling
        )
        assert output[number] == alone, number
