"""How fast is a decoder here? Plain decoding, and one pass over a draft of q tokens, in each precision.

    python -m outrider.core.engine.measure --precisions bfloat16,int8,int4

Random weights in SmolLM2-135M's shape: speed does not depend on what the weights say. Every figure is the median of
several rounds taken in turn, so that a machine that is busy for a while is busy for all of them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from outrider.core.decode import decode
from outrider.core.draft import Draft
from outrider.core.engine.linear import Dense, Linear, fastest
from outrider.core.engine.network import Config, Network, random_network
from outrider.core.engine.quantised import quantised
from outrider.core.engine.transformer import Decoder
from outrider.core.laws import Sampling
from outrider.core.methods import make_rule
from outrider.core.tree import Tree

SMOLLM2 = Config(
    vocabulary=49_152,
    width=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    hidden=1536,
    rope_theta=100_000.0,
    norm_eps=1e-5,
    context=8192,
)
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_NOTHING = "for nothing, beside "
_AGAIN = 4


def models(names: list[str]) -> dict[str, Decoder]:
    """One decoder for each precision, of the same random weights."""
    found: dict[str, Decoder] = {}
    for name in names:
        dtype = torch.bfloat16 if name.startswith("int") else getattr(torch, name)
        network: Network = random_network(SMOLLM2, dtype=dtype)
        found[name] = Decoder(
            quantised(network, int(name[3:])) if name.startswith("int") else network.replaced(fastest)
        )
    return found


def plain(model: Decoder, prompt: int, tokens: int) -> float:
    """Seconds a token of plain greedy decoding, the prompt's reading left out."""
    steps = decode(
        model, None, make_rule("exact"), [list(range(prompt))], sampling=Sampling(temperature=0), limit=tokens
    )
    next(steps)
    start = time.perf_counter()
    return sum(1 for _ in steps) and (time.perf_counter() - start) / (tokens - 1)


def scoring(model: Decoder, prompt: int, width: int) -> Callable[[], float]:
    """Seconds of one pass over the root and width - 1 drafted tokens, greedy laws behind each included."""
    draft = Draft.guess(
        torch.ones(1, width - 1, dtype=torch.long), Tree.chain(width - 1), torch.ones(1, width - 1, dtype=torch.bool)
    )

    def once() -> float:
        start = time.perf_counter()
        model.score(draft).laws()
        return time.perf_counter() - start

    model.begin([list(range(prompt))], Sampling(temperature=0))
    return once


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
    sizes = (form.width, form.heads * form.head_dim, form.width, form.hidden)
    found = list[tuple[Linear, int]]()
    for layer in network.layers:
        found += zip((layer.qkv, layer.out, layer.up_gate, layer.down), sizes, strict=True)
    return [*found, (network.head, form.width)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--precisions", default="bfloat16,int8,int4")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    decoders = models(chosen.precisions.split(","))
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(chosen.rounds):
        for name, model in decoders.items():
            speeds[name].append(1 / plain(model, chosen.prompt, chosen.tokens))
    print(f"{'':>9}  plain tok/s (best)   one pass over q tokens, ms: q = {' / '.join(map(str, WIDTHS))}")
    for name, model in decoders.items():
        passes = []
        for width in WIDTHS:
            once = scoring(model, chosen.prompt, width)
            passes.append(statistics.median(once() for _ in range(10 * chosen.rounds)) * 1e3)
        fastest_plain = f"{statistics.median(speeds[name]):6.1f}     ({max(speeds[name]):5.1f})"
        print(f"{name:>9}  {fastest_plain}      {' / '.join(f'{one:.1f}' for one in passes)}", flush=True)


if __name__ == "__main__":
    main()
