"""The time that networks spend in matrix products, measured for several networks in turns so that other load affects
all of them. Independent of the operations between the products.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from outrider.core.engine.linear import Dense, Linear, fastest
from outrider.core.engine.network import Network

_OVERHEAD = "overhead of "
_REPEATS = 4


@torch.inference_mode()
def time_products(
    networks: Mapping[str, Network], tokens: Sequence[int] = (1, 5), rounds: int = 12
) -> dict[str, dict[int, float]]:
    """Seconds of all matrix products in a pass of each network, by the number of tokens: the minimum over the rounds,
    minus the call overhead, which is measured with as many tiny matrices. Each turn has several passes, so that the
    processor's cache is in the same state as during decoding."""
    best: dict[tuple[str, int], float] = defaultdict(lambda: math.inf)
    linears: dict[str, list[tuple[Linear, int]]] = {name: _linears(network) for name, network in networks.items()}
    for name, network in networks.items():
        tiny = fastest(Dense(torch.zeros(16, 32, dtype=network.dtype)))
        linears[_OVERHEAD + name] = [(tiny, 32)] * len(linears[name])
    inputs = {
        (name, count): [torch.ones(count, size, dtype=networks[name.removeprefix(_OVERHEAD)].dtype) for _, size in each]
        for name, each in linears.items()
        for count in tokens
    }
    for _ in range(rounds):
        for key, xs in (item for item in inputs.items() for _ in range(_REPEATS)):
            start = time.perf_counter()
            for (linear, _), x in zip(linears[key[0]], xs, strict=True):
                linear(x)
            best[key] = min(best[key], time.perf_counter() - start)
    return {name: {count: best[name, count] - best[_OVERHEAD + name, count] for count in tokens} for name in networks}


def _linears(network: Network) -> list[tuple[Linear, int]]:
    """All linear layers of a pass over one token with their input sizes."""
    cfg = network.config
    linears = list[tuple[Linear, int]]()
    for layer in network.layers:
        linears += [(layer.qkv, cfg.hidden_size), (layer.out, cfg.heads * cfg.head_dim)]
        if layer.experts is None:
            linears += [(layer.up_gate, cfg.hidden_size), (layer.down, cfg.intermediate_size)]
        else:
            mixture = layer.experts.mixture
            linears += [(linear, cfg.hidden_size) for linear in layer.experts.up_gate[: mixture.chosen]]
            linears += [(linear, mixture.intermediate_size) for linear in layer.experts.down[: mixture.chosen]]
    return [*linears, (network.head, cfg.hidden_size)]
