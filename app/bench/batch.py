"""`outrider bench batch`: a batch of prompts compared with the same prompts decoded one at a time."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from outrider.app.options import DEVICE, Device, Dtypes, JsonFile, MaxNewTokens, Repeat, TextModelName, TextPrompts
from outrider.core.assets.files import write_atomically


def batch(
    dtypes: Dtypes = "float32,bfloat16,int4",
    drafter: Annotated[
        str | None, typer.Option(help="Drafter, from `outrider methods`. Default: plain decoding.")
    ] = None,
    prompts: TextPrompts = None,
    num_prompts: Annotated[int, typer.Option(min=2, help="Number of prompts, which form one batch.")] = 8,
    repeat: Repeat = 3,
    max_new_tokens: MaxNewTokens = 96,
    model: TextModelName = "smollm2-135m",
    device: Device = DEVICE,
    json_file: JsonFile = None,
) -> None:
    """Measure tokens per second of a batch and of the same prompts one at a time, and compare the outputs."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from outrider import text
    from outrider.app.viz.fitted import Fitted
    from outrider.core.trace import machine, versions
    from outrider.text.bench.batch import compare, median_round
    from outrider.text.bench.run import load_prompts

    items = load_prompts(prompts, num_prompts)
    comparisons = []
    with Console(stderr=True, highlight=False).status("Loading ...") as status:
        for dtype in dict.fromkeys(name.strip() for name in dtypes.split(",") if name.strip()):
            lm = text.load(model, device=device, dtype=dtype)
            status.update(f"{dtype}: {len(items)} prompts ...")
            comparisons.append(
                median_round(list(compare(lm, items, drafter=drafter, tokens=max_new_tokens, repeat=repeat)))
            )
    if json_file is not None:
        settings = {"model": model, "device": device, "max_new_tokens": max_new_tokens, "repeat": repeat}
        rows = [asdict(row) | {"ratio": row.ratio} for row in comparisons]
        report = {"machine": machine(), "versions": versions(), "settings": settings, "rows": rows}
        written = json.dumps(report, indent=2)
        if str(json_file) == "-":
            print(written)
            return
        write_atomically(json_file, written + "\n")
    titles = ("", "drafter", "tokens / s, batch", "tokens / s, one by one", "ratio", "same output")
    table = Table(*titles, box=SIMPLE_HEAD)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in comparisons:
        speeds = (f"{row.batched_speed:.0f}", f"{row.serial_speed:.0f}", f"{row.ratio:.2f}")
        table.add_row(row.dtype, row.drafter, *speeds, f"{row.same} of {row.rows}")
    Console(highlight=False).print(Fitted(table))
