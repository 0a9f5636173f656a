"""What the products of networks take by themselves, the networks in turns: a machine that is busy for a while is busy
for all of them. Knows nothing of what is computed between them.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from outrider.core.engine.linear import Dense, Linear, fastest
from outrider.core.engine.network import Network

_NOTHING = "for nothing, beside "
_AGAIN = 4


@torch.inference_mode()
def products(
    networks: Mapping[str, Network], tokens: Sequence[int] = (1, 5), rounds: int = 12
) -> dict[str, dict[int, float]]:
    """Seconds that all matrices of each network take by themselves, one behind another, for so many tokens at once: the
    least of several rounds, the networks taken in turns, without what as many of the smallest matrices take. Each turn
    is a few passes, so that the processor's cache holds what it holds when tokens are decoded."""
    best: dict[tuple[str, int], float] = defaultdict(lambda: math.inf)
    known: dict[str, list[tuple[Linear, int]]] = {name: _matrices(network) for name, network in networks.items()}
    for name, network in networks.items():
        tiny = fastest(Dense(torch.zeros(16, 32, dtype=network.dtype)))
        known[_NOTHING + name] = [(tiny, 32)] * len(known[name])
    inputs = {
        (name, count): [torch.ones(count, size, dtype=networks[name.removeprefix(_NOTHING)].dtype) for _, size in found]
        for name, found in known.items()
        for count in tokens
    }
    for _ in range(rounds):
        for key, given in (one for one in inputs.items() for _ in range(_AGAIN)):
            start = time.perf_counter()
            for (matrix, _), x in zip(known[key[0]], given, strict=True):
                matrix(x)
            best[key] = min(best[key], time.perf_counter() - start)
    return {name: {count: best[name, count] - best[_NOTHING + name, count] for count in tokens} for name in networks}


def _matrices(network: Network) -> list[tuple[Linear, int]]:
    """All that a pass multiplies by, and how many numbers go in."""
    form = network.config
    sizes = (form.hidden_size, form.heads * form.head_dim, form.hidden_size, form.intermediate_size)
    found = list[tuple[Linear, int]]()
    for layer in network.layers:
        found += zip((layer.qkv, layer.out, layer.up_gate, layer.down), sizes, strict=True)
    return [*found, (network.head, form.hidden_size)]
