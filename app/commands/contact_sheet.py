"""`outrider contact-sheet`: many prompts by several rules on one sheet. Heavy packages are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.app.options import (
    DEVICE,
    IMAGE_DRAFTER,
    Device,
    Dtype,
    FirstSeed,
    ImageBatch,
    ImagePrompts,
    NumPrompts,
    OwnWeights,
    Style,
    Temperature,
    image_prompts,
    picture_file,
)


def contact_sheet(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Write the image to FILE.", callback=picture_file)
    ] = Path("contact-sheet.png"),
    prompts: ImagePrompts = "common",
    num_prompts: NumPrompts = 64,
    drafter: Annotated[str, typer.Option(help="Drafter, from `outrider methods`.")] = IMAGE_DRAFTER,
    style: Style = None,
    guidance_scale: Annotated[float, typer.Option(help="Classifier-free guidance; 1 turns it off.")] = 3.0,
    temperature: Temperature = 1.0,
    seed: FirstSeed = 0,
    batch_size: ImageBatch = 16,
    tile_size: Annotated[int, typer.Option(min=16, max=256, help="Edge of each image on the sheet, in pixels.")] = 48,
    weights: OwnWeights = None,
    device: Device = DEVICE,
    dtype: Dtype = "bfloat16",
) -> None:
    """Generate the same prompts by plain decoding, the exact rule and each relaxed rule for codes, on one sheet."""
    from tqdm import tqdm

    from outrider.core.errors import unknown
    from outrider.image import load
    from outrider.image.evaluation.contact_sheet import default_settings, panels
    from outrider.image.evaluation.contact_sheet import sheet as together
    from outrider.image.resolve_drafter import drafters

    if drafter not in drafters():
        raise unknown("drafter", drafter, drafters())
    texts, settings = image_prompts(prompts)[:num_prompts], default_settings(drafter)
    im = load("emoji", device=device, dtype=dtype, folder=weights)
    options: dict[str, Any] = {
        "style": style,
        "guidance_scale": guidance_scale,
        "temperature": temperature,
        "seed": seed,
        "batch": batch_size,
    }
    with tqdm(total=len(texts) * len(settings), unit="image", leave=False, disable=None) as bar:
        found = panels(im, texts, settings, progress=bar.update, **options)
    output.parent.mkdir(parents=True, exist_ok=True)
    together(found, size=tile_size).save(output)
    for panel in found:
        print(panel.caption)
