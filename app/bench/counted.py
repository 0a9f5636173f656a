"""`outrider bench device --counted`: the launches, kernels, waits, bytes and operations of a round by part, counted on
the shadow device. A CPU is enough: the counts depend on the model's shape, not on its weights, which are random."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from outrider.core.engine.types import Config

# SmolLM2-135M's shape with a smaller vocabulary, which only its last product reads
SHAPE = Config(
    vocabulary=4096,
    hidden_size=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100_000.0,
    context=8192,
)
BANDWIDTH = 3.35e12  # bytes a second of an H100, by its data sheet
_PROMPT = (1, 2, 3, 4, 5, 2, 3)
_ROUNDS = 8
_OPTIONS: Mapping[str, Mapping[str, Any]] = {"eagle3": {"nodes": 63}, "draft-model": {"length": 5}}


def ledger(drafters: Sequence[str], config: Config = SHAPE, bandwidth: float = BANDWIDTH) -> Iterator[dict[str, Any]]:
    """The rows of a typical greedy round of plain decoding and of each drafter."""
    from outrider.core.protocol import PLAIN

    with mock.patch.dict(os.environ, {"OUTRIDER_GRAPHS": "1"}):
        for name in (PLAIN, *drafters):
            yield from _of(name, config, bandwidth)


def _of(name: str, config: Config, bandwidth: float) -> Iterator[dict[str, Any]]:
    from outrider.core.cost.break_even import Costs
    from outrider.core.distribution import Sampling
    from outrider.core.drafters.combined.auto import Auto
    from outrider.core.engine.captured_passes import with_graphs
    from outrider.core.engine.network import random_network
    from outrider.core.engine.transformer import Decoder
    from outrider.core.methods import DRAFTERS, make_rule
    from outrider.core.methods.lookup import SUFFIX, TOKEN_RECYCLING
    from outrider.core.protocol import PLAIN, Drafter
    from outrider.core.testing.conformance import trial_drafter
    from outrider.core.testing.shadow.device import shadow_device
    from outrider.core.testing.shadow.ledger import by_part, round_costs, typical

    with shadow_device() as gpu:
        gpu.metered = True
        network = with_graphs(random_network(config, 1, dtype=torch.float32, device="cuda"))
        drafter: Drafter | None = None
        if name == "auto":
            two = SUFFIX, TOKEN_RECYCLING
            members = {each.name: trial_drafter(each, {}, lambda: Decoder(network)) for each in two}
            drafter = Auto(costs=Costs.parse("1:10 2:10.1 8:10.2 24:10.5"), drafters=members)
        elif name != PLAIN:
            drafter = trial_drafter(DRAFTERS[name], _OPTIONS.get(name, {}), lambda: Decoder(network))
        costs = round_costs(
            gpu,
            Decoder(network),
            drafter,
            make_rule(),
            [_PROMPT],
            sampling=Sampling(temperature=0),
            rounds=_ROUNDS,
        )
        for row in by_part(typical(costs), network.weight_bytes, bandwidth):
            yield {"drafter": name, **row}
