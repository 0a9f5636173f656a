"""`outrider text` and `outrider assets`: generate text; list and fetch weights.

Heavy packages are imported by the commands when they run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.options import (
    DEVICE,
    DTYPE,
    RULE,
    TEXT_DRAFTER,
    AsJson,
    Compare,
    Device,
    DrafterOptions,
    Head,
    KVCacheDtype,
    MaxNewTokens,
    NumDraftTokens,
    RuleName,
    RuleOptions,
    Seed,
    Temperature,
    TextDraftModel,
    TextDtype,
    TextModelName,
    TopK,
    TraceFile,
    methods,
    waiting,
    writable,
)
from outrider.core.assets.files import write_atomically
from outrider.core.errors import InvalidOption, unreadable

if TYPE_CHECKING:
    from outrider.text import Result, TextModel

_REPEATS = 3  # of a comparison
assets = typer.Typer(
    help="List and fetch weights: source, size, licence, and whether they are in the cache.",
    invoke_without_command=True,
)


def text(
    prompt: Annotated[str, typer.Argument(help="Prompt; - reads it from stdin.")],
    model: TextModelName = "smollm2-135m",
    drafter: Annotated[
        str, typer.Option(help="Drafter: auto, plain, or a name from `outrider methods`.")
    ] = TEXT_DRAFTER,
    draft_model: TextDraftModel = None,
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Let the draft model draft its first N tokens only; 0: any. Default: 65,536 if it has twice as many.",
        ),
    ] = None,
    head: Head = None,
    num_draft_tokens: NumDraftTokens = None,
    rule: RuleName = RULE,
    drafter_option: DrafterOptions = None,
    rule_option: RuleOptions = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens with at least this fraction of the highest probability.")
    ] = 0.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 256,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text. Repeatable.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with a JSON schema that the text obeys.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the whole text matches.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with a Lark grammar of the whole text.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--no-chat-template", help="Continue the prompt as it is, without a chat template.")
    ] = False,
    compare: Compare = False,
    trace: TraceFile = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the text to FILE.", callback=lambda path: writable(path)
        ),
    ] = None,
    dtype: TextDtype = DTYPE,
    device: Device = DEVICE,
    kv_cache_dtype: KVCacheDtype = None,
) -> None:
    """Generate text from a prompt by speculative decoding."""
    options: dict[str, Any] = {
        **methods(drafter, rule, drafter_option, rule_option),
        "draft_model": draft_model,
        "draft_vocabulary": draft_vocabulary,
        "head": head,
        "num_draft_tokens": num_draft_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "stop": stop or [],
        "response_format": None if json_schema is None else _schema(json_schema),
        "regex": regex,
        "grammar": None if grammar is None else _read(grammar),
        "raw": raw,
    }
    from outrider.text import load
    from outrider.text.options import Options
    from outrider.text.resolve_drafter import check_names

    Options.of(options)  # validate before fetching a model
    check_names(options["drafter"], rule)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    with waiting(f"Loading {model} ..."):
        lm = load(model, device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    result = _show(lm, prompt, options)
    if output is not None:
        write_atomically(output, result.text + "\n")
    if trace is not None:
        write_atomically(trace, result.trace.to_json())
    if compare:
        print(comparison(lm, prompt, options), file=sys.stderr)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(unreadable(path, error)) from None


def _schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(_read(path))
    except ValueError as error:
        raise InvalidOption(f"{path} is not JSON: {error}") from None
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _show(lm: TextModel, prompt: str, options: dict[str, Any]) -> Result:
    """Stream to stdout. Ctrl-C ends the generation; the result is what was generated so far."""
    stream = lm.stream(prompt, **options)
    try:
        with waiting("Reading the prompt ..."):
            first = next(stream, None)
        if first is not None:
            print(first.text, end="", flush=True)
        for piece in stream:
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    print()
    return stream.results[0]


def comparison(lm: TextModel, prompt: str, options: dict[str, Any]) -> str:
    """Run plain decoding and these options in turns; report agreement, tokens per target pass and the speedup."""
    plain = options | {
        "drafter": None,
        "drafter_options": {},
        "draft_model": None,
        "draft_vocabulary": None,
        "head": None,
        "num_draft_tokens": None,
    }
    ratios, speeds = [], []
    for turn in range(_REPEATS):
        order = [plain, options] if turn % 2 == 0 else [options, plain]
        timed: dict[int, tuple[float, Result]] = {}
        for contender in order:
            what = "plain decoding" if contender is plain else "the drafter"
            with waiting(f"Comparing: run {turn + 1} of {_REPEATS}, {what} ..."):
                start = time.perf_counter()
                result = lm.generate(prompt, **contender)
                timed[id(contender)] = (time.perf_counter() - start, result)
        (plain_seconds, before), (seconds, after) = timed[id(plain)], timed[id(options)]
        speeds.append((len(before.tokens) / plain_seconds, len(after.tokens) / seconds))
        ratios.append(speeds[-1][1] / speeds[-1][0])
    same = "the same tokens as plain decoding" if before.tokens == after.tokens else _difference(before, after)
    method, per_pass = after.trace.method, after.trace.summary().tokens_per_pass
    lines = [
        f"{method}: {same}",
        f"tokens per target pass  {per_pass:.2f} (plain 1.00)",
        f"tokens per second       {statistics.median(speed[1] for speed in speeds):.1f} "
        f"(plain {statistics.median(speed[0] for speed in speeds):.1f})",
        f"speedup                 {statistics.median(ratios):.2f}x, median of {_REPEATS} runs in turns "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
    ]
    return "\n".join(lines)


def _difference(before: Result, after: Result) -> str:
    pairs = enumerate(zip(before.tokens, after.tokens, strict=False))
    shorter = min(len(before.tokens), len(after.tokens))
    position = next((position for position, (a, b) in pairs if a != b), shorter)
    if not after.trace.lossless:
        why = "a relaxed rule may change the text"
    elif before.trace.options.get("temperature"):
        why = "sampled from the same distribution with other random numbers; --rule gumbel-match gives the same tokens"
    else:
        why = "probably a near-tie under rounding; --dtype float32 rounds less"
    return f"differs from plain decoding from token {position + 1} on ({why})"


@assets.callback()
def _assets(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        list_assets(as_json)


@assets.command("list")
def list_assets(as_json: AsJson = False) -> None:
    """List everything that can be fetched."""
    from outrider.core.assets.store import ASSETS

    rows = [
        {
            "name": asset.name,
            "summary": asset.summary,
            "licence": asset.licence,
            "origin": asset.origin,
            "here": asset.here,
            "folder": str(asset.folder) if asset.here else None,
            "sources": [
                {
                    "from": str(source),
                    "bytes": sum(file.size for file in source.files),
                    "files": {file.name: file.sha256 for file in source.files},
                }
                for source in asset.sources
            ],
        }
        for asset in ASSETS.values()
    ]
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        _draw(rows)


def _draw(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.text import Text

    from outrider.app.options import file_size

    console = Console(soft_wrap=True)
    for row in rows:
        state = ("here", "green") if row["here"] else ("not fetched", "yellow")
        console.print(Text.assemble((row["name"], "bold cyan"), "  ", state, f"  {row['summary']}"))
        console.print(Text(f"  by {row['origin']}; licence {row['licence']}", style="dim"))
        for source in row["sources"]:
            console.print(Text(f"  {file_size(source['bytes']):>7} from {source['from']}"))
            for name, digest in source["files"].items():
                console.print(Text(f"          {name}  sha256 {digest[:16]}", style="dim"))
        if row["here"]:
            console.print(Text(f"  in {row['folder']}"))


@assets.command("fetch")
def fetch(name: Annotated[str, typer.Argument(help="Name from `outrider assets list`.")]) -> None:
    """Download an asset, verify its checksum and store it in the cache."""
    from outrider.core.assets.store import fetch as fetch_asset

    print(fetch_asset(name))
