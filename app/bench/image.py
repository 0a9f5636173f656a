"""`outrider bench image`: a table of drafters and rules on images.

Heavy packages are imported when it runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from outrider.app.options import (
    DEVICE,
    RULE,
    Device,
    DrafterGrid,
    DrafterNames,
    DraftModelName,
    Dtype,
    FirstSeed,
    GuidanceScale,
    ImageBatch,
    ImagePrompts,
    JsonFile,
    ModelOptions,
    OwnWeights,
    PublishedName,
    RuleGrid,
    RuleNames,
    Style,
    Temperature,
    TopK,
    image_model,
    image_prompts,
    listed,
)
from outrider.core.assets.files import write_atomically

if TYPE_CHECKING:
    from outrider.image import ImageModel
    from outrider.image.evaluation.bench import Row

_JUDGED = ("KID", "FID", "LPIPS", "top-5")  # the measures of quality in the table; the JSON has all of them


def image(
    prompts: ImagePrompts = "common",
    drafters: DrafterNames = "jacobi,token-recycling,suffix",
    rules: RuleNames = RULE,
    drafter_option: DrafterGrid = None,
    rule_option: RuleGrid = None,
    quality: Annotated[
        bool, typer.Option("--quality", help="Measure image quality too: KID, FID, LPIPS, prompt agreement.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prepared images that --quality compares with.")
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Number of prompts; each gives one image per table row.")
    ] = 32,
    style: Style = None,
    guidance_scale: GuidanceScale = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    seed: FirstSeed = 0,
    batch_size: ImageBatch = 16,
    model: PublishedName = None,
    draft_model: DraftModelName = None,
    model_option: ModelOptions = None,
    weights: OwnWeights = None,
    device: Device = DEVICE,
    dtype: Dtype = "bfloat16",
    output: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot speed against quality (.png, .svg or .pdf).")
    ] = None,
) -> None:
    """Measure codes per target pass, for background and foreground too, and what relaxed rules change."""
    from itertools import cycle, islice

    from rich.console import Console
    from tqdm import tqdm

    from outrider.app.viz.fitted import Fitted
    from outrider.core.bench.settings import combine
    from outrider.core.errors import unknown
    from outrider.image.evaluation import bench
    from outrider.image.resolve_drafter import drafters as known_drafters
    from outrider.image.resolve_drafter import rules as known_rules

    texts = image_prompts(prompts)
    chosen = [name.strip() for name in drafters.split(",")], [name.strip() for name in rules.split(",")]
    for what, names, known in (("drafter", chosen[0], known_drafters()), ("rule", chosen[1], known_rules())):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    options = listed(drafter_option, "--drafter-option"), listed(rule_option, "--rule-option")
    settings = combine(*chosen, *options)
    if quality and model is not None:
        raise typer.BadParameter("works with our own model only; leave out --model", param_hint="--quality")
    im = image_model(model, draft_model, model_option, weights, device=device, dtype=dtype)
    options_of_all: dict[str, Any] = {
        "style": style,
        "guidance_scale": guidance_scale,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "batch": batch_size,
    }
    repeated = list(islice(cycle(texts), num_prompts))
    judges = _judges(cast("ImageModel", im), style, device, data, weights) if quality else None
    count = len(settings) + 1 + quality
    with tqdm(total=num_prompts * count, unit="image", leave=False, disable=None) as bar:
        judging = None if judges is None else judges.of_results
        rows = bench.measure(im, repeated, settings, quality=judging, progress=bar.update, **options_of_all)
    Console().print(Fitted(_table(rows)))
    if output is not None:
        about = {"model": im.name, "dtype": dtype, "prompts": prompts, "pictures": num_prompts, **options_of_all}
        if judges is not None:
            about["of held-out real images"] = judges.reference
            about["of the classifier"] = _accuracy(weights)
        report = bench.to_json(rows, about)
        write_atomically(output, json.dumps(report, indent=1) + "\n")
    if plot is not None:
        bench.plot(rows, plot)


def _judges(im: ImageModel, style: str | None, device: str, data: Path | None, weights: Path | None) -> Any:
    """The judges of images; raises an error if the data or the weights that they need are missing."""
    from outrider.image import recipes
    from outrider.image.evaluation.quality import QualityMetrics
    from outrider.image.training.data import load_or_render

    classifier = recipes.classifier(weights).to(device)
    return QualityMetrics(load_or_render(data), im.codec, classifier, style, device)


def _accuracy(weights: Path | None) -> Any:
    """The classifier's accuracy, as recorded when it was trained."""
    from outrider.core.training.checkpoint import about
    from outrider.image import recipes

    return about(recipes.classifier_file(weights))["provenance"].get(recipes.ACCURACY)


def _table(rows: list[Row]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    measures = [name for name in _JUDGED if any(name in row.quality for row in rows)]
    for title in (
        "speedup",
        "codes /\npass",
        "background\n/ pass",
        "foreground\n/ pass",
        "passes\n/ code",
        "accepted",
        "relaxed",
        "total variation\n/ code",
        "NLL /\ncode",
        *measures,
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        relaxed = ("", "") if row.lossless else (f"{row.relaxed:.0%}", f"{row.total_variation:.4f}")
        table.add_row(
            row.name,
            f"{row.speedup:.2f} ({row.speedup_low:.2f}-{row.speedup_high:.2f})",
            f"{row.tokens_per_pass:.2f}",
            f"{row.background_per_pass:.2f}",
            f"{row.foreground_per_pass:.2f}",
            f"{row.equivalents_per_token:.2f}",
            f"{row.acceptance_rate:.0%}",
            *relaxed,
            f"{row.nll:.3f}",
            *(f"{row.quality[name]:.3g}" if name in row.quality else "" for name in measures),
        )
    return table
