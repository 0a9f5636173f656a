"""What the engine room brings, measured: requests side by side with and without drafting, prompts of thousands of
tokens over caches of two precisions, layers streamed under a budget, and on a device how far from its memory's speed a
pass is.

Every figure is the middle one of rounds taken in turn, each configuration once a round, so that a machine that is busy
for a while is busy for all of them. Knows text models; nothing of how they compute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, cast

import torch

from outrider.core.bench import Item
from outrider.core.decode import Drafter, Rule
from outrider.core.engine.graphs import Graphs
from outrider.core.engine.network import Config, Network, random_network
from outrider.core.engine.streamed import streamed
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.laws import Sampling
from outrider.core.methods import make_drafter, make_rule
from outrider.core.soak import Wish, wishes
from outrider.core.target import Roomy
from outrider.text.bench import lengthened
from outrider.text.loading import load
from outrider.text.model import TextModel
from outrider.text.options import Options

Row = dict[str, Any]


@dataclass(frozen=True)
class _Round:
    """One configuration, once."""

    seconds: float
    tokens: int
    calls: int
    outputs: list[list[int]]
    more: Row


def crowd(
    lm: TextModel,
    items: Sequence[Item],
    *,
    drafters: Sequence[str],
    sizes: Sequence[int],
    tokens: int = 64,
    repeat: int = 3,
) -> Iterator[Row]:
    """Twice as many requests as rows, through a continuous batch of each size, plainly and with each drafter."""
    prompts = [str(item.content) for item in items]
    for rows in sizes:
        asked = [prompts[number % len(prompts)] for number in range(2 * rows)]

        def one(drafter: str | None, rows: int = rows, asked: list[str] = asked) -> _Round:
            with lm.batch(rows=rows, drafter=drafter, max_new_tokens=tokens) as batch:
                start = time.perf_counter()
                requests = [batch.add(prompt) for prompt in asked]
                most = 0
                while not batch.idle:
                    batch.round()
                    most = max(most, batch.cache_bytes)
                seconds = time.perf_counter() - start
            calls = sum(len(request.steps) for request in requests)
            outputs = [request.tokens for request in requests]
            return _Round(seconds, sum(map(len, outputs)), calls, outputs, {"cache_bytes": most})

        for row in _turns(
            {name: _bound(one, None if name == "plain" else name) for name in ("plain", *drafters)}, repeat
        ):
            yield {"rows": rows, **row}


def pays_until(rows: Sequence[Row]) -> dict[str, int | None]:
    """For each drafter the smallest batch in which it did not pay; None: it always did."""
    found: dict[str, int | None] = {}
    for row in rows:
        if row["drafter"] != "plain":
            known = found.setdefault(row["drafter"], None)
            if known is None and row["speedup"] < 1:
                found[row["drafter"]] = row["rows"]
    return found


def long(
    lm: TextModel,
    items: Sequence[Item],
    *,
    drafters: Sequence[str],
    contexts: Sequence[int],
    tokens: int = 64,
    repeat: int = 3,
) -> Iterator[Row]:
    """Each prompt behind so much of a long text, plainly and with each drafter, over a cache of the weights' precision
    and over one of 8 bits. Times are those behind the first token, the prompt's reading apart; an output is the same if
    it is plain decoding's over the same cache, and `as_exact` is how much of it was decoded before it first differed
    from plain decoding's over the exact cache."""
    network = _decoder(lm).network
    whole = lm.target

    def one(bits: int | None, drafter: str | None, prompts: list[str]) -> _Round:
        made: list[Decoder] = []

        def target() -> Decoder:
            made.append(Decoder(network, cache_bits=bits))
            return made[-1]

        outputs, count, calls, reading, seconds, held, copied = [], 0, 0, 0.0, 0.0, 0, 0
        lm.target = target
        try:
            for prompt in prompts:
                drafts = None if drafter is None else lm.drafter(Options(drafter=drafter))[0]
                start = _now(network.device)
                stream = lm.stream(prompt, drafter=drafts, max_new_tokens=tokens)
                next(stream)
                first = _now(network.device)
                for _ in stream:
                    held = max(held, made[-1].cache.bytes)
                seconds, reading = seconds + _now(network.device) - first, reading + first - start
                result = stream.results[0]
                calls += len(result.trace.steps) - 1
                outputs.append(result.tokens)
                count += len(result.tokens) - len(result.trace.steps[0].emitted)
                copied = max(copied, getattr(drafts, "cache_bytes", 0))
        finally:
            lm.target = whole
        more = {"read_seconds": reading / len(prompts), "cache_bytes": held, "copied_bytes": copied}
        return _Round(seconds, max(count, 1), max(calls, 1), outputs, more)

    for context in contexts:
        prompts = [str(item.content) for item in lengthened(lm, items, context)]
        cases: dict[str, Callable[[], _Round]] = {}
        beside: dict[str, str] = {}
        for bits in (None, 8):
            kind = lm.dtype if bits is None else "int8"
            for name in ("plain", *drafters):
                given = None if name == "plain" else name
                cases[f"{kind}/{name}"] = partial(one, bits, given, prompts)
                beside[f"{kind}/{name}"] = f"{kind}/plain"
        for row in _turns(cases, repeat, beside):
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
    """Plainly and with each drafter while so much of the layers stays in memory, and the rest is read in every pass."""
    whole, target = lm.target, _decoder(lm)
    for budget in budgets:
        network, shelf = streamed(target.network, budget)

        def under(network: Any = network) -> Decoder:
            return Decoder(network)

        def one(drafter: str | None, under: Any = under, shelf: Any = shelf) -> _Round:
            given = (options or {}).get(drafter or "", {})
            made = lm.equipped(drafter, given) if drafter else {}
            lm.target = under
            try:
                read, waited, passes, start = shelf.read, shelf.waited, shelf.passes, time.perf_counter()
                found = [
                    lm.generate(str(item.content), drafter=drafter, drafter_options=made, max_new_tokens=tokens)
                    for item in items
                ]
                seconds = time.perf_counter() - start
            finally:
                lm.target = whole
            outputs = [result.tokens for result in found]
            count = sum(map(len, outputs))
            more = {
                "held_bytes": shelf.held,
                "read_bytes_per_token": (shelf.read - read) / count,
                "waited": (shelf.waited - waited) / seconds,
                "passes": shelf.passes - passes,
            }
            return _Round(seconds, count, sum(len(result.trace.steps) for result in found), outputs, more)

        try:
            names = {name: _bound(one, None if name == "plain" else name) for name in ("plain", *drafters)}
            for row in _turns(names, repeat):
                yield {"budget": budget, **row}
        finally:
            shelf.close()


Soaking = tuple[
    Callable[[], Roomy],
    Callable[[], Drafter] | None,
    Rule,
    Iterator[Wish],
    Sampling,
    Callable[[int, Sequence[int]], int | None],
]


def soaked(
    model: str,
    drafter: str,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    cache: str | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Soaking:
    """What outrider.core.soak takes, for a model by its name, or for a small random one."""
    make: Callable[[], Drafter] | None
    if model == "random":
        config = Config(vocabulary=61, width=32, layers=2, heads=2, kv_heads=2, head_dim=32, hidden=48)
        network, kept = random_network(config, 1, device=device), None if cache is None else 8

        def target() -> Roomy:
            return Decoder(network, cache_bits=kept)

        end: tuple[int, ...] = (3,)

        def guesses() -> Drafter:
            return _drafts(make_drafter(drafter, **({"model": target()} if drafter == "draft-model" else {})))

        make = None if drafter == "plain" else guesses
        vocabulary = config.vocabulary
    else:
        lm = load(model, dtype=dtype, device=device, cache=cache)
        whole, end, vocabulary = lm.target, lm.end, _decoder(lm).vocabulary

        def target() -> Roomy:
            return cast(Roomy, whole())

        asked = Options(drafter=drafter)
        make = None if drafter == "plain" else lambda: _drafts(lm.drafter(asked)[0])

    def stop(number: int, tokens: Sequence[int]) -> int | None:
        """A pattern that comes up now and then, and is cut off: some token behind an even one."""
        pairs = enumerate(pairwise(tokens))
        return next((place for place, (one, two) in pairs if one % 2 == 0 and two % 61 == 7), None)

    sampling = Sampling(temperature=temperature, end=end)
    return target, make, make_rule("exact"), wishes(vocabulary, seed), sampling, stop


def _drafts(drafter: Drafter | None) -> Drafter:
    assert drafter is not None
    return drafter


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
    yield from captured(_decoder(lm).network, run, drafters=drafters, repeat=repeat, others=others)


def captured(
    network: Network,
    run: Callable[[str | None], tuple[list[list[int]], int]],
    *,
    drafters: Sequence[str],
    repeat: int = 3,
    others: Mapping[str, Callable[[], _Round]] = {},
) -> Iterator[Row]:
    """The same for whatever runs on a network: `run` decodes with a drafter -> the outputs, and how many calls."""
    passes = network.graphs = network.graphs or Graphs(network)  # drafters are recorded if their target is
    floor = network.weight_bytes / bandwidth(network.device)

    def ours(drafter: str | None, graphs: bool) -> _Round:
        network.graphs = passes if graphs else None
        start = _now(network.device)
        outputs, calls = run(drafter)
        seconds = _now(network.device) - start
        return _Round(seconds, sum(map(len, outputs)), calls, outputs, {})

    cases: dict[str, Callable[[], _Round]] = {
        "plain": lambda: ours(None, False),
        "plain, captured": lambda: ours(None, True),
        **{f"{name}, captured": _bound(lambda name: ours(name, True), name) for name in drafters},
    }
    cases |= others
    for case in cases.values():  # shapes are captured, kernels compiled
        case()
    counted = {name: launches(case, network.device) for name, case in cases.items()}
    for row in _turns(cases, repeat):
        calls = row["tokens"] / row["tokens_per_call"]
        found = counted[row["drafter"]]
        yield row | {
            "launches_per_call": None if found is None else found / calls,
            "floor_ms": floor * 1e3,
            "times_floor": 1 / row["tokens_per_second"] / floor,
        }


def _transformers(lm: TextModel, prompts: Sequence[str], tokens: int) -> dict[str, Callable[[], _Round]]:
    """generate() as it comes, and with a static cache, which it compiles on a GPU."""
    if lm.folder is None:
        raise InvalidOption("peers are for models in a folder of transformers' own format")
    from outrider.core import assets

    model = assets.transformers_model(lm.folder, lm.dtype, lm.device)
    ids = [torch.tensor([lm.encode(prompt)], device=lm.device) for prompt in prompts]

    def generate(cache: str | None) -> _Round:
        outputs = []
        start = _now(torch.device(lm.device))
        for one in ids:
            given = {} if cache is None else {"cache_implementation": cache}
            mask = torch.ones_like(one)
            found = model.generate(
                one, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=list(lm.end), **given
            )
            outputs.append(found[0, one.shape[1] :].tolist())
        seconds = _now(torch.device(lm.device)) - start
        count = sum(map(len, outputs))
        return _Round(seconds, count, count, outputs, {})

    return {"transformers": lambda: generate(None), "transformers, static": lambda: generate("static")}


def bandwidth(place: torch.device) -> float:
    """Bytes a second that a large copy moves, the best of several."""
    source = torch.ones((1 << 28) if place.type == "cuda" else 1 << 26, dtype=torch.uint8, device=place)
    into = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        start = _now(place)
        into.copy_(source)
        best = min(best, _now(place) - start)
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


def _now(place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter()


def _agreed(wanted: Sequence[list[int]], found: Sequence[list[int]]) -> float:
    """How much of outputs came before they first differ."""
    pairs = (zip(a, b, strict=False) for a, b in zip(wanted, found, strict=True))
    same = sum(len(list(takewhile(lambda pair: pair[0] == pair[1], one))) for one in pairs)
    return same / max(sum(map(len, wanted)), 1)


def _bound(work: Callable[[Any], _Round], name: Any) -> Callable[[], _Round]:
    return lambda: work(name)


def _decoder(lm: TextModel) -> Decoder:
    target = lm.target()
    if not isinstance(target, Decoder):
        raise Incompatible("this is for what runs on our own decoder: models of Llama's and Qwen's families")
    return target


def _turns(cases: dict[str, Callable[[], _Round]], repeat: int, beside: Mapping[str, str] = {}) -> list[Row]:
    """Each case once a round, the first round, which warms up, left out -> a row each; the first case is plain.
    `beside`: whose outputs a case's should be, where that is not the first's."""
    rounds: dict[str, list[_Round]] = {name: [] for name in cases}
    for number in range(repeat + 1):
        for name, case in cases.items():
            one = case()
            if number:
                rounds[name].append(one)
    plain = next(iter(rounds.values()))
    rows = []
    for name, found in rounds.items():
        ratios = [a.seconds / a.tokens / (b.seconds / b.tokens) for a, b in zip(plain, found, strict=True)]
        last = found[-1]
        wanted = rounds[beside[name]] if beside else plain
        same = sum(a == b for a, b in zip(wanted[-1].outputs, last.outputs, strict=True))
        if beside:
            last.more["as_exact"] = _agreed(plain[-1].outputs, last.outputs)
        rows.append(
            {
                "drafter": name,
                "tokens": last.tokens,
                "tokens_per_second": statistics.median(it.tokens / it.seconds for it in found),
                "speedup": statistics.median(ratios),
                "tokens_per_call": last.tokens / last.calls,
                "same": same,
                "of": len(last.outputs),
                **last.more,
            }
        )
    return rows
