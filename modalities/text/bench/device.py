"""How far from its memory's speed a pass is on a device: captured passes beside uncaptured ones, kernel launches a
step, and transformers' own generate() beside them. Knows networks and clocks; nothing of how they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from outrider.core.bench.runner import Item
from outrider.core.engine.network import Graphs, Network
from outrider.core.errors import InvalidOption
from outrider.text.bench.engine import decoder
from outrider.text.bench.interleave import Round, Row, bound, now, turns
from outrider.text.model import TextModel


def device(
    lm: TextModel,
    items: Sequence[Item],
    *,
    drafters: Sequence[str],
    tokens: int = 128,
    repeat: int = 3,
    peers: bool = False,
) -> Iterator[Row]:
    """Plain decoding without and with captured passes, each drafter, and transformers' own generate() if wanted; with
    kernel launches a step (on CUDA), and how much longer a token takes than reading the weights once at the speed that
    this device's memory was seen to have."""
    prompts = [str(item.content) for item in items]

    def run(drafter: str | None) -> tuple[list[list[int]], int]:
        results = [lm.generate(prompt, drafter=drafter, max_new_tokens=tokens) for prompt in prompts]
        return [one.tokens for one in results], sum(len(one.trace.steps) for one in results)

    others = _transformers(lm, prompts, tokens) if peers else {}
    yield from captured(decoder(lm).network, run, drafters=drafters, repeat=repeat, others=others)


def captured(
    network: Network,
    run: Callable[[str | None], tuple[list[list[int]], int]],
    *,
    drafters: Sequence[str],
    repeat: int = 3,
    others: Mapping[str, Callable[[], Round]] = {},
) -> Iterator[Row]:
    """The same for whatever runs on a network: `run` decodes with a drafter -> the outputs, and how many calls."""
    passes = network.graphs = network.graphs or Graphs(network)  # drafters are recorded if their target is
    floor = network.weight_bytes / bandwidth(network.device)

    def ours(drafter: str | None, graphs: bool) -> Round:
        network.graphs = passes if graphs else None
        start = now(network.device)
        outputs, calls = run(drafter)
        seconds = now(network.device) - start
        return Round(seconds, sum(map(len, outputs)), calls, outputs, {})

    cases: dict[str, Callable[[], Round]] = {
        "plain": lambda: ours(None, False),
        "plain, captured": lambda: ours(None, True),
        **{f"{name}, captured": bound(lambda name: ours(name, True), name) for name in drafters},
    }
    cases |= others
    for case in cases.values():  # shapes are captured, kernels compiled
        case()
    counted = {name: launches(case, network.device) for name, case in cases.items()}
    for row in turns(cases, repeat):
        calls = row["tokens"] / row["tokens_per_pass"]
        found = counted[row["drafter"]]
        yield row | {
            "launches_per_call": None if found is None else found / calls,
            "floor_ms": floor * 1e3,
            "times_floor": 1 / row["tokens_per_second"] / floor,
        }


def _transformers(lm: TextModel, prompts: Sequence[str], tokens: int) -> dict[str, Callable[[], Round]]:
    """generate() as it comes, and with a static cache, which it compiles on a GPU."""
    if lm.folder is None:
        raise InvalidOption("peers are for models in a folder of transformers' own format")
    from outrider.core.assets import store

    model = store.transformers_model(lm.folder, lm.dtype, lm.device)
    ids = [torch.tensor([lm.encode(prompt)], device=lm.device) for prompt in prompts]

    def generate(cache: str | None) -> Round:
        outputs = []
        start = now(torch.device(lm.device))
        for one in ids:
            given = {} if cache is None else {"cache_implementation": cache}
            mask = torch.ones_like(one)
            found = model.generate(
                one, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=list(lm.end), **given
            )
            outputs.append(found[0, one.shape[1] :].tolist())
        seconds = now(torch.device(lm.device)) - start
        count = sum(map(len, outputs))
        return Round(seconds, count, count, outputs, {})

    return {"transformers": lambda: generate(None), "transformers, static": lambda: generate("static")}


def bandwidth(place: torch.device) -> float:
    """Bytes a second that a large copy moves, the best of several."""
    source = torch.ones((1 << 28) if place.type == "cuda" else 1 << 26, dtype=torch.uint8, device=place)
    into = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        start = now(place)
        into.copy_(source)
        best = min(best, now(place) - start)
    return 2 * len(source) / best


def launches(work: Callable[[], object], place: torch.device) -> int | None:
    """Kernels and graphs that the host launched; None where there is no CUDA to ask."""
    if place.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    names = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
    return sum(int(one.count) for one in seen.key_averages() if one.key.startswith(names))
