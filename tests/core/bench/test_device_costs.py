"""Launches and waits of a round are counted after the rounds in which shapes are captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.core.bench.device_costs import round_costs
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.captured_passes import with_graphs
from outrider.core.engine.network import random_network
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import TraceError
from outrider.core.methods import make_rule
from outrider.core.testing.shadow.device import shadow_device
from outrider.core.trace import Step, Times, Trace

CONFIG = Config(vocabulary=61, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)


def steps(device: str, tokens: int) -> Any:
    target = Decoder(with_graphs(random_network(CONFIG, 1, dtype=torch.float64, device=device)))
    greedy = Sampling(temperature=0)
    return decode(target, None, make_rule(), [[1, 2, 3]], sampling=greedy, max_new_tokens=tokens)


def test_rounds_are_counted_once_shapes_are_captured() -> None:
    with shadow_device() as gpu:

        def count(work: Callable[[], object]) -> tuple[int, int]:
            gpu.reset()
            work()
            assert gpu.counts.captures == 0
            return gpu.counts.launches, gpu.counts.waits

        running = steps("cuda", 40)
        launches, waits = round_costs(running, count)
        assert waits == 1 and 2 <= launches <= 10
        assert next(running).index == 14, "the generation is not run to its end"
        running.close()
        assert round_costs(steps("cuda", 5), count) == (0, 0)


def test_a_trace_knows_the_rate_of_reading_weights() -> None:
    def step(index: int, row: int) -> Step:
        return Step(row=row, index=index, emitted=(1,), sources=("bonus",), times=Times(score=0.5), cost=1.25, alive=2)

    trace = Trace(tuple(step(index, row) for index in range(4) for row in range(2)), weight_bytes=1_000)
    assert trace.bytes_per_second == 1_000 * 4 * 1.25 / (4 * 0.5), "the rows of a round share its pass and its time"
    assert Trace(trace.steps).bytes_per_second == 0
    huge = trace.to_json().replace('"weight_bytes":1000', f'"weight_bytes":{10**400}')
    with pytest.raises(TraceError, match=r"'weight_bytes' is a number with an absolute value above 2\^62"):
        Trace.from_json(huge)
