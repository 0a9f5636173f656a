"""`outrider bench image`: a table of drafters and rules on pictures. Heavy packages are imported when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.text import pairs

if TYPE_CHECKING:
    from outrider.image.bench import Row

_WIDTH = 120  # of the table; a narrower terminal wraps its lines


def image(
    prompts: Annotated[Path | None, typer.Option(help="A prompt a line; left out: common names.")] = None,
    drafters: Annotated[str, typer.Option(help="Names with commas between them.")] = "jacobi,token-recycling,suffix",
    rules: Annotated[str, typer.Option(help="Names with commas between them; each drafter meets each.")] = "exact",
    drafter_option: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="An option of every drafter that has it; may be repeated.")
    ] = None,
    rule_option: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="An option of every rule that has it; may be repeated.")
    ] = None,
    pictures: Annotated[int, typer.Option(min=1, help="For each row of the table.")] = 32,
    style: Annotated[str | None, typer.Option(help="Whose style.")] = None,
    guidance: Annotated[float, typer.Option(help="1 is none.")] = 3.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the first picture.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 16,
    weights: Annotated[Path | None, typer.Option(metavar="DIR", help="Weights of your own training.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    output: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw speed against quality.")] = None,
) -> None:
    """Calls of the target on pictures, background and ink apart, and what relaxed rules change."""
    from itertools import cycle, islice

    from rich.console import Console
    from tqdm import tqdm

    from outrider.core.errors import unknown
    from outrider.core.methods import DRAFTERS, RULES
    from outrider.image import bench, load
    from outrider.image.model import drafters as known_drafters
    from outrider.image.model import rules as known_rules
    from outrider.image.names import COMMON

    said = COMMON if prompts is None else tuple(filter(None, map(str.strip, prompts.read_text("utf-8").splitlines())))
    chosen = [one.strip() for one in drafters.split(",")], [one.strip() for one in rules.split(",")]
    for what, names, known in (("drafter", chosen[0], known_drafters()), ("rule", chosen[1], known_rules())):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    theirs, its = pairs(drafter_option, "--drafter-option"), pairs(rule_option, "--rule-option")
    settings = [
        bench.Setting(
            drafter=drafter,
            rule=rule,
            drafter_options={name: value for name, value in theirs.items() if name in DRAFTERS[drafter].options},
            rule_options={name: value for name, value in its.items() if name in RULES[rule].options},
        )
        for drafter in chosen[0]
        for rule in chosen[1]
    ]
    im = load("emoji", device=device, dtype=dtype, folder=weights)
    wanted: dict[str, Any] = {
        "style": style,
        "guidance": guidance,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "batch": batch,
    }
    asked = list(islice(cycle(said), pictures))
    with tqdm(total=pictures * (len(settings) + 1), unit="picture", leave=False, disable=None) as bar:
        rows = bench.measure(im, asked, settings, progress=bar.update, **wanted)
    console = Console()
    (console if console.width >= _WIDTH else Console(width=_WIDTH)).print(_table(rows))
    if output is not None:
        told = bench.to_json(rows, {"model": im.name, "dtype": dtype, "pictures": pictures, **wanted})
        output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        bench.plot(rows, plot)


def _table(rows: list[Row]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    for title in ("codes a call", "white", "ink", "passes a code", "accepted", "relaxed", "price", "nats a code"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        relaxed = ("", "") if row.lossless else (f"{row.relaxed:.0%}", f"{row.price:.4f}")
        table.add_row(
            row.name,
            f"{row.tokens_per_call:.2f}",
            f"{row.background_per_call:.2f}",
            f"{row.ink_per_call:.2f}",
            f"{row.equivalents_per_token:.2f}",
            f"{row.acceptance_rate:.0%}",
            *relaxed,
            f"{row.surprise:.3f}",
        )
    return table
