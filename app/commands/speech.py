"""`outrider speech`: read a text aloud; with --model, a published model that speaks, plays or transcribes.

Heavy packages are imported when it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.options import (
    DEVICE,
    DTYPE,
    RULE,
    SPEECH_DRAFTER,
    VOCODER,
    Compare,
    Device,
    DrafterOptions,
    DraftModelName,
    Dtype,
    FrequencyPenalty,
    ModelOptions,
    OwnWeights,
    PresencePenalty,
    PublishedName,
    RuleName,
    RuleOptions,
    Seed,
    Temperature,
    TopK,
    TraceFile,
    VocoderName,
    methods,
    published,
    waiting,
    writable,
)
from outrider.core.assets.files import write_atomically

if TYPE_CHECKING:
    from outrider.speech import PublishedResult, PublishedSpeech, Result, SpeechModel


def speech(
    text: Annotated[
        str, typer.Argument(help="Text to read; - reads it from stdin. For a speech recogniser, a .wav file.")
    ],
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Drafter: plain, or a name from `outrider methods`. Default: jacobi; plain for a published model."
        ),
    ] = None,
    rule: RuleName = RULE,
    drafter_option: DrafterOptions = None,
    rule_option: RuleOptions = None,
    speed: Annotated[float, typer.Option(help="Speaking rate, from 0.5 to 2; 1 is normal.")] = 1.0,
    temperature: Temperature = 0.6,
    top_k: TopK = 0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    compare: Compare = False,
    trace: TraceFile = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the audio to a .wav file.",
            callback=lambda path: writable(path, (".wav",)),
        ),
    ] = Path("speech.wav"),
    model: PublishedName = None,
    draft_model: DraftModelName = None,
    model_option: ModelOptions = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of frames or tokens, for a published model. Default: the model's own."
        ),
    ] = None,
    weights: OwnWeights = None,
    vocoder: VocoderName = VOCODER,
    dtype: Dtype = DTYPE,
    device: Device = DEVICE,
) -> None:
    """Read a text aloud by speculative decoding."""
    chosen = drafter or (SPEECH_DRAFTER if model is None else "plain")
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
    from outrider.speech.phonemes import split_utterances

    text = sys.stdin.read() if text == "-" else text
    published_options = published(model, draft_model, model_option, weights)
    if published_options is not None:
        if vocoder != VOCODER:
            raise typer.BadParameter("is for our own voice; leave out --model", param_hint="--vocoder")
        unavailable = {"speed": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if given := [name for name, default in unavailable.items() if options.pop(name) != default]:
            raise typer.BadParameter(
                "is not available for a published model", param_hint=f"--{given[0].replace('_', '-')}"
            )
        _published(
            load(str(model), device=device, dtype=dtype, **published_options),
            text,
            max_new_tokens,
            options,
            output,
            trace,
            compare,
        )
        return
    Options.of(options)  # validate before loading weights
    split_utterances(text)
    with waiting("Loading the voice ..."):
        sp = load(device=device, dtype=dtype, folder=weights, vocoder=vocoder)
    result = _spoken(sp, text, options)
    result.sound.save(output)
    print(f"{output}: {_summary(result)}")
    if trace is not None:
        write_atomically(trace, result.trace.to_json())
    if compare:
        print(_comparison(sp, text, options, result), file=sys.stderr)


def _published(
    sp: PublishedSpeech,
    text: str,
    max_new_tokens: int | None,
    options: dict[str, Any],
    output: Path,
    trace: Path | None,
    compare: bool,
) -> None:
    """Run a published model: speak or play a text, or transcribe a .wav file."""
    from outrider.speech import Sound

    prompt: str | Sound = text if sp.makes_sound else Sound.load(text)
    with waiting("Generating ..."):
        result: PublishedResult = sp.generate(prompt, max_new_tokens=max_new_tokens, **options)
    summary = result.trace.summary()
    line = f"{summary.tokens} tokens in {summary.target_passes} target passes, {summary.tokens_per_pass:.2f} per pass"
    if sp.makes_sound:
        sound = sp.to_sound(result)
        sound.save(output)
        print(f"{output}: {sound.seconds:.1f} s, {line}")
    else:
        print(result.outcome)
        print(line, file=sys.stderr)
    if trace is not None:
        write_atomically(trace, result.trace.to_json())
    if compare:
        plain = sp.generate(
            prompt, max_new_tokens=max_new_tokens, **(options | {"drafter": None, "drafter_options": {}})
        )
        print(
            f"plain decoding  {plain.trace.summary().target_passes} passes; {_agreement(plain, result)}",
            file=sys.stderr,
        )


def _agreement(plain: Any, result: Any) -> str:
    if plain.tokens == result.tokens:
        return "the same tokens"
    return "different tokens (the rule gumbel-match gives the same ones)"


def _spoken(sp: SpeechModel, text: str, options: dict[str, Any]) -> Result:
    """Generate, showing how much speech there is so far."""
    stream = sp.stream(text, **options)
    seconds = 0.0
    with waiting("Speaking ...") as update:
        for piece in stream:
            if len(piece.samples):
                seconds += len(piece.samples) / sp.sample_rate
                update(f"Speaking: {seconds:.1f} s of speech so far ...")
    return stream.results[0]


def _summary(result: Result) -> str:
    summary, factor = result.trace.summary(), result.real_time_factor
    text = (
        f"{result.sound.seconds:.1f} s of speech, {summary.tokens} tokens in {summary.target_passes} target passes, "
        f"{summary.tokens_per_pass:.2f} per pass; real-time factor {factor.total:.2f} "
        f"(model {factor.model:.2f}, codec {factor.codec:.2f}, vocoder {factor.vocoder:.2f})"
    )
    if result.time_to_first_sound is not None:
        text += f", first sound after {result.time_to_first_sound:.2f} s"
    if summary.total_variation:
        relaxed = summary.sources.get("relaxed", 0)
        text += f"; {relaxed} accepted by the relaxed rule only, total variation {summary.total_variation:.2f}"
    if result.finish_reason != "stop":
        text += "; cut off at the maximum length"
    return text


def _comparison(sp: SpeechModel, text: str, options: dict[str, Any], result: Result) -> str:
    with waiting("Speaking by plain decoding ..."):
        plain = sp.generate(text, **(options | {"drafter": None, "drafter_options": {}}))
    before, after = plain.trace.summary(), result.trace.summary()
    drafted = f"{after.target_passes} passes, {after.seconds:.2f} s, {_agreement(plain, result)}"
    return f"plain decoding  {before.target_passes} passes, {before.seconds:.2f} s\n{result.trace.method:14}  {drafted}"
