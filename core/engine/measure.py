"""How fast is a decoder here? Plain decoding, and one pass over a draft of q tokens, in each precision.

    python -m outrider.core.engine.measure --precisions bfloat16,int8,int4

Random weights in SmolLM2-135M's shape: speed does not depend on what the weights say. Every figure is the median of
several rounds taken in turn, so that a machine that is busy for a while is busy for all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from outrider.core.decode import decode
from outrider.core.draft import Draft, Tree
from outrider.core.engine.linear import fastest
from outrider.core.engine.network import Config, Network, random_network
from outrider.core.engine.quantised import quantised
from outrider.core.engine.transformer import Decoder
from outrider.core.laws import Sampling
from outrider.core.methods import make_rule

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
