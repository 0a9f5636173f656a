"""`outrider bench crowd | long | offload | soak | device`: the decoding engine under load, as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.app.options import Cache

_MODEL = Annotated[str, typer.Option(help="A name, a hub id, a folder or a GGUF file.")]
_DRAFTERS = Annotated[str, typer.Option(help="Drafters, comma-separated.")]
_DTYPE = Annotated[str, typer.Option(help="float32, bfloat16, int8, int4, ...")]
_DEVICE = Annotated[str, typer.Option(help="cpu, cuda, ...")]
_PROMPTS = Annotated[Path | None, typer.Option(help="JSON lines. Default: built-in prompts.")]
_LIMIT = Annotated[int, typer.Option(min=1, help="Number of prompts, from every task in turn.")]
_TOKENS = Annotated[int, typer.Option(min=1, help="For each prompt.")]
_REPEAT = Annotated[int, typer.Option(min=1, help="Repetitions; the table shows the median one.")]
_JSON = Annotated[Path | None, typer.Option("--json", help="Write the table to this file; - is stdout.")]


def crowd(
    rows: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,2,4,8,16,32",
    drafters: _DRAFTERS = "prompt-lookup,suffix,auto",
    model: _MODEL = "smollm2-135m",
    dtype: _DTYPE = "bfloat16",
    device: _DEVICE = "cpu",
    prompts: _PROMPTS = None,
    limit: _LIMIT = 16,
    max_new_tokens: _TOKENS = 64,
    repeat: _REPEAT = 3,
    cache: Cache = None,
    json_file: _JSON = None,
) -> None:
    """Measure continuous batching by batch size, with and without drafting, and where drafting stops paying."""
    from outrider.text.bench.engine import crowd as measure
    from outrider.text.bench.engine import pays_until

    lm, items = _loaded(model, dtype, device, prompts, limit, cache)
    sizes = [int(size) for size in rows.split(",")]
    found = _watched(
        measure(lm, items, drafters=_names(drafters), sizes=sizes, tokens=max_new_tokens, repeat=repeat), "Batches"
    )
    settings = {"model": model, "dtype": dtype, "device": device, "max_new_tokens": max_new_tokens, "repeat": repeat}
    _write(found, settings | {"cache": cache, "stops_paying_at": pays_until(found)}, json_file)


def long(
    contexts: Annotated[
        str, typer.Option(help="Tokens of filler text before every prompt, comma-separated.")
    ] = "6000,8000",
    drafters: _DRAFTERS = "sparse-cache,triforce,prompt-lookup",
    model: _MODEL = "smollm2-135m",
    dtype: _DTYPE = "bfloat16",
    device: _DEVICE = "cpu",
    prompts: _PROMPTS = None,
    limit: _LIMIT = 1,
    max_new_tokens: _TOKENS = 64,
    repeat: _REPEAT = 3,
    json_file: _JSON = None,
) -> None:
    """Measure long prompts with a KV cache of full precision and of 8 bits: speed without prefill, and cache sizes."""
    from outrider.text.bench.engine import long as measure

    lm, items = _loaded(model, dtype, device, prompts, limit)
    sizes = [int(size) for size in contexts.split(",")]
    rows = measure(lm, items, drafters=_names(drafters), contexts=sizes, tokens=max_new_tokens, repeat=repeat)
    settings = {"model": model, "dtype": dtype, "device": device, "max_new_tokens": max_new_tokens, "repeat": repeat}
    _write(_watched(rows, "Contexts"), settings, json_file)


def offload(
    budgets: Annotated[
        str, typer.Option(help="Memory for layers, as fractions of all layers or in bytes, comma-separated.")
    ] = "0.25,0.5,1",
    drafters: _DRAFTERS = "draft-model,specexec,suffix",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of specexec's tree.")] = 128,
    model: _MODEL = "smollm2-135m",
    dtype: _DTYPE = "bfloat16",
    prompts: _PROMPTS = None,
    limit: _LIMIT = 4,
    max_new_tokens: _TOKENS = 48,
    repeat: _REPEAT = 3,
    json_file: _JSON = None,
) -> None:
    """Measure decoding with layers read from disk in every pass, except for those that fit a memory budget."""
    from outrider.text.bench.engine import offloaded

    lm, items = _loaded(model, dtype, "cpu", prompts, limit)
    rows = offloaded(
        lm,
        items,
        drafters=_names(drafters),
        budgets=[float(one) for one in budgets.split(",")],
        options={"specexec": {"nodes": nodes}},
        tokens=max_new_tokens,
        repeat=repeat,
    )
    settings = {"model": model, "dtype": dtype, "specexec.nodes": nodes, "max_new_tokens": max_new_tokens}
    _write(_watched(rows, "Budgets"), settings | {"repeat": repeat}, json_file)


def soak(
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 2000,
    drafter: Annotated[str, typer.Option(help="The drafter, or plain.")] = "prompt-lookup",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 8,
    model: Annotated[
        str, typer.Option(help="A name, a hub id, a folder or a GGUF file; random: a small model with random weights.")
    ] = "random",
    dtype: _DTYPE = "bfloat16",
    device: _DEVICE = "cpu",
    cache: Cache = None,
    check: Annotated[int, typer.Option(min=1, help="Decode every Nth request again by itself and compare.")] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts, limits and cancellations.")] = 17,
    json_file: _JSON = None,
) -> None:
    """Run many requests with random limits, stop strings and cancellations; fail if outputs differ or memory grows.

    Every finished request has to equal the same request decoded by itself, and memory has to stay flat."""
    from dataclasses import asdict

    from rich.console import Console

    from outrider.app.bench.progress import bar
    from outrider.core.testing.soak import soak as run
    from outrider.text.bench.engine import soaked

    console = Console(stderr=True, highlight=False)
    target, make, rule, wanted, sampling, stop = soaked(
        model, drafter, dtype=dtype, device=device, cache=cache, temperature=temperature, seed=seed
    )
    with bar(console, requests, "Soaking") as step:
        result = run(
            target,
            make,
            rule,
            requests,
            wanted=wanted,
            sampling=sampling,
            stop=stop,
            rows=rows,
            check=check,
            seed=seed,
            say=lambda done: step("", done, requests),
        )
    report = {**asdict(result), "growth": result.growth, "flat": result.flat}
    if json_file is not None and str(json_file) == "-":
        print(json.dumps(report, indent=2))
    else:
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(
            f"{result.requests:,} requests in {result.rounds:,} rounds, {result.emitted:,} tokens: {result.finished:,} "
            f"finished ({result.stopped:,} by a stop string), {result.cancelled:,} cancelled\n"
            f"outputs that differ from decoding alone: {result.wrong} of {result.finished // check:,} checked\n"
            f"KV cache: at most {result.cache_bytes / 1e6:.1f} MB; process memory: {result.resident[0] / 1e6:.0f} MB "
            f"at the start, {result.resident[-1] / 1e6:.0f} MB at the end, {result.growth / 1e6:+.1f} MB since the "
            "second quarter"
        )
    if result.wrong or not result.flat:
        raise typer.Exit(1)


def device(
    device: _DEVICE = "cuda",
    drafters: _DRAFTERS = "prompt-lookup,suffix,auto",
    model: _MODEL = "smollm2-135m",
    dtype: _DTYPE = "bfloat16",
    prompts: _PROMPTS = None,
    limit: _LIMIT = 4,
    max_new_tokens: _TOKENS = 128,
    repeat: _REPEAT = 5,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also measure generate() of transformers, with dynamic and static cache.")
    ] = False,
    modality: Annotated[
        str, typer.Option(help="text, image or speech; image and speech use random weights of the trained sizes.")
    ] = "text",
    json_file: _JSON = None,
) -> None:
    """Compare CUDA-graph passes with eager ones, count kernel launches, and compare with the memory bandwidth."""
    from outrider.core.errors import unknown
    from outrider.text.bench.device import captured
    from outrider.text.bench.device import device as measure

    settings = {"model": model, "dtype": dtype, "device": device, "max_new_tokens": max_new_tokens, "repeat": repeat}
    if modality not in ("text", "image", "speech"):
        raise unknown("modality", modality, ("text", "image", "speech"))
    if modality != "text":
        from outrider.app.bench.random_models import DRAFTERS, PARTS

        network, run = PARTS[modality](dtype, device, limit, max_new_tokens)
        measured = captured(network, run, drafters=DRAFTERS, repeat=repeat)
        _write(_watched(measured, "Device"), settings | {"model": f"untrained, {modality}"}, json_file)
        return
    lm, items = _loaded(model, dtype, device, prompts, limit)
    rows = measure(lm, items, drafters=_names(drafters), tokens=max_new_tokens, repeat=repeat, peers=peers)
    _write(_watched(rows, "Device"), settings, json_file)


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _loaded(
    model: str, dtype: str, device: str, prompts: Path | None, limit: int, cache: str | None = None
) -> tuple[Any, list[Any]]:
    from outrider import text
    from outrider.text.bench.run import load_prompts

    items = load_prompts(prompts, limit)
    return text.load(model, dtype=dtype, device=device, cache=cache), items


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
        body.append([*cells, f"{row['same']} of {row['of']}"])
    return [*(COLUMNS[name][0] for name in shown), "same output"], body


def _write(rows: list[dict[str, Any]], settings: dict[str, Any], json_file: Path | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from outrider.core.trace import machine, versions

    if json_file is not None:
        report = {"machine": machine(), "versions": versions(), "settings": settings, "engine": True, "rows": rows}
        written = json.dumps(report, indent=2)
        if str(json_file) == "-":
            print(written)
            return
        json_file.write_text(written + "\n", encoding="utf-8")
    titles, body = lines(rows)
    table = Table(box=SIMPLE_HEAD)
    for title in titles:
        table.add_column(title, no_wrap=title == "drafter")
    for cells in body:
        table.add_row(*cells)
    console = Console(highlight=False)
    console.print(table)
    for name, size in settings.get("stops_paying_at", {}).items():
        console.print(
            f"{name}: " + ("pays at every batch size" if size is None else f"stops paying at batch size {size}")
        )
