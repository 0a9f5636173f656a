"""`outrider sheet`: many prompts by several rules on one picture. Heavy packages are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.app.options import Prompts, image_prompts


def sheet(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write the picture.")] = Path(
        "sheet.png"
    ),
    prompts: Prompts = "common",
    pictures: Annotated[int, typer.Option(min=1, help="Prompts, for each rule.")] = 64,
    drafter: Annotated[str, typer.Option(help="Who guesses.")] = "jacobi",
    style: Annotated[str | None, typer.Option(help="Whose style.")] = None,
    guidance: Annotated[float, typer.Option(help="1 is none.")] = 3.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the first picture.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 16,
    size: Annotated[int, typer.Option(min=16, max=256, help="Pixels of a picture on the sheet.")] = 48,
    weights: Annotated[Path | None, typer.Option(metavar="DIR", help="Weights of your own training.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Draw the same prompts plainly, speculatively, and by every relaxed rule for codes: a contact sheet."""
    from tqdm import tqdm

    from outrider.core.errors import unknown
    from outrider.image import load
    from outrider.image.evaluation.contact_sheet import default_settings, panels
    from outrider.image.evaluation.contact_sheet import sheet as together
    from outrider.image.resolve_drafter import drafters

    if drafter not in drafters():
        raise unknown("drafter", drafter, drafters())
    asked, settings = image_prompts(prompts)[:pictures], default_settings(drafter)
    im = load("emoji", device=device, dtype=dtype, folder=weights)
    options: dict[str, Any] = {
        "style": style,
        "guidance": guidance,
        "temperature": temperature,
        "seed": seed,
        "batch": batch,
    }
    with tqdm(total=len(asked) * len(settings), unit="picture", leave=False, disable=None) as bar:
        found = panels(im, asked, settings, progress=bar.update, **options)
    together(found, size=size).save(output)
    for panel in found:
        print(panel.caption)
