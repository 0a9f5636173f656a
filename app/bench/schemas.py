"""`outrider bench schemas`: text under many JSON schemas, validated, and compared with that of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.app.options import (
    DEVICE,
    DTYPE,
    Device,
    JsonFile,
    MaxNewTokens,
    NumDraftTokens,
    Seed,
    TextDtype,
    TextModelName,
)
from outrider.core.assets.files import write_atomically


def schemas(
    folder: Annotated[Path, typer.Argument(help="Folder of JSON schemas, such as data/ of JSONSchemaBench.")],
    count: Annotated[int, typer.Option(min=1, help="Number of schemas, a seeded sample.")] = 1000,
    drafters: Annotated[str, typer.Option(help="Drafters, separated by commas.")] = "prompt-lookup,auto",
    kept: Annotated[
        Path, typer.Option(metavar="FILE", help="Where outcomes are kept, a line each; a run goes on from there.")
    ] = Path("schemas.jsonl"),
    max_new_tokens: MaxNewTokens = 256,
    num_draft_tokens: NumDraftTokens = None,
    seed: Seed = 0,
    model: TextModelName = "smollm2-135m",
    dtype: TextDtype = DTYPE,
    device: Device = DEVICE,
    json_file: JsonFile = None,
) -> None:
    """Count valid, cut, refused and invalid outputs, and those that differ from plain constrained decoding."""
    from rich.console import Console
    from rich.progress import track

    from outrider import text
    from outrider.core.trace import machine, versions
    from outrider.text.bench.schemas import measure, sample, summary

    files = sample(folder, count, seed)
    names = [name.strip() for name in drafters.split(",") if name.strip()]
    lm = text.load(model, device=device, dtype=dtype)
    console = Console(stderr=True, highlight=False)
    outcomes = list(
        track(
            measure(lm, files, folder, names, max_new_tokens, seed, kept, num_draft_tokens),
            "Decoding ...",
            total=2 * len(files),
            console=console,
        )
    )
    settings = {"model": model, "dtype": dtype, "device": device, "max_new_tokens": max_new_tokens, "seed": seed}
    settings |= {"drafters": names, "num_draft_tokens": num_draft_tokens}
    report = {"machine": machine(), "versions": versions(), "settings": settings, "rows": summary(outcomes)}
    if json_file is not None and str(json_file) != "-":
        write_atomically(json_file, json.dumps(report, indent=2) + "\n")
    print(json.dumps(report if str(json_file) == "-" else report["rows"], indent=2))
    for one in outcomes:
        if one.status == "invalid" or one.different:
            console.print(f"{one.schema}, {one.setting}: {one.detail or ', '.join(one.different)}", markup=False)
