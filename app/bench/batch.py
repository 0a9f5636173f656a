"""`outrider bench batch`: prompts side by side against one after another, as a table or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def batch(
    dtypes: Annotated[str, typer.Option(help="Precisions with commas between them.")] = "float32,bfloat16,int4",
    drafter: Annotated[str | None, typer.Option(help="Who drafts; left out: nobody.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines, each with `prompt` or `turns`; left out: prompts of our own.")
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Prompts in the batch, every task in turn.")] = 8,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the middle one is shown.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="For each prompt.")] = 96,
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a GGUF file.")] = "smollm2-135m",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the table there; - is stdout.")] = None,
) -> None:
    """Tokens a second of a batch beside one prompt after another, and whether each row comes out the same."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from outrider import text
    from outrider.core.trace import machine, versions
    from outrider.text.bench.batch import compare, middle
    from outrider.text.bench.run import load_prompts

    items = load_prompts(prompts, limit)
    found = []
    with Console(stderr=True, highlight=False).status("Loading ...") as status:
        for dtype in dict.fromkeys(name.strip() for name in dtypes.split(",") if name.strip()):
            lm = text.load(model, device=device, dtype=dtype)
            status.update(f"{dtype}: {len(items)} prompts ...")
            found.append(middle(list(compare(lm, items, drafter=drafter, tokens=max_new_tokens, repeat=repeat))))
    if json_file is not None:
        about = {"model": model, "device": device, "max_new_tokens": max_new_tokens, "repeat": repeat}
        rows = [asdict(one) | {"ratio": one.ratio} for one in found]
        report = {"machine": machine(), "versions": versions(), "settings": about, "rows": rows}
        written = json.dumps(report, indent=2)
        if str(json_file) == "-":
            print(written)
            return
        json_file.write_text(written + "\n", encoding="utf-8")
    table = Table("", "drafter", "tok/s in all", "one after another", "ratio", "same output", box=SIMPLE_HEAD)
    for column in table.columns[2:]:
        column.justify = "right"
    for one in found:
        pace = (f"{one.together:.0f}", f"{one.alone:.0f}", f"{one.ratio:.2f}")
        table.add_row(one.dtype, one.drafter, *pace, f"{one.same} of {one.rows}")
    Console(highlight=False).print(table)
