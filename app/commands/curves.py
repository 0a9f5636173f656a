"""`outrider curves`: how far trained drafters get, side by side in one picture and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def curves(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            help="A run's curve.json, or the JSON beside weights. Left out: all that ship or were trained here.",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Whose drafters, where no files are given.")] = "smollm2-135m",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help=".png, .svg or .pdf")] = Path(
        "curves.png"
    ),
) -> None:
    """Draw acceptance by place in the draft, of the guesses that were reached and of all; a table goes beside it."""
    from outrider.core.training.acceptance_curve import drawn, table

    print(table(drawn(files or _known(model), output)), end="")


def _known(model: str) -> list[Path]:
    from outrider.text.recipes import RECIPES, find

    found = (find(model, name) for name in RECIPES)
    return list(dict.fromkeys(path.with_suffix(".json") for path in found if path is not None))
