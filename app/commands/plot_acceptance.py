"""`outrider plot-acceptance`: acceptance of trained drafters by position in the draft, as a plot and a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.app.options import PLOT_ENDINGS, writable

if TYPE_CHECKING:
    from outrider.core.training.acceptance_curve import DrafterCurve


def plot_acceptance(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            help="A run's curve.json, or the JSON beside weights. Default: every trained drafter of --model.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Target whose drafters are plotted if no files are given.")
    ] = "smollm2-135m",
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the plot to a .png, .svg or .pdf file.",
            callback=lambda path: writable(path, PLOT_ENDINGS),
        ),
    ] = Path("acceptance.png"),
) -> None:
    """Plot and tabulate the acceptance rate of trained drafters by position in the draft."""
    from outrider.core.training.acceptance_curve import drawn, table

    curves = drawn(files or _known(model), output)
    if sys.stdout.isatty():
        _show(curves)
    else:
        print(table(curves), end="")


def _show(curves: Sequence[DrafterCurve]) -> None:
    """Print the table within the width of the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from outrider.app.viz.fitted import Fitted
    from outrider.core.training.acceptance_curve import NOTE, cells

    titles, *rows = cells(curves)
    table = Table(*titles, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(Fitted(table))
    console.print(NOTE, soft_wrap=True)


def _known(model: str) -> list[Path]:
    from outrider.text.recipes import RECIPES, find

    weights = (find(model, name) for name in RECIPES)
    return list(dict.fromkeys(path.with_suffix(".json") for path in weights if path is not None))
