"""Benchmarks of engine features: continuous batching, long contexts with an 8-bit cache, and offloaded layers; and the
requests of outrider.core.testing.soak.

Figures are medians of interleaved repetitions (outrider.text.bench.interleave).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch

from outrider.core.bench.runner import Item
from outrider.core.distribution import Sampling
from outrider.core.drafters.self_speculative.sparse_view import SparseView
from outrider.core.engine.linear import fastest
from outrider.core.engine.loading.folder import stored_dtype
from outrider.core.engine.long_context import make_decoder
from outrider.core.engine.network import random_network
from outrider.core.engine.offload import offload_layers
from outrider.core.engine.quantization.quantize import quantize
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods import Input
from outrider.core.methods.resolve import Catalogue, Provider
from outrider.core.protocol import BatchedTarget, Drafter, Rule
from outrider.core.rules.exact import Exact
from outrider.core.testing.soak import SoakRequest, random_requests
from outrider.text.bench.interleave import Round, Row, bound, now, turns
from outrider.text.bench.run import lengthened
from outrider.text.loading import load
from outrider.text.model import TextModel
from outrider.text.options import Options
from outrider.text.resolve_drafter import resolve_drafter


def throughput(
    lm: TextModel,
    items: Sequence[Item],
    *,
    drafters: Sequence[str],
    sizes: Sequence[int],
    tokens: int = 64,
    repeat: int = 3,
) -> Iterator[Row]:
    """Run twice as many requests as rows through a continuous batch of each size, plainly and with each drafter. Every
    prompt is read whole, since few prompts are repeated."""
    prompts = [str(item.content) for item in items]
    for rows in sizes:
        requested = [prompts[number % len(prompts)] for number in range(2 * rows)]

        def measure(drafter: str | None, rows: int = rows, requested: list[str] = requested) -> Round:
            with lm.batch(rows=rows, prefix_memory=None, drafter=drafter, max_new_tokens=tokens) as batch:
                start = time.perf_counter()
                requests = [batch.add(prompt) for prompt in requested]
                peak_bytes = 0
                while not batch.idle:
                    batch.round()
                    peak_bytes = max(peak_bytes, batch.cache_bytes)
                seconds = time.perf_counter() - start
            calls = sum(len(request.steps) for request in requests)
            outputs = [request.tokens for request in requests]
            return Round(seconds, sum(map(len, outputs)), calls, outputs, {"cache_bytes": peak_bytes})

        for row in turns(
            {name: bound(measure, None if name == "plain" else name) for name in ("plain", *drafters)}, repeat
        ):
            yield {"rows": rows, **row}


def pays_until(rows: Sequence[Row]) -> dict[str, int | None]:
    """Return for each drafter the smallest batch size at which it was slower than plain decoding, or None."""
    result: dict[str, int | None] = {}
    for row in rows:
        if row["drafter"] != "plain":
            known = result.setdefault(row["drafter"], None)
            if known is None and row["speedup"] < 1:
                result[row["drafter"]] = row["rows"]
    return result


def long_context(
    lm: TextModel,
    items: Sequence[Item],
    *,
    drafters: Sequence[str],
    contexts: Sequence[int],
    tokens: int = 64,
    repeat: int = 3,
    caches: Sequence[int | None] = (None, 8),
) -> Iterator[Row]:
    """Measure each prompt after `contexts` tokens of a long text, plainly and with each drafter, with caches of these
    bits (None: of the weights' precision). Times exclude reading the prompt. `same` compares with plain decoding on the
    same cache; `as_exact` is the share of the output before its first difference from plain decoding on the first."""
    network = decoder(lm).network
    original_target = lm.target
    for item in lengthened(lm, items, max(contexts)):
        if (length := len(lm.encode(item.content))) + tokens > lm.context:
            raise InvalidOption(
                f"a prompt of {length:,} tokens and {tokens} more do not fit in {lm.name}'s context of {lm.context:,}; "
                "shorten contexts"
            )

    def measure(bits: int | None, drafter: str | None, prompts: list[str]) -> Round:
        made: list[Decoder] = []

        def target() -> Decoder:
            made.append(make_decoder(network, cache_bits=bits))
            return made[-1]

        outputs, count, calls, reading, seconds, peak_bytes, copied = [], 0, 0, 0.0, 0.0, 0, 0
        lm.target = target
        try:
            for prompt in prompts:
                drafts = None if drafter is None else resolve_drafter(lm, Options(drafter=drafter)).made
                start = now(network.device)
                stream = lm.stream(prompt, drafter=drafts, max_new_tokens=tokens)
                next(stream)
                first = now(network.device)
                for _ in stream:
                    peak_bytes = max(peak_bytes, made[-1].cache.bytes)
                seconds, reading = seconds + now(network.device) - first, reading + first - start
                result = stream.results[0]
                calls += len(result.trace.steps) - 1
                outputs.append(result.tokens)
                count += len(result.tokens) - len(result.trace.steps[0].emitted)
                copied = max(copied, drafts.cache_bytes if isinstance(drafts, SparseView) else 0)
        finally:
            lm.target = original_target
        more = {"read_seconds": reading / len(prompts), "cache_bytes": peak_bytes, "copied_bytes": copied}
        return Round(seconds, max(count, 1), max(calls, 1), outputs, more)

    for context in contexts:
        prompts = [str(item.content) for item in lengthened(lm, items, context)]
        cases: dict[str, Callable[[], Round]] = {}
        baselines: dict[str, str] = {}
        for bits in caches:
            kind = lm.dtype if bits is None else "int8"
            for name in ("plain", *drafters):
                chosen_drafter = None if name == "plain" else name
                cases[f"{kind}/{name}"] = partial(measure, bits, chosen_drafter, prompts)
                baselines[f"{kind}/{name}"] = f"{kind}/plain"
        for row in turns(cases, repeat, baselines):
            kind, _, name = row["drafter"].partition("/")
            yield {"context": context, "cache": kind, **row, "drafter": name}


def offloaded(
    lm: TextModel,
    items: Sequence[Item],
    *,
    drafters: Sequence[str],
    budgets: Sequence[float],
    options: dict[str, dict[str, Any]] | None = None,
    tokens: int = 48,
    repeat: int = 3,
) -> Iterator[Row]:
    """Measure plain decoding and each drafter while only the given share of the layers stays in memory."""
    original_target, target = lm.target, decoder(lm)
    for budget in budgets:
        network, layers = offload_layers(target.network, budget)

        def under(network: Any = network) -> Decoder:
            return make_decoder(network)

        def measure(drafter: str | None, under: Any = under, layers: Any = layers) -> Round:
            given = (options or {}).get(drafter or "", {})
            wanted = Options(drafter=drafter, drafter_options=given)
            made = [resolve_drafter(lm, wanted).made for _ in items]  # before the layers are offloaded
            lm.target = under
            try:
                read, waited, passes, start = layers.read_bytes, layers.wait_seconds, layers.passes, time.perf_counter()
                results = [
                    lm.generate(str(item.content), drafter=drafts, max_new_tokens=tokens)
                    for item, drafts in zip(items, made, strict=True)
                ]
                seconds = time.perf_counter() - start
            finally:
                lm.target = original_target
            outputs = [result.tokens for result in results]
            count = sum(map(len, outputs))
            more = {
                "held_bytes": layers.held_bytes,
                "read_bytes_per_token": (layers.read_bytes - read) / count,
                "waited": (layers.wait_seconds - waited) / seconds,
                "passes": layers.passes - passes,
            }
            return Round(seconds, count, sum(len(result.trace.steps) for result in results), outputs, more)

        try:
            names = {name: bound(measure, None if name == "plain" else name) for name in ("plain", *drafters)}
            for row in turns(names, repeat):
                yield {"budget": budget, **row}
        finally:
            layers.close()


Soaking = tuple[
    Callable[[], BatchedTarget],
    Callable[[], Drafter] | None,
    Rule,
    Iterator[SoakRequest],
    Sampling,
    Callable[[int, Sequence[int]], int | None],
]


def soaked(
    model: str,
    drafter: str,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    kv_cache_dtype: str | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Soaking:
    """Return the arguments of outrider.core.testing.soak for a named model or a small random one."""
    make: Callable[[], Drafter] | None
    if model == "random":
        # sizes that the compiled kernels take
        config = Config(vocabulary=64, hidden_size=32, layers=2, heads=2, kv_heads=2, head_dim=32, intermediate_size=64)
        stored, kept = stored_dtype(dtype), None if kv_cache_dtype is None else 8
        network = random_network(config, 1, dtype=getattr(torch, stored), device=device)
        network = network.map_linears(fastest) if dtype == stored else quantize(network, int(dtype.removeprefix("int")))

        def target() -> BatchedTarget:
            return make_decoder(network, cache_bits=kept)

        end: tuple[int, ...] = (3,)

        def guesses() -> Drafter:
            inputs: dict[Input, Provider] = {Input.DRAFT_MODEL: lambda request: target()}
            return _drafts(Catalogue(inputs=inputs).drafter(drafter).made)

        make = None if drafter == "plain" else guesses
        vocabulary = config.vocabulary
    else:
        lm = load(model, dtype=dtype, device=device, kv_cache_dtype=kv_cache_dtype)
        make_target, end, vocabulary = lm.target, lm.end, decoder(lm).vocabulary

        def target() -> BatchedTarget:
            return cast(BatchedTarget, make_target())

        asked = Options(drafter=drafter)
        make = None if drafter == "plain" else lambda: _drafts(resolve_drafter(lm, asked).made)

    def stop(number: int, tokens: Sequence[int]) -> int | None:
        """An occasional stop string: a certain token after an even one."""
        pairs = enumerate(pairwise(tokens))
        return next((place for place, (one, two) in pairs if one % 2 == 0 and two % 61 == 7), None)

    sampling = Sampling(temperature=temperature, end=end)
    return target, make, Exact(), random_requests(vocabulary, seed), sampling, stop


def _drafts(drafter: Drafter | None) -> Drafter:
    assert drafter is not None
    return drafter


def decoder(lm: TextModel) -> Decoder:
    target = lm.target()
    if not isinstance(target, Decoder):
        raise Incompatible("this benchmark needs our own decoder, which runs models of the Llama and Qwen families")
    return target
