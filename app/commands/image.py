"""`outrider image`: a picture of a few words. Heavy packages are imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.commands.options import (
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
    methods,
    published,
)

if TYPE_CHECKING:
    from outrider.image import ImageModel, PublishedModel, Result

Prompts = Annotated[
    str, typer.Option(metavar="SET|FILE", help="common or held-out names, or a file with a prompt a line.")
]
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
    im = opened(model, draft, model_option, weights, device=device, dtype=dtype)
    result = im.generate(prompt, **options)
    times = scale or (_SCALE if model is None else 1)
    picture = result.image.resize((result.image.width * times, result.image.height * times), 0)
    picture.save(output)
    print(f"{output}: {_told(result)}")
    if trace is not None:
        trace.write_text(result.trace.to_json(), encoding="utf-8")
    if compare:
        print(_compared(im, prompt, options, result), file=sys.stderr)


def opened(
    model: str | None,
    draft: str | None,
    model_option: list[str] | None,
    weights: Path | None,
    *,
    device: str,
    dtype: str,
) -> ImageModel | PublishedModel:
    """Our own model, or the published one that is named."""
    from outrider.image import load

    given = published(model, draft, model_option, weights)
    if given is None:
        return load("emoji", device=device, dtype=dtype, folder=weights)
    found: PublishedModel = load(str(model), device=device, dtype=dtype, **given)
    return found


def asked_for(prompts: str) -> tuple[str, ...]:
    """The prompts of one of our sets, or of a file."""
    from outrider.image.prompt_encoder import PROMPTS

    if prompts in PROMPTS:
        return PROMPTS[prompts]
    file = Path(prompts)
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {file}; or say {' or '.join(PROMPTS)}", param_hint="--prompts")
    return tuple(filter(None, map(str.strip, file.read_text("utf-8").splitlines())))


def _told(result: Result) -> str:
    found = result.trace.summary()
    words = f"{found.tokens} codes in {found.target_calls} calls of the target, {found.tokens_per_call:.2f} a call"
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
            f"plain decoding  {before.target_calls} calls, {before.seconds:.2f} s",
            f"{result.trace.method:14}  {after.target_calls} calls, {after.seconds:.2f} s",
            f"the same        {same} of {before.tokens} codes (rule gumbel-match gives the same picture for one seed)",
        )
    )
