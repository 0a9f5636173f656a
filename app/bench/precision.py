"""`outrider bench precision`: perplexity, agreement and speed of a model at lower precisions."""

from __future__ import annotations

import json
from dataclasses import asdict

from outrider.app.options import (
    DEVICE,
    Device,
    Dtypes,
    FirstPrompts,
    JsonFile,
    MaxNewTokens,
    TextModelName,
    TextPrompts,
)
from outrider.core.assets.files import write_atomically


def precision(
    dtypes: Dtypes = "bfloat16,int8,int4",
    prompts: TextPrompts = None,
    num_prompts: FirstPrompts = None,
    max_new_tokens: MaxNewTokens = 96,
    model: TextModelName = "smollm2-135m",
    device: Device = DEVICE,
    json_file: JsonFile = None,
) -> None:
    """Measure perplexity, greedy agreement with float32, and the speed of plain decoding, on the text of prompts."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from outrider import text
    from outrider.app.options import file_size
    from outrider.app.viz.fitted import Fitted
    from outrider.core.trace import machine, versions
    from outrider.text.bench.precision import REFERENCE, Precision, compare
    from outrider.text.bench.run import load_prompts

    items = load_prompts(prompts, num_prompts)
    names = dict.fromkeys((REFERENCE, *(name.strip() for name in dtypes.split(",") if name.strip())))
    rows: list[Precision] = []
    with Console(stderr=True, highlight=False).status("Loading ...") as status:
        models = {name: text.load(model, device=device, dtype=name) for name in names}
        for event in compare(models, items, tokens=max_new_tokens):
            if isinstance(event, str):
                status.update(f"{event} ...")
            else:
                rows.append(event)
    if json_file is not None:
        settings = {"model": model, "prompts": len(items), "max_new_tokens": max_new_tokens}
        report = {
            "machine": machine(),
            "versions": versions(),
            "settings": settings,
            "rows": [asdict(row) for row in rows],
        }
        written = json.dumps(report, indent=2)
        if str(json_file) == "-":
            print(written)
            return
        write_atomically(json_file, written + "\n")
    titles = ("", "weights", "perplexity", "greedy agreement", "tokens / s", "slowest", "fastest")
    table = Table(*titles, box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        speeds = (f"{speed:.1f}" for speed in (row.tokens_per_second, row.slowest, row.fastest))
        table.add_row(row.dtype, file_size(row.weight_bytes), f"{row.perplexity:.2f}", f"{row.agreement:.1%}", *speeds)
    Console(highlight=False).print(Fitted(table))
