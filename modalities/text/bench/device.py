"""Compares the time of a pass with the device's memory bandwidth: with and without captured graphs, with kernel
launches per step, and with transformers' generate(). Independent of how networks compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from outrider.core.bench.device_costs import counts
from outrider.core.bench.runner import Item
from outrider.core.cost.theory import measure
from outrider.core.engine.captured_passes import Graphs
from outrider.core.engine.network import Network
from outrider.core.errors import InvalidOption
from outrider.text.bench.engine import decoder
from outrider.text.bench.interleave import Round, Row, bound, now, turns
from outrider.text.model import TextModel

_MEASURE = 1.0  # seconds, of the memory bandwidth


def device(
    lm: TextModel,
    items: Sequence[Item],
    *,
    drafters: Sequence[str],
    tokens: int = 128,
    repeat: int = 3,
    peers: bool = False,
) -> Iterator[Row]:
    """Measure plain decoding without and with captured passes, each drafter, and transformers' generate() if requested.
    Rows include kernel launches per step (on CUDA), and the time per token relative to reading the weights once at the
    measured memory bandwidth."""
    prompts = [str(item.content) for item in items]

    def run(drafter: str | None) -> tuple[list[list[int]], int]:
        results = [lm.generate(prompt, drafter=drafter, max_new_tokens=tokens) for prompt in prompts]
        return [result.tokens for result in results], sum(len(result.trace.steps) for result in results)

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
    """The same for any network: `run` decodes with a drafter and returns the outputs and the number of passes."""
    passes = network.graphs = network.graphs or Graphs(network)  # drafters are captured if their target is
    floor = network.weight_bytes / measure(network.device, network.dtype, _MEASURE).bandwidth

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
    for case in cases.values():  # warm-up: captures shapes and compiles kernels
        case()
    on_cuda = network.device.type == "cuda"
    launch_counts = {name: counts(case)[0] if on_cuda else None for name, case in cases.items()}
    for row in turns(cases, repeat):
        calls = row["tokens"] / row["tokens_per_pass"]
        launch_count = launch_counts[row["drafter"]]
        yield row | {
            "launches_per_call": None if launch_count is None else launch_count / calls,
            "floor_ms": floor * 1e3,
            "times_floor": 1 / row["tokens_per_second"] / floor,
        }


def _transformers(lm: TextModel, prompts: Sequence[str], tokens: int) -> dict[str, Callable[[], Round]]:
    """Cases for generate() with its default cache, and with a static cache, which is compiled on a GPU."""
    if lm.folder is None:
        raise InvalidOption("comparing with transformers needs a model in a folder of its format")
    from outrider.core.assets import store

    model = store.transformers_model(lm.folder, lm.dtype, lm.device)
    ids = [torch.tensor([lm.encode(prompt)], device=lm.device) for prompt in prompts]

    def generate(cache: str | None) -> Round:
        outputs = []
        start = now(torch.device(lm.device))
        for prompt_ids in ids:
            given = {} if cache is None else {"cache_implementation": cache}
            mask = torch.ones_like(prompt_ids)
            output = model.generate(
                prompt_ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=list(lm.end),
                **given,
            )
            outputs.append(output[0, prompt_ids.shape[1] :].tolist())
        seconds = now(torch.device(lm.device)) - start
        count = sum(map(len, outputs))
        return Round(seconds, count, count, outputs, {})

    return {"transformers": lambda: generate(None), "transformers, static": lambda: generate("static")}
