"""What commands have in common: options that look the same everywhere, and how values of them are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from outrider.image import ImageModel, PublishedModel

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable, on stdout.")]
DrafterOptions = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="An option of the drafter; may be repeated.")
]
RuleOptions = Annotated[list[str] | None, typer.Option(metavar="K=V", help="An option of the rule; may be repeated.")]
RuleName = Annotated[str, typer.Option(help="Who accepts: one of `outrider methods`.")]
Compare = Annotated[bool, typer.Option("--compare", help="Run plain decoding beside it, and say what drafting gained.")]
TraceFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write every step as JSON.")]
OwnWeights = Annotated[Path | None, typer.Option(metavar="DIR", help="Weights of your own training.")]
Precision = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda ...")]
Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="A published model: its id on the hub (owner/name), or a folder.")
]
Draft = Annotated[
    str | None, typer.Option(metavar="NAME", help="A smaller one of the published model's family, that may draft.")
]
ModelOptions = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="An option of the published model; may be repeated.")
]
Cache = Annotated[str | None, typer.Option(help="int8: keys and values in 8 bits, about half as large.")]
Prompts = Annotated[
    str, typer.Option(metavar="SET|FILE", help="common or held-out names, or a file with a prompt a line.")
]


def methods(drafter: str, rule: str, drafter_option: list[str] | None, rule_option: list[str] | None) -> dict[str, Any]:
    """Who drafts and who accepts, as every modality's `generate` is told; nobody drafts for "plain"."""
    return {
        "drafter": None if drafter in ("plain", "none") else drafter,
        "rule": rule,
        "drafter_options": pairs(drafter_option, "--drafter-option"),
        "rule_options": pairs(rule_option, "--rule-option"),
    }


def pairs(given: list[str] | None, name: str) -> dict[str, Any]:
    """K=V, values as JSON where they are that, else as text."""
    found = {}
    for one in given or []:
        key, sign, value = one.partition("=")
        if not sign or not key:
            raise typer.BadParameter(f"'{one}' is no NAME=VALUE", param_hint=name)
        try:
            found[key.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[key.replace("-", "_")] = value
    return found


def listed(given: list[str] | None, name: str) -> dict[str, Any]:
    """K=V or K=V1,V2,...: several values as a list; a value of JSON is one. A method's name and a dot may stand before
    K."""
    found: dict[str, Any] = {}
    for one in given or []:
        key, sign, values = one.partition("=")
        owner, dot, option = key.rpartition(".")
        ((plain, value),) = pairs([f"{option}{sign}{values}"], name).items()
        several = values.split(",") if isinstance(value, str) else [values]
        found[f"{owner}{dot}{plain}"] = [pairs([f"_={part}"], name)["_"] for part in several]
    return found


def published(
    model: str | None, draft: str | None, model_option: list[str] | None, weights: Path | None
) -> dict[str, Any] | None:
    """What `load` is told of a published model; None: it is to be our own."""
    given = {} if draft is None else {"draft": draft}
    given |= pairs(model_option, "--model-option")
    if model is None and given:
        raise typer.BadParameter("is of a published model, which --model names", param_hint="--draft, --model-option")
    if model is not None and weights is not None:
        raise typer.BadParameter("is for our own models; a published one is a folder too", param_hint="--weights")
    return None if model is None else given


def shown_model(panel: str, model: str | None, draft: str | None, option: list[str] | None) -> dict[str, Any] | None:
    """What a panel of the page is told of a published model; None: it shows our own."""
    if model is None and (draft is not None or option):
        raise typer.BadParameter(
            f"is of --{panel}-model, which is missing", param_hint=f"--{panel}-draft, --{panel}-option"
        )
    return None if model is None else {"model": model, "draft": draft, "options": pairs(option, f"--{panel}-option")}


def image_model(
    model: str | None,
    draft: str | None,
    model_option: list[str] | None,
    weights: Path | None,
    *,
    device: str,
    dtype: str,
) -> ImageModel | PublishedModel:
    """The published image model of this name; without a name, our own."""
    from outrider.image import load

    options = published(model, draft, model_option, weights)
    if options is None:
        return load("emoji", device=device, dtype=dtype, folder=weights)
    loaded: PublishedModel = load(str(model), device=device, dtype=dtype, **options)
    return loaded


def image_prompts(prompts: str) -> tuple[str, ...]:
    """The prompts of a built-in set, or of a file with one a line."""
    from outrider.image.prompt_encoder import PROMPTS

    if prompts in PROMPTS:
        return PROMPTS[prompts]
    file = Path(prompts)
    if not file.is_file():
        raise typer.BadParameter(
            f"there is no file {file}; the built-in sets are {' and '.join(PROMPTS)}", param_hint="--prompts"
        )
    return tuple(filter(None, map(str.strip, file.read_text("utf-8").splitlines())))


def file_size(count: int) -> str:
    """Bytes in the unit that suits them: 27 MB."""
    amount, unit = float(count), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}"
