"""Compares the time of a pass with the device's memory bandwidth: with and without captured graphs, with kernel
launches per step, and with transformers' generate(). Independent of how networks compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

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

Case = Callable[[bool], Round]  # runs a configuration; if the argument is true, a short part
_MEASURE = 1.0  # seconds, of the memory bandwidth
_COUNTED = 16  # tokens of one prompt, during which launches are counted; a profile of whole generations takes minutes


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

    def run(drafter: str | None, short: bool) -> tuple[list[list[int]], int]:
        limit = _COUNTED if short else tokens
        results = [lm.generate(one, drafter=drafter, max_new_tokens=limit) for one in prompts[: 1 if short else None]]
        return [result.tokens for result in results], sum(len(result.trace.steps) for result in results)

    others = _transformers(lm, prompts, tokens) if peers else {}
    yield from captured(decoder(lm).network, run, drafters=drafters, repeat=repeat, others=others)


def captured(
    network: Network,
    run: Callable[[str | None, bool], tuple[list[list[int]], int]],
    *,
    drafters: Sequence[str],
    repeat: int = 3,
    others: Mapping[str, Case] = {},
) -> Iterator[Row]:
    """The same for any network: `run` decodes with a drafter, if it is true a short part, and returns the outputs and
    the number of passes."""
    passes = network.graphs = network.graphs or Graphs(network)  # drafters are captured if their target is
    floor = network.weight_bytes / measure(network.device, network.dtype, _MEASURE).bandwidth

    def ours(drafter: str | None, graphs: bool) -> Case:
        def case(short: bool) -> Round:
            network.graphs = passes if graphs else None
            start = now(network.device)
            outputs, calls = run(drafter, short)
            seconds = now(network.device) - start
            return Round(seconds, sum(map(len, outputs)), calls, outputs, {})

        return case

    cases = {"plain": ours(None, False), "plain, captured": ours(None, True)}
    cases |= {f"{name}, captured": ours(name, True) for name in drafters} | dict(others)
    rows = turns({name: bound(case, False) for name, case in cases.items()}, repeat)
    for row in rows:
        yield row | {
            "launches_per_call": _launches(cases[row["drafter"]]) if network.device.type == "cuda" else None,
            "floor_ms": floor * 1e3,
            "times_floor": 1 / row["tokens_per_second"] / floor,
        }


def _launches(case: Case) -> float:  # pragma: CUDA
    """Kernel launches per pass in a short part of a case."""
    rounds: list[Round] = []
    launches, _ = counts(lambda: rounds.append(case(True)))
    return launches / rounds[0].calls


def _transformers(lm: TextModel, prompts: Sequence[str], tokens: int) -> dict[str, Case]:
    """Cases for generate() with its default cache, and with a static cache, which is compiled on a GPU."""
    if (folder := lm.plain_folder()) is None:
        raise InvalidOption("comparing with transformers needs a model in a folder of its format")
    from outrider.core.assets import store

    model = store.transformers_model(folder, lm.dtype, lm.device)
    ids = [torch.tensor([lm.encode(prompt)], device=lm.device) for prompt in prompts]

    def generate(cache: str | None, short: bool) -> Round:
        outputs = []
        start = now(torch.device(lm.device))
        for prompt_ids in ids[: 1 if short else None]:
            given = {} if cache is None else {"cache_implementation": cache}
            mask = torch.ones_like(prompt_ids)
            output = model.generate(
                prompt_ids,
                attention_mask=mask,
                max_new_tokens=_COUNTED if short else tokens,
                do_sample=False,
                eos_token_id=list(lm.end),
                **given,
            )
            outputs.append(output[0, prompt_ids.shape[1] :].tolist())
        seconds = now(torch.device(lm.device)) - start
        count = sum(map(len, outputs))
        return Round(seconds, count, count, outputs, {})

    return {"transformers": partial(generate, None), "transformers, static": partial(generate, "static")}
