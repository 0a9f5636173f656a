"""`outrider image`: an image of a few words. Heavy packages are imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.options import (
    DEVICE,
    DTYPE,
    IMAGE_DRAFTER,
    RULE,
    Compare,
    Device,
    DrafterOptions,
    DraftModelName,
    Dtype,
    GuidanceScale,
    ModelOptions,
    OwnWeights,
    PublishedName,
    RuleName,
    RuleOptions,
    Seed,
    Style,
    Temperature,
    TopK,
    TraceFile,
    image_model,
    methods,
    picture_file,
    waiting,
)
from outrider.core.assets.files import write_atomically

if TYPE_CHECKING:
    from outrider.image import ImageModel, PublishedModel, Result

_SCALE = 4  # a 64x64 image is enlarged by this factor


def image(
    prompt: Annotated[str, typer.Argument(help="A few words, such as 'red heart'.")],
    style: Style = None,
    drafter: Annotated[str, typer.Option(help="Drafter: plain, or a name from `outrider methods`.")] = IMAGE_DRAFTER,
    rule: RuleName = RULE,
    drafter_option: DrafterOptions = None,
    rule_option: RuleOptions = None,
    guidance_scale: GuidanceScale = None,
    negative_prompt: Annotated[str | None, typer.Option(help="Prompt that guidance steers away from.")] = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    entropy_aware: Annotated[
        bool,
        typer.Option("--entropy-aware", help="Raise the temperature where entropy is low, lower it where it is high."),
    ] = False,
    seed: Seed = 0,
    compare: Compare = False,
    trace: TraceFile = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Write the image to FILE.", callback=picture_file),
    ] = Path("picture.png"),
    upscale: Annotated[
        int | None,
        typer.Option(
            min=1, max=32, help="Integer factor to enlarge the image by. Default: 4; 1 for a published model."
        ),
    ] = None,
    model: PublishedName = None,
    draft_model: DraftModelName = None,
    model_option: ModelOptions = None,
    weights: OwnWeights = None,
    dtype: Dtype = DTYPE,
    device: Device = DEVICE,
) -> None:
    """Generate an image from a prompt by speculative decoding."""
    options: dict[str, Any] = {
        "style": style,
        **methods(drafter, rule, drafter_option, rule_option),
        **({} if guidance_scale is None else {"guidance_scale": guidance_scale}),
        "negative_prompt": negative_prompt,
        "temperature": temperature,
        "top_k": top_k,
        "entropy_aware": entropy_aware,
        "seed": seed,
    }
    from outrider.image.options import Options

    Options.of(options)  # validate before loading weights
    with waiting("Loading ..."):
        im = image_model(model, draft_model, model_option, weights, device=device, dtype=dtype)
    with waiting("Generating the image ..."):
        result = im.generate(prompt, **options)
    times = upscale or (_SCALE if model is None else 1)
    enlarged = result.image.resize((result.image.width * times, result.image.height * times), 0)
    output.parent.mkdir(parents=True, exist_ok=True)
    enlarged.save(output)
    print(f"{output}: {_summary(result)}")
    if trace is not None:
        write_atomically(trace, result.trace.to_json())
    if compare:
        print(_comparison(im, prompt, options, result), file=sys.stderr)


def _summary(result: Result) -> str:
    summary = result.trace.summary()
    text = f"{summary.tokens} codes in {summary.target_passes} target passes, {summary.tokens_per_pass:.2f} per pass"
    if summary.total_variation:
        relaxed = summary.sources.get("relaxed", 0)
        text += f"; {relaxed} accepted by the relaxed rule only, total variation {summary.total_variation:.2f}"
    return text


def _comparison(im: ImageModel | PublishedModel, prompt: str, options: dict[str, Any], result: Result) -> str:
    with waiting("Generating the image by plain decoding ..."):
        plain = im.generate(prompt, **(options | {"drafter": None, "drafter_options": {}}))
    before, after = plain.trace.summary(), result.trace.summary()
    same = sum(a == b for a, b in zip(plain.tokens, result.tokens, strict=True))
    return "\n".join(
        (
            f"plain decoding  {before.target_passes} passes, {before.seconds:.2f} s",
            f"{result.trace.method:14}  {after.target_passes} passes, {after.seconds:.2f} s",
            f"equal           {same} of {before.tokens} codes (rule gumbel-match: equal images for equal seeds)",
        )
    )
