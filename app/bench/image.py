"""`outrider bench image`: a table of drafters and rules on pictures.

Heavy packages are imported when it runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from outrider.app.options import Draft, Model, ModelOptions, OwnWeights, Prompts, image_model, image_prompts, listed

if TYPE_CHECKING:
    from outrider.image import ImageModel
    from outrider.image.evaluation.bench import Row

_WIDTH = 132  # of the table; a narrower terminal wraps its lines
_JUDGED = ("KID", "FID", "LPIPS", "top-5")  # the measures of quality in the table; the JSON has all of them


def image(
    prompts: Prompts = "common",
    drafters: Annotated[str, typer.Option(help="Names, comma-separated.")] = "jacobi,token-recycling,suffix",
    rules: Annotated[
        str, typer.Option(help="Names, comma-separated; every drafter is measured with every rule.")
    ] = "exact",
    drafter_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K=V,...", help="An option of every drafter that has it, or DRAFTER.K=V; one row for each value."
        ),
    ] = None,
    rule_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K=V,...", help="An option of every rule that has it, or RULE.K=V; one row for each value."
        ),
    ] = None,
    judge: Annotated[
        bool, typer.Option("--judge", help="Also judge the pictures: KID, FID, LPIPS, prompt agreement.")
    ] = False,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Prepared real pictures to judge against.")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="Pictures for each row of the table.")] = 32,
    style: Annotated[str | None, typer.Option(help="The emoji set whose style to draw in.")] = None,
    guidance: Annotated[float | None, typer.Option(help="1 is off. Default: 3, or the published model's own.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the first picture.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Pictures decoded at a time.")] = 16,
    model: Model = None,
    draft: Draft = None,
    model_option: ModelOptions = None,
    weights: OwnWeights = None,
    device: Annotated[str, typer.Option(help="cpu, cuda ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    output: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw speed against quality.")] = None,
) -> None:
    """Measure codes per target pass, for background and foreground too, and what relaxed rules change."""
    from itertools import cycle, islice

    from rich.console import Console
    from tqdm import tqdm

    from outrider.core.errors import unknown
    from outrider.image.evaluation import bench
    from outrider.image.resolve_drafter import drafters as known_drafters
    from outrider.image.resolve_drafter import rules as known_rules

    texts = image_prompts(prompts)
    chosen = [one.strip() for one in drafters.split(",")], [one.strip() for one in rules.split(",")]
    for what, names, known in (("drafter", chosen[0], known_drafters()), ("rule", chosen[1], known_rules())):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    options = listed(drafter_option, "--drafter-option"), listed(rule_option, "--rule-option")
    settings = bench.settings(*chosen, *options)
    if judge and model is not None:
        raise typer.BadParameter("works with our own model only; leave out --model", param_hint="--judge")
    im = image_model(model, draft, model_option, weights, device=device, dtype=dtype)
    options_of_all: dict[str, Any] = {
        "style": style,
        "guidance": guidance,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "batch": batch,
    }
    repeated = list(islice(cycle(texts), pictures))
    judges = _judges(cast("ImageModel", im), style, device, data, weights) if judge else None
    count = len(settings) + 1 + judge
    with tqdm(total=pictures * count, unit="picture", leave=False, disable=None) as bar:
        judging = None if judges is None else judges.of_results
        rows = bench.measure(im, repeated, settings, quality=judging, progress=bar.update, **options_of_all)
    console = Console()
    (console if console.width >= _WIDTH else Console(width=_WIDTH)).print(_table(rows))
    if output is not None:
        about = {"model": im.name, "dtype": dtype, "prompts": prompts, "pictures": pictures, **options_of_all}
        if judges is not None:
            about["of held-out real pictures"] = judges.reference
            about["of the classifier"] = _accuracy(weights)
        report = bench.to_json(rows, about)
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        bench.plot(rows, plot)


def _judges(im: ImageModel, style: str | None, device: str, data: Path | None, weights: Path | None) -> Any:
    """The judges of pictures; raises an error if the data or the weights that they need are missing."""
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
    table.add_column("")
    measures = [name for name in _JUDGED if any(name in row.quality for row in rows)]
    for title in (
        "speedup",
        "codes / pass",
        "background / pass",
        "foreground / pass",
        "passes / code",
        "accepted",
        "relaxed",
        "total variation / code",
        "NLL / code",
        *measures,
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        relaxed = ("", "") if row.lossless else (f"{row.relaxed:.0%}", f"{row.total_variation:.4f}")
        table.add_row(
            row.name,
            f"{row.speedup:.2f} ({row.speedup_low:.2f}-{row.speedup_high:.2f})",
            f"{row.tokens_per_pass:.2f}",
            f"{row.background_per_call:.2f}",
            f"{row.ink_per_call:.2f}",
            f"{row.equivalents_per_token:.2f}",
            f"{row.acceptance_rate:.0%}",
            *relaxed,
            f"{row.surprise:.3f}",
            *(f"{row.quality[name]:.3g}" if name in row.quality else "" for name in measures),
        )
    return table
