"""`outrider image`: a picture of a few words. Heavy packages are imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.options import (
    Compare,
    Device,
    Draft,
    DrafterOptions,
    Model,
    ModelOptions,
    OwnWeights,
    Precision,
    RuleName,
    RuleOptions,
    TraceFile,
    image_model,
    methods,
)

if TYPE_CHECKING:
    from outrider.image import ImageModel, PublishedModel, Result

_SCALE = 4  # a picture of 64x64 is written this many times as large


def image(
    prompt: Annotated[str, typer.Argument(help="A few words, such as 'red heart'.")],
    style: Annotated[str | None, typer.Option(help="Whose style: noto, twemoji, openmoji, fluent ...")] = None,
    drafter: Annotated[str, typer.Option(help="Who guesses: plain, or one of `outrider methods`.")] = "jacobi",
    rule: RuleName = "exact",
    drafter_option: DrafterOptions = None,
    rule_option: RuleOptions = None,
    guidance: Annotated[
        float | None, typer.Option(help="1 is none; more keeps closer to the words. Default: 3, or the model's own.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest codes; 0 is off.")] = 0,
    entropy_aware: Annotated[
        bool, typer.Option("--entropy-aware", help="Hotter where the model is sure, colder where it is not.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same picture.")] = 0,
    compare: Compare = False,
    trace: TraceFile = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write the picture.")] = Path(
        "picture.png"
    ),
    scale: Annotated[
        int | None,
        typer.Option(min=1, max=32, help="Enlarge pixels so many times. Default: 4; of a published model, 1."),
    ] = None,
    model: Model = None,
    draft: Draft = None,
    model_option: ModelOptions = None,
    weights: OwnWeights = None,
    dtype: Precision = "float32",
    device: Device = "cpu",
) -> None:
    """Draw what the words say, speculatively decoded."""
    options: dict[str, Any] = {
        "style": style,
        **methods(drafter, rule, drafter_option, rule_option),
        **({} if guidance is None else {"guidance": guidance}),
        "temperature": temperature,
        "top_k": top_k,
        "entropy_aware": entropy_aware,
        "seed": seed,
    }
    from outrider.image.options import Options

    Options.of(options)  # refused before weights are read
    im = image_model(model, draft, model_option, weights, device=device, dtype=dtype)
    result = im.generate(prompt, **options)
    times = scale or (_SCALE if model is None else 1)
    picture = result.image.resize((result.image.width * times, result.image.height * times), 0)
    picture.save(output)
    print(f"{output}: {_told(result)}")
    if trace is not None:
        trace.write_text(result.trace.to_json(), encoding="utf-8")
    if compare:
        print(_compared(im, prompt, options, result), file=sys.stderr)


def _told(result: Result) -> str:
    found = result.trace.summary()
    words = f"{found.tokens} codes in {found.target_passes} calls of the target, {found.tokens_per_pass:.2f} a call"
    if found.total_variation:
        relaxed = found.sources.get("relaxed", 0)
        words += (
            f"; {relaxed} accepted only because the rule is relaxed, for {found.total_variation:.2f} of total variation"
        )
    return words


def _compared(im: ImageModel | PublishedModel, prompt: str, options: dict[str, Any], result: Result) -> str:
    plain = im.generate(prompt, **(options | {"drafter": None, "drafter_options": {}}))
    before, after = plain.trace.summary(), result.trace.summary()
    same = sum(one == other for one, other in zip(plain.tokens, result.tokens, strict=True))
    return "\n".join(
        (
            f"plain decoding  {before.target_passes} calls, {before.seconds:.2f} s",
            f"{result.trace.method:14}  {after.target_passes} calls, {after.seconds:.2f} s",
            f"the same        {same} of {before.tokens} codes (rule gumbel-match gives the same picture for one seed)",
        )
    )
