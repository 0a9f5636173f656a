"""`outrider bench speech`: drafters and rules on sentences, and the quality of the speech by automatic judges.

Heavy packages are imported when it runs; Ctrl-C shows the tables so far.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.options import (
    DEVICE,
    RULE,
    VOCODER,
    Device,
    DrafterGrid,
    DrafterNames,
    DraftModelName,
    Dtype,
    FirstSeed,
    FrequencyPenalty,
    JsonFile,
    ModelOptions,
    OwnWeights,
    PresencePenalty,
    PublishedName,
    Repeat,
    RuleGrid,
    RuleNames,
    Temperature,
    TopK,
    VocoderName,
    lines,
    published,
)
from outrider.core.assets.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.core.bench.runner import Item
    from outrider.core.bench.settings import Setting
    from outrider.speech import PublishedSpeech
    from outrider.speech.evaluation.bench import Quality, SpeechBench, Teacher

_DRAFTERS = "medusa,jacobi,token-recycling"
_WIDTH = 120  # of tables that are written to a file or a pipe; a terminal has a width of its own
SHOWN = (  # measures of quality: title, key, factor, format
    ("word errors %", "word_error", 100, ".1f"),
    ("letter errors %", "letter_error", 100, ".1f"),
    ("DNSMOS", "dnsmos", 1, ".2f"),
    ("speaker similarity", "speaker_similarity", 1, ".3f"),
    ("relative duration", "duration_ratio", 1, ".2f"),
    ("no end token %", "missing_end", 100, ".1f"),
)


def speech(
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text file, one sentence per line. Default: held-out sentences.")
    ] = None,
    drafters: DrafterNames = _DRAFTERS,
    rules: RuleNames = RULE,
    drafter_option: DrafterGrid = None,
    rule_option: RuleGrid = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of sentences.")] = 20,
    repeat: Repeat = 1,
    quality: Annotated[
        bool,
        typer.Option("--quality", help="Measure audio quality too: word error rate, DNSMOS, speaker similarity."),
    ] = False,
    num_dnsmos: Annotated[
        int | None, typer.Option(min=1, help="Number of sentences that --quality rates with DNSMOS. Default: all.")
    ] = None,
    temperature: Temperature = 0.6,
    top_k: TopK = 0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: FirstSeed = 0,
    weights: OwnWeights = None,
    vocoder: VocoderName = VOCODER,
    model: PublishedName = None,
    draft_model: DraftModelName = None,
    model_option: ModelOptions = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of frames or tokens, for a published model. Default: the model's own."
        ),
    ] = None,
    device: Device = DEVICE,
    dtype: Dtype = "bfloat16",
    output: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot tokens per target pass against word error rate.")
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write audio of the first five sentences to DIR, as Ogg Opus.")
    ] = None,
) -> None:
    """Measure tokens per target pass and speed on speech, total variation, and with --quality that of the audio."""
    from rich.console import Console

    from outrider.app.bench.progress import go
    from outrider.app.options import listed
    from outrider.core.bench.runner import Bench, Item
    from outrider.core.bench.settings import combine
    from outrider.core.errors import InvalidOption, install_command, unknown
    from outrider.speech import load
    from outrider.speech.evaluation import bench, opus
    from outrider.speech.evaluation import samples as sampled
    from outrider.speech.phonemes import hibari
    from outrider.speech.resolve_drafter import drafters as known_drafters
    from outrider.speech.resolve_drafter import rules as known_rules

    if model is not None and drafters == _DRAFTERS:  # published models have none before they are trained
        drafters = _DRAFTERS.removeprefix("medusa,")
    chosen = [name.strip() for name in drafters.split(",")], [name.strip() for name in rules.split(",")]
    for what, names, known in (
        ("drafter", chosen[0], known_drafters()),
        ("rule", chosen[1], known_rules()),
    ):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    of_drafters, of_rules = listed(drafter_option, "--drafter-option"), listed(rule_option, "--rule-option")
    settings = combine(*chosen, of_drafters, of_rules)
    if samples is not None:
        opus.library()  # fail now if it is missing, not after measuring
    if prompts is None:
        items = bench.sentences(num_prompts)
    else:
        items = [Item(str(index), "given", line) for index, line in enumerate(lines(prompts))][:num_prompts]
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k}
    if (loading := published(model, draft_model, model_option, weights)) is not None:
        if vocoder != VOCODER:
            raise typer.BadParameter("is for our own voice; leave out --model", param_hint="--vocoder")
        if quality or samples is not None or plot is not None:
            raise typer.BadParameter("works with our own voice only; leave out --model", param_hint="--quality")
        if presence_penalty or frequency_penalty:
            raise typer.BadParameter("is not available for a published model", param_hint="--presence-penalty")
        one = load(str(model), device=device, dtype=dtype, **loading)
        _published(one, settings, items, repeat, {"seed": seed, "limit": max_new_tokens, "options": options}, output)
        return
    options |= {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
    console = Console(stderr=True, highlight=False)
    with console.status("Loading ..."):
        sp = load(device=device, dtype=dtype, folder=weights, vocoder=vocoder)
    speakers = bench.SpeechBench(sp, settings, seed, options)
    measured = Bench(speakers.contenders(), items, repeat)
    complete = go(measured, console)
    if not measured.runs:
        raise InvalidOption("stopped before anything was measured")
    read, skipped = _teacher() if quality or samples is not None else (None, {})
    if hibari() is None:
        skipped["hibari-tts"] = f"not installed, so words are pronounced by their spelling; {install_command('speech')}"
    heard = _judge(speakers, items, read, num_dnsmos, console) if quality else {}
    about: dict[str, Any] = {
        "vocoder": vocoder,
        "prompts": len(measured.first("plain")),
        "prompts_wanted": len(items),
        "device": device,
        "repeat": repeat,
    }
    report = bench.report(measured, speakers, heard, about=about, skipped=skipped)
    if samples is not None:
        report["samples"] = sampled.write_samples(speakers, items, read, samples)
    show(report, output, draw)
    if plot is not None and not bench.plot(report, plot):
        print("nothing to plot: --plot needs --quality and matplotlib", file=sys.stderr)
    if not complete:
        raise typer.Exit(130)


def _published(
    sp: PublishedSpeech,
    settings: list[Setting],
    items: list[Item],
    repeat: int,
    how: Mapping[str, Any],
    output: Path | None,
) -> None:
    """Measure a published model that reads texts."""
    from rich.console import Console

    from outrider.app.bench.progress import go
    from outrider.core.bench.runner import Bench
    from outrider.core.errors import InvalidOption
    from outrider.speech.evaluation import published_bench

    if not sp.makes_sound:
        raise InvalidOption(f"{sp.name} transcribes sound; this benchmark reads sentences aloud")
    measured = Bench(published_bench.contenders(sp, settings, **how), items, repeat)
    complete = go(measured, Console(stderr=True, highlight=False))
    if not measured.runs:
        raise InvalidOption("stopped before anything was measured")
    about = {**how["options"], "seed": how["seed"], "prompts": len(measured.first("plain")), "repeat": repeat}
    show(published_bench.report(measured, sp, settings, about=about), output, draw_published)
    if not complete:
        raise typer.Exit(130)


def draw_published(console: Console, report: Mapping[str, Any]) -> None:
    """Print the table of a published model."""
    from outrider.app.bench.tables import COLUMNS
    from outrider.app.viz.fitted import Fitted

    titles = ("tokens / s", "speedup (95 %)", "tokens / pass", "accepted", "same output")
    settings = report["settings"]
    table = _table(
        f"{settings['model']}, {settings['dtype']}, {settings['prompts']} sentences, by the model's clock",
        [*titles, "total variation / token"],
    )
    for row in report["rows"]:
        apart = "" if row["lossless"] else f"{row['total_variation_per_token']:.4f}"
        table.add_row(row["setting"], *(COLUMNS[title][0](row) for title in titles), apart)
    console.print(Fitted(table))


def _teacher() -> tuple[Teacher | None, dict[str, str]]:
    """The model that taught our voice, as a function that reads text aloud, or the reason why it is not available."""
    from outrider.core.assets.store import AssetError
    from outrider.speech.evaluation import bench
    from outrider.speech.training.kokoro import TeacherError

    try:
        return bench.load_teacher(), {}
    except (AssetError, TeacherError) as error:
        return None, {bench.TEACHER: str(error)}


def _judge(
    speakers: SpeechBench, items: list[Item], read: Teacher | None, num_dnsmos: int | None, console: Console
) -> Mapping[str, list[Quality]]:
    """The judges' results for every setting, the teacher and the codec."""
    import torch

    from outrider.app.bench.progress import bar
    from outrider.speech.evaluation import bench
    from outrider.speech.evaluation.metrics import SpeechMetrics

    count = len(items) * (1 + len(speakers.settings) + 2 * (read is not None))
    with bar(console, count, "Listening") as step:
        return bench.ladder(speakers, items, SpeechMetrics(1, torch.get_num_threads()), read, step, num_dnsmos)


def show(report: Mapping[str, Any], output: Path | None, draw: Callable[[Console, Mapping[str, Any]], None]) -> None:
    """Print the tables and write the report to a file; if the file is `-`, print only the report's JSON."""
    from rich.console import Console

    if output is not None and str(output) == "-":
        print(json.dumps(report, indent=1))
        return
    console = Console(highlight=False)
    draw(console if console.is_terminal else Console(highlight=False, width=max(console.width, _WIDTH)), report)
    if output is not None:
        write_atomically(output, json.dumps(report, indent=1) + "\n")


def draw(console: Console, report: Mapping[str, Any]) -> None:
    """Print the tables of speed, real-time factors and, if judged, speech quality."""
    from rich.text import Text

    from outrider.app.bench.tables import remarks, sampling_name
    from outrider.app.viz.fitted import Fitted

    settings, rows = report["settings"], report["rows"]
    device = settings["device"] if settings["device"] != "cpu" else f"{report['machine'].get('threads', '?')} threads"
    count = f"{settings['prompts']} of {settings['prompts_wanted']} sentences"
    sampling = sampling_name(settings["temperature"])
    console.print(Text(f"{settings['model']}, {settings['dtype']}, {device}; {count}, {sampling}", style="bold"))
    console.print(Fitted(_speeds(rows)), Fitted(_real_time_factors(rows)))
    if report["judged"]:
        qualities = {**report["ladder"], **{row["setting"]: row["quality"] for row in rows}}
        table = quality_table(f"Speech quality over {report['judged']} sentences", qualities, "plain")
        console.print(Fitted(table))
    for line in remarks({**report, "rows": [{**row, "drafter": row["setting"]} for row in rows]}):
        console.print(line, soft_wrap=True)


def _table(title: str, columns: list[str]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", style="cyan", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _speeds(rows: list[Mapping[str, Any]]) -> Any:
    """Speed and acceptance of the language model alone, and the entropy of its distributions."""
    from outrider.app.bench.tables import COLUMNS

    titles = ("tokens / s", "speedup (95 %)", "tokens / pass", "accepted", "same output")
    shown = {title: COLUMNS[title][0] for title in titles}
    table = _table(
        "The language model, by its own clock", [*shown, "entropy / token", "relaxed", "total variation / token"]
    )
    for row in rows:
        relaxed = (
            ("", "") if row["lossless"] else (f"{row['relaxed_share']:.0%}", f"{row['total_variation_per_token']:.4f}")
        )
        table.add_row(row["setting"], *(cell(row) for cell in shown.values()), f"{row['target_entropy']:.2f}", *relaxed)
    return table


def _real_time_factors(rows: list[Mapping[str, Any]]) -> Any:
    parts = ("model", "codec", "vocoder")
    title = "From text to sound: seconds for one second of sound, and the speedup of the whole"
    table = _table(title, [*parts, "total", "speedup", "time to first sound"])
    plain = next((row["quality"] for row in rows if row["setting"] == "plain"), None)
    for row in rows:
        factors = [row["quality"][f"factor_{part}"] for part in parts]
        seconds = row["quality"]["first_sound_seconds"]
        first = "-" if seconds is None else f"{seconds:.2f} s"
        whole = "-" if plain is None else f"{sum(plain[f'factor_{part}'] for part in parts) / sum(factors):.2f}"
        table.add_row(row["setting"], *(f"{factor:.3f}" for factor in (*factors, sum(factors))), whole, first)
    return table


def quality_table(title: str, qualities: Mapping[str, Mapping[str, Any]], base: str) -> Any:
    """Speech quality by setting; the word error rate also as a difference from the setting `base`."""
    titles = [title for title, *_ in SHOWN]
    table = _table(title, [titles[0], f"difference from {base} (95 %)", *titles[1:]])
    for name, quality in qualities.items():
        if "word_error" not in quality:
            continue
        cells = [format(factor * quality[measure]["value"], form) for _, measure, factor, form in SHOWN]
        table.add_row(name, cells[0], "" if name == base else difference(quality["word_error"]), *cells[1:])
    return table


def difference(error: Mapping[str, float]) -> str:
    """A difference of word error rates in percentage points, with its 95 % interval."""
    return f"{100 * error['apart']:+.1f} ({100 * error['apart_low']:+.1f} to {100 * error['apart_high']:+.1f})"
