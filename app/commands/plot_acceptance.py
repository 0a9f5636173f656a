"""`outrider plot-acceptance`: acceptance of trained drafters by position in the draft, as a plot and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
        Path, typer.Option("--output", "-o", metavar="FILE", help="Write the plot to a .png, .svg or .pdf file.")
    ] = Path("acceptance.png"),
) -> None:
    """Plot and tabulate the acceptance rate of trained drafters by position in the draft."""
    from outrider.core.training.acceptance_curve import drawn, table

    print(table(drawn(files or _known(model), output)), end="")


def _known(model: str) -> list[Path]:
    from outrider.text.recipes import RECIPES, find

    weights = (find(model, name) for name in RECIPES)
    return list(dict.fromkeys(path.with_suffix(".json") for path in weights if path is not None))
