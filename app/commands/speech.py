"""`outrider speech`: text read aloud into a sound file; with --model, what a published model makes of a text, or hears
in a sound. Heavy packages are imported when it runs."""

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
    methods,
    published,
)

if TYPE_CHECKING:
    from outrider.speech import PublishedSpeech, Result, Said, SpeechModel


def speech(
    text: Annotated[str, typer.Argument(help="What to say; - reads it from stdin. A model that hears takes a .wav.")],
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Who guesses: plain, or one of `outrider methods`. Default: jacobi; of a published model, plain."
        ),
    ] = None,
    rule: RuleName = "exact",
    drafter_option: DrafterOptions = None,
    rule_option: RuleOptions = None,
    speed: Annotated[float, typer.Option(help="From 0.5 to 2; 1 is usual.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.6,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0 is off.")] = 0,
    presence_penalty: Annotated[float, typer.Option(help="On tokens that were said already.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="On tokens, for every time they were said.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same reading.")] = 0,
    compare: Compare = False,
    trace: TraceFile = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write the sound, a .wav.")] = Path(
        "speech.wav"
    ),
    model: Model = None,
    draft: Draft = None,
    model_option: ModelOptions = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Of a published model: the most frames or tokens. Default: its own.")
    ] = None,
    weights: OwnWeights = None,
    dtype: Precision = "float32",
    device: Device = "cpu",
) -> None:
    """Read a text aloud, speculatively decoded."""
    chosen = drafter or ("jacobi" if model is None else "plain")
    options: dict[str, Any] = {
        **methods(chosen, rule, drafter_option, rule_option),
        "speed": speed,
        "temperature": temperature,
        "top_k": top_k,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    from outrider.speech import load
    from outrider.speech.options import Options
    from outrider.speech.phonemes import pieces

    asked = sys.stdin.read() if text == "-" else text
    given = published(model, draft, model_option, weights)
    if output.suffix.lower() != ".wav":
        raise typer.BadParameter("sound is written as .wav", param_hint="--output")
    if given is not None:
        beyond = {"speed": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if turned := [name for name, usual in beyond.items() if options.pop(name) != usual]:
            raise typer.BadParameter("is our own voice's", param_hint=f"--{turned[0].replace('_', '-')}")
        _published(load(str(model), device=device, dtype=dtype, **given), asked, limit, options, output, trace, compare)
        return
    Options.of(options)  # what is wrong is said before weights are read
    pieces(asked)
    sp = load(device=device, dtype=dtype, folder=weights)
    result = sp.generate(asked, **options)
    result.sound.save(output)
    print(f"{output}: {_told(result)}")
    if trace is not None:
        trace.write_text(result.trace.to_json(), encoding="utf-8")
    if compare:
        print(_compared(sp, asked, options, result), file=sys.stderr)


def _published(
    sp: PublishedSpeech,
    asked: str,
    limit: int | None,
    options: dict[str, Any],
    output: Path,
    trace: Path | None,
    compare: bool,
) -> None:
    """Have a published model say, play or hear what is asked."""
    from outrider.speech import Sound

    prompt: str | Sound = Sound.load(asked) if not sp.audible else asked
    result: Said = sp.generate(prompt, limit=limit, **options)
    found = result.trace.summary()
    words = f"{found.tokens} tokens in {found.target_passes} calls of the target, {found.tokens_per_pass:.2f} a call"
    if sp.audible:
        sound = sp.heard(result)
        sound.save(output)
        print(f"{output}: {sound.seconds:.1f} s, {words}")
    else:
        print(result.outcome)
        print(words, file=sys.stderr)
    if trace is not None:
        trace.write_text(result.trace.to_json(), encoding="utf-8")
    if compare:
        plain = sp.generate(prompt, limit=limit, **(options | {"drafter": None, "drafter_options": {}}))
        same = "the same tokens" if plain.tokens == result.tokens else "other tokens (rule gumbel-match gives the same)"
        print(f"plain decoding  {plain.trace.summary().target_passes} calls; {same}", file=sys.stderr)


def _told(result: Result) -> str:
    found, factor = result.trace.summary(), result.factor
    words = (
        f"{result.sound.seconds:.1f} s of speech, {found.tokens} tokens in {found.target_passes} calls of the target, "
        f"{found.tokens_per_pass:.2f} a call; {factor.total:.2f} s of work a second "
        f"(model {factor.model:.2f}, codec {factor.codec:.2f}, vocoder {factor.vocoder:.2f})"
    )
    if result.first is not None:
        words += f", first heard after {result.first:.2f} s"
    if found.total_variation:
        relaxed = found.sources.get("relaxed", 0)
        words += (
            f"; {relaxed} accepted only because the rule is relaxed, for {found.total_variation:.2f} of total variation"
        )
    if result.finish != "end":
        words += "; it came to its limit before its end"
    return words


def _compared(sp: SpeechModel, text: str, options: dict[str, Any], result: Result) -> str:
    plain = sp.generate(text, **(options | {"drafter": None, "drafter_options": {}}))
    before, after = plain.trace.summary(), result.trace.summary()
    same = "the same tokens" if plain.tokens == result.tokens else "other tokens (rule gumbel-match gives the same)"
    return "\n".join(
        (
            f"plain decoding  {before.target_passes} calls, {before.seconds:.2f} s",
            f"{result.trace.method:14}  {after.target_passes} calls, {after.seconds:.2f} s, {same}",
        )
    )
