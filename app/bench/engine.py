"""`outrider bench throughput | long-context | offload | soak | device`: the decoding engine under load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.app.options import (
    DEVICE,
    LOOKUP_DRAFTER,
    Device,
    DrafterNames,
    JsonFile,
    KVCacheDtype,
    MaxNewTokens,
    NumPrompts,
    Repeat,
    Temperature,
    TextDtype,
    TextModelName,
    TextPrompts,
)
from outrider.app.options import names as parse_names
from outrider.core.assets.files import write_atomically


def throughput(
    batch_sizes: Annotated[str, typer.Option(metavar="SIZES", help="Comma-separated batch sizes.")] = "1,2,4,8,16,32",
    drafters: DrafterNames = "prompt-lookup,suffix,auto",
    model: TextModelName = "smollm2-135m",
    dtype: TextDtype = "bfloat16",
    device: Device = DEVICE,
    prompts: TextPrompts = None,
    num_prompts: NumPrompts = 16,
    max_new_tokens: MaxNewTokens = 64,
    repeat: Repeat = 3,
    kv_cache_dtype: KVCacheDtype = None,
    json_file: JsonFile = None,
) -> None:
    """Measure continuous batching by batch size, with and without drafting, and where drafting stops paying."""
    from outrider.text.bench.engine import pays_until
    from outrider.text.bench.engine import throughput as measure

    lm, items = _loaded(model, dtype, device, prompts, num_prompts, kv_cache_dtype)
    sizes = [int(size) for size in batch_sizes.split(",")]
    measured = _watched(
        measure(lm, items, drafters=parse_names(drafters), sizes=sizes, tokens=max_new_tokens, repeat=repeat), "Batches"
    )
    settings = {"model": model, "dtype": dtype, "device": device, "max_new_tokens": max_new_tokens, "repeat": repeat}
    _write(measured, settings | {"kv_cache_dtype": kv_cache_dtype, "stops_paying_at": pays_until(measured)}, json_file)


_CACHES = {"default": None, "int8": 8}  # bits


def long_context(
    context_lengths: Annotated[
        str, typer.Option(metavar="TOKENS", help="Tokens of filler text before every prompt, comma-separated.")
    ] = "6000,8000",
    drafters: DrafterNames = "sparse-cache,triforce,prompt-lookup",
    model: TextModelName = "smollm2-135m",
    dtype: TextDtype = "bfloat16",
    device: Device = DEVICE,
    prompts: TextPrompts = None,
    num_prompts: NumPrompts = 1,
    max_new_tokens: MaxNewTokens = 64,
    repeat: Repeat = 3,
    kv_cache_dtypes: Annotated[
        str, typer.Option(metavar="NAMES", help="Precisions of the KV cache: default (that of the activations), int8.")
    ] = "default,int8",
    json_file: JsonFile = None,
) -> None:
    """Measure long prompts with a KV cache of full precision and of 8 bits: speed without prefill, and cache sizes."""
    from outrider.core.errors import unknown
    from outrider.text.bench.engine import long_context as measure

    kinds = parse_names(kv_cache_dtypes)
    for name in kinds:
        if name not in _CACHES:
            raise unknown("kv_cache_dtype", name, tuple(_CACHES))
    lm, items = _loaded(model, dtype, device, prompts, num_prompts)
    sizes = [int(size) for size in context_lengths.split(",")]
    rows = measure(
        lm,
        items,
        drafters=parse_names(drafters),
        contexts=sizes,
        tokens=max_new_tokens,
        repeat=repeat,
        caches=[_CACHES[name] for name in kinds],
    )
    settings = {"model": model, "dtype": dtype, "device": device, "max_new_tokens": max_new_tokens, "repeat": repeat}
    _write(_watched(rows, "Contexts"), settings, json_file)


def offload(
    memory_budgets: Annotated[
        str,
        typer.Option(
            metavar="BUDGETS", help="Memory for layers, as fractions of all layers or in bytes, comma-separated."
        ),
    ] = "0.25,0.5,1",
    drafters: DrafterNames = "draft-model,specexec,suffix",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of specexec's tree.")] = 128,
    model: TextModelName = "smollm2-135m",
    dtype: TextDtype = "bfloat16",
    prompts: TextPrompts = None,
    num_prompts: NumPrompts = 4,
    max_new_tokens: MaxNewTokens = 48,
    repeat: Repeat = 3,
    json_file: JsonFile = None,
) -> None:
    """Measure decoding with layers read from disk in every pass, except for those that fit a memory budget."""
    from outrider.core.methods.draft_model import SPECEXEC
    from outrider.text.bench.engine import offloaded

    lm, items = _loaded(model, dtype, "cpu", prompts, num_prompts)
    rows = offloaded(
        lm,
        items,
        drafters=parse_names(drafters),
        budgets=[float(budget) for budget in memory_budgets.split(",")],
        options={SPECEXEC.name: {"nodes": nodes}},
        tokens=max_new_tokens,
        repeat=repeat,
    )
    settings = {"model": model, "dtype": dtype, "specexec.nodes": nodes, "max_new_tokens": max_new_tokens}
    _write(_watched(rows, "Budgets"), settings | {"repeat": repeat}, json_file)


def soak(
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 2000,
    drafter: Annotated[str, typer.Option(help="Drafter: plain, or a name from `outrider methods`.")] = LOOKUP_DRAFTER,
    temperature: Temperature = 0.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Maximum number of requests decoded side by side.")] = 8,
    model: Annotated[
        str, typer.Option(help="Target: a catalogue name, a hub id, a folder or a GGUF file; random: random weights.")
    ] = "random",
    dtype: TextDtype = "bfloat16",
    device: Device = DEVICE,
    kv_cache_dtype: KVCacheDtype = None,
    check_every: Annotated[int, typer.Option(min=1, help="Decode every Nth request again by itself and compare.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed of prompts, limits and cancellations.")] = 17,
    json_file: JsonFile = None,
) -> None:
    """Run many requests with random limits, stop strings and cancellations; fail if outputs differ or memory grows.

    Every finished request has to equal the same request decoded by itself, and memory has to stay flat."""
    from dataclasses import asdict

    from rich.console import Console

    from outrider.app.bench.progress import bar
    from outrider.core.testing.soak import soak as run
    from outrider.text.bench.engine import soaked

    console = Console(stderr=True, highlight=False)
    target, make, rule, source, sampling, stop = soaked(
        model, drafter, dtype=dtype, device=device, kv_cache_dtype=kv_cache_dtype, temperature=temperature, seed=seed
    )
    with bar(console, requests, "Soaking") as step:
        result = run(
            target,
            make,
            rule,
            requests,
            source=source,
            sampling=sampling,
            stop=stop,
            rows=batch_size,
            check=check_every,
            seed=seed,
            on_progress=lambda done: step("", done, requests),
        )
    report = {**asdict(result), "growth": result.growth, "flat": result.flat}
    if json_file is not None and str(json_file) == "-":
        print(json.dumps(report, indent=2))
    else:
        if json_file is not None:
            write_atomically(json_file, json.dumps(report, indent=2) + "\n")
        print(
            f"{result.requests:,} requests in {result.rounds:,} rounds, {result.emitted:,} tokens: {result.finished:,} "
            f"finished ({result.stopped:,} by a stop string), {result.cancelled:,} cancelled\n"
            f"outputs that differ from decoding alone: {result.wrong} of {result.finished // check_every:,} checked\n"
            f"KV cache: at most {result.cache_bytes / 1e6:.1f} MB; process memory: {result.resident[0] / 1e6:.0f} MB "
            f"at the start, {result.resident[-1] / 1e6:.0f} MB at the end, {result.growth / 1e6:+.1f} MB since the "
            "second quarter"
        )
    if result.wrong or not result.flat:
        raise typer.Exit(1)


def device(
    device: Device = "cuda",
    drafters: DrafterNames = "prompt-lookup,suffix,auto",
    model: TextModelName = "smollm2-135m",
    dtype: TextDtype = "bfloat16",
    prompts: TextPrompts = None,
    num_prompts: NumPrompts = 4,
    max_new_tokens: MaxNewTokens = 128,
    repeat: Repeat = 5,
    compare_engines: Annotated[
        bool,
        typer.Option(
            "--compare-engines", help="Also measure generate() of transformers, with dynamic and static cache."
        ),
    ] = False,
    modality: Annotated[
        str, typer.Option(help="text, image or speech; image and speech use random weights of the trained sizes.")
    ] = "text",
    counted: Annotated[
        bool,
        typer.Option(
            "--counted",
            help="Needs no GPU: count the launches, kernels, waits, bytes and operations of a round by part, on a "
            "shadow device with a random model of SmolLM2's shape, beside the time in which an H100 reads its weights.",
        ),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Compare CUDA-graph passes with eager ones, count kernel launches, and compare with the memory bandwidth."""
    if counted:
        from outrider.app.bench.counted import ledger

        _write(_watched(ledger(parse_names(drafters)), "Ledger"), {"device": "shadow", "model": "untrained"}, json_file)
        return
    from outrider.core.errors import unknown
    from outrider.text.bench.device import captured
    from outrider.text.bench.device import device as measure

    settings = {"model": model, "dtype": dtype, "device": device, "max_new_tokens": max_new_tokens, "repeat": repeat}
    if modality not in ("text", "image", "speech"):
        raise unknown("modality", modality, ("text", "image", "speech"))
    if modality != "text":
        from outrider.app.bench.random_models import DRAFTERS, PARTS

        network, run = PARTS[modality](dtype, device, num_prompts, max_new_tokens)
        measured = captured(network, run, drafters=DRAFTERS, repeat=repeat)
        _write(_watched(measured, "Device"), settings | {"model": f"untrained, {modality}"}, json_file)
        return
    lm, items = _loaded(model, dtype, device, prompts, num_prompts)
    rows = measure(
        lm, items, drafters=parse_names(drafters), tokens=max_new_tokens, repeat=repeat, peers=compare_engines
    )
    _write(_watched(rows, "Device"), settings, json_file)


def _loaded(
    model: str, dtype: str, device: str, prompts: Path | None, num_prompts: int, kv_cache_dtype: str | None = None
) -> tuple[Any, list[Any]]:
    from outrider import text
    from outrider.text.bench.run import load_prompts

    items = load_prompts(prompts, num_prompts)
    return text.load(model, dtype=dtype, device=device, kv_cache_dtype=kv_cache_dtype), items


def _watched(rows: Iterable[Mapping[str, Any]], title: str) -> list[dict[str, Any]]:
    """The rows as a list, with a status line that counts them while they are measured."""
    from rich.console import Console

    measured: list[dict[str, Any]] = []
    with Console(stderr=True, highlight=False).status(f"{title} ...") as status:
        for row in rows:
            measured.append(dict(row))
            status.update(f"{title}: {len(measured)} measured ...")
    return measured


COLUMNS: Mapping[str, tuple[str, str]] = {
    "rows": ("rows", "{}"),
    "context": ("context", "{:,}"),
    "cache": ("cache", "{}"),
    "budget": ("budget", "{:g}"),
    "drafter": ("drafter", "{}"),
    "part": ("part of a round", "{}"),
    "replays": ("replays", "{}"),
    "launches": ("other launches", "{}"),
    "kernels": ("kernels", "{}"),
    "waits": ("waits", "{}"),
    "mbytes": ("megabytes", "{:.2f}"),
    "mflops": ("million operations", "{:.2f}"),
    "bytes_ms": ("ms to move them", "{:.4f}"),
    "tokens_per_second": ("tokens / s", "{:.1f}"),
    "speedup": ("speedup", "{:.2f}"),
    "tokens_per_pass": ("tokens / pass", "{:.2f}"),
    "read_seconds": ("prefill s", "{:.1f}"),
    "cache_bytes": ("KV cache MB", "{:.1f}"),
    "copied_bytes": ("drafter's copy MB", "{:.1f}"),
    "as_exact": ("same as full-precision cache", "{:.0%}"),
    "held_bytes": ("layers in memory MB", "{:.1f}"),
    "read_bytes_per_token": ("read MB / token", "{:.1f}"),
    "waited": ("waiting for disk", "{:.0%}"),
    "launches_per_call": ("launches / pass", "{:.0f}"),
    "floor_ms": ("bandwidth bound ms / token", "{:.3f}"),
    "times_floor": ("relative to bound", "{:.2f}"),
}


def lines(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The titles and the cells of a table."""
    shown = [name for name in COLUMNS if name in rows[0]]
    body = []
    for row in rows:
        cells = []
        for name in shown:
            value = row[name] / 1e6 if "MB" in COLUMNS[name][0] else row[name]
            cells.append("-" if value is None else COLUMNS[name][1].format(value))
        body.append([*cells, f"{row['same']} of {row['of']}"] if "same" in row else cells)
    return [*(COLUMNS[name][0] for name in shown), *["same output"] * ("same" in rows[0])], body


def _write(rows: list[dict[str, Any]], settings: dict[str, Any], json_file: Path | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from outrider.app.viz.fitted import Fitted
    from outrider.core.trace import machine, versions

    if json_file is not None:
        report = {"machine": machine(), "versions": versions(), "settings": settings, "engine": True, "rows": rows}
        written = json.dumps(report, indent=2)
        if str(json_file) == "-":
            print(written)
            return
        write_atomically(json_file, written + "\n")
    titles, body = lines(rows)
    table = Table(box=SIMPLE_HEAD)
    for title in titles:
        table.add_column(title, no_wrap=title == "drafter")
    for cells in body:
        table.add_row(*cells)
    console = Console(highlight=False)
    console.print(Fitted(table))
    for name, size in settings.get("stops_paying_at", {}).items():
        console.print(
            f"{name}: " + ("pays at every batch size" if size is None else f"stops paying at batch size {size}")
        )
