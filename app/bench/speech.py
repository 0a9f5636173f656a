"""`outrider bench speech`: drafters and rules on sentences read aloud, and what judges hear.

Heavy packages are imported when it runs; Ctrl-C gives the tables of what is done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.core.bench.runner import Item
    from outrider.speech.evaluation.bench import Heard, Read, Speech

_WIDTH = 120  # of the tables; a narrower terminal wraps their lines
SHOWN = (  # of the quality: title, measure, factor, form
    ("words wrong", "word_error", 100, ".1f"),
    ("letters", "letter_error", 100, ".1f"),
    ("DNSMOS", "dnsmos", 1, ".2f"),
    ("speaker", "speaker_similarity", 1, ".3f"),
    ("duration", "duration_ratio", 1, ".2f"),
    ("no end", "missing_end", 100, ".1f"),
)


def speech(
    prompts: Annotated[
        Path | None, typer.Option(help="A sentence a line; left out: held-out ones of all kinds.")
    ] = None,
    drafters: Annotated[str, typer.Option(help="Names with commas between them.")] = "medusa,jacobi,token-recycling",
    rules: Annotated[str, typer.Option(help="Names with commas between them; each drafter meets each.")] = "exact",
    drafter_option: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Of every drafter that has it, or DRAFTER.K=V1,V2: a row each."),
    ] = None,
    rule_option: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Of every rule that has it, or RULE.K=V1,V2: a row each.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="So many sentences.")] = 20,
    repeat: Annotated[int, typer.Option(min=1, help="Times that everyone says each.")] = 1,
    judge: Annotated[
        bool, typer.Option("--judge", help="Word error, DNSMOS, speaker ..., beside the teacher and the codec.")
    ] = False,
    rated: Annotated[
        int | None, typer.Option(min=1, help="Of what is judged, DNSMOS for so many; left out: for all.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.6,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    presence_penalty: Annotated[float, typer.Option(help="On tokens that were said already.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="On tokens, for every time they were said.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the first sentence.")] = 0,
    weights: Annotated[Path | None, typer.Option(metavar="DIR", help="Weights of your own training.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything; - is stdout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw tokens a call against word error.")] = None,
    samples: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write what everybody says of the first five there, as Ogg Opus.")
    ] = None,
) -> None:
    """Tokens a target call and speed on speech, what relaxed rules cost, and with --judge what is heard of it."""
    from rich.console import Console

    from outrider.app.bench.progress import go
    from outrider.app.options import listed
    from outrider.core.bench.runner import Bench, Item
    from outrider.core.errors import InvalidOption, unknown
    from outrider.speech import load
    from outrider.speech.evaluation import bench, opus
    from outrider.speech.evaluation import samples as sampled
    from outrider.speech.model import drafters as known_drafters
    from outrider.speech.model import rules as known_rules
    from outrider.speech.phonemes import reader

    chosen = [one.strip() for one in drafters.split(",")], [one.strip() for one in rules.split(",")]
    for what, names, known in (("drafter", chosen[0], known_drafters()), ("rule", chosen[1], known_rules())):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    of_drafters, of_rules = listed(drafter_option, "--drafter-option"), listed(rule_option, "--rule-option")
    settings = bench.settings(*chosen, of_drafters, of_rules)
    if samples is not None:
        opus.library()  # is it there? asked now, and not when all is measured
    if prompts is None:
        items = bench.sentences(limit)
    else:
        lines = filter(None, map(str.strip, prompts.read_text("utf-8").splitlines()))
        items = [Item(str(place), "given", line) for place, line in enumerate(lines)][:limit]
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k}
    options |= {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
    console = Console(stderr=True, highlight=False)
    with console.status("Loading ..."):
        sp = load(device=device, dtype=dtype, folder=weights)
    asked = bench.Speech(sp, settings, seed, options)
    found = Bench(asked.contenders(), items, repeat)
    whole = go(found, console)
    if not found.runs:
        raise InvalidOption("stopped before anything was measured")
    read, skipped = _teacher() if judge or samples is not None else (None, {})
    if reader() is None:
        skipped["hibari-tts"] = (
            "not installed, so that words are read by their spelling; pip install 'outrider[speech]'"
        )
    heard = _judged(asked, items, read, rated, console) if judge else {}
    about = {"prompts": len(found.first("plain")), "prompts_wanted": len(items), "device": device, "repeat": repeat}
    told = bench.report(found, asked, heard, about=about, skipped=skipped)
    if samples is not None:
        told["samples"] = sampled.written(asked, items, read, samples)
    say(told, output, draw)
    if plot is not None and not bench.plot(told, plot):
        print("there is nothing to draw: that takes --judge and matplotlib", file=sys.stderr)
    if not whole:
        raise typer.Exit(130)


def _teacher() -> tuple[Read | None, dict[str, str]]:
    """Who reads aloud as the voice was taught, or why nobody does."""
    from outrider.core.assets.store import AssetError
    from outrider.speech.evaluation import bench
    from outrider.speech.training.kokoro import TeacherError

    try:
        return bench.teacher(), {}
    except (AssetError, TeacherError) as error:
        return None, {bench.TEACHER: str(error)}


def _judged(
    asked: Speech, items: list[Item], read: Read | None, rated: int | None, console: Console
) -> Mapping[str, list[Heard]]:
    """What is heard of everybody."""
    import torch

    from outrider.app.bench.progress import bar
    from outrider.speech.evaluation import bench
    from outrider.speech.evaluation.metrics import Judges

    count = len(items) * (1 + len(asked.settings) + 2 * (read is not None))
    with bar(console, count, "Listening") as step:
        return bench.ladder(asked, items, Judges(1, torch.get_num_threads()), read, step, rated)


def say(told: Mapping[str, Any], output: Path | None, drawn: Callable[[Console, Mapping[str, Any]], None]) -> None:
    """Tables, and everything into a file; or that alone, on stdout."""
    from rich.console import Console

    if output is not None and str(output) == "-":
        print(json.dumps(told, indent=1))
        return
    wide = Console(highlight=False)
    drawn(wide if wide.width >= _WIDTH else Console(highlight=False, width=_WIDTH), told)
    if output is not None:
        output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def draw(console: Console, told: Mapping[str, Any]) -> None:
    """The tables: what drafting spares, and what is heard."""
    from rich.text import Text

    from outrider.app.bench.tables import remarks

    asked, rows = told["settings"], told["rows"]
    sampled = "greedy" if asked["temperature"] == 0 else f"temperature {asked['temperature']:g}"
    where = asked["device"] if asked["device"] != "cpu" else f"{told['machine'].get('threads', '?')} threads"
    count = f"{asked['prompts']} of {asked['prompts_wanted']} sentences"
    said = f"{asked['model']}, {asked['dtype']}, {where}; {count}, {sampled}"
    console.print(Text(said, style="bold"))
    console.print(_speeds(rows), _shares(rows))
    if told["judged"]:
        qualities = {**told["ladder"], **{row["setting"]: row["quality"] for row in rows}}
        console.print(heard_table(f"What is heard of {told['judged']} sentences", qualities, "plain"))
    for line in remarks({**told, "rows": [{**row, "drafter": row["setting"]} for row in rows]}):
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
    """The language model alone; beside acceptance, how open its distributions are."""
    from outrider.app.bench.tables import COLUMNS

    shown = {name: COLUMNS[name][0] for name in ("tok/s", "speedup (95 %)", "tok/call", "accepted", "same output")}
    table = _table("The language model", [*shown, "nats/tok", "relaxed", "price/tok"])
    for row in rows:
        relaxed = ("", "") if row["lossless"] else (f"{row['relaxed_share']:.0%}", f"{row['price_per_token']:.4f}")
        table.add_row(row["setting"], *(cell(row) for cell in shown.values()), f"{row['target_entropy']:.2f}", *relaxed)
    return table


def _shares(rows: list[Mapping[str, Any]]) -> Any:
    parts = ("model", "codec", "vocoder")
    table = _table("Seconds of work for a second of sound", [*parts, "together", "first heard"])
    for row in rows:
        factors = [row["quality"][f"factor_{part}"] for part in parts]
        first = row["quality"]["first_heard"]
        heard = "-" if first is None else f"{first:.2f} s"
        table.add_row(row["setting"], *(f"{one:.3f}" for one in (*factors, sum(factors))), heard)
    return table


def heard_table(title: str, rungs: Mapping[str, Mapping[str, Any]], base: str) -> Any:
    """The ladder; of word error also how far it is from one of them."""
    titles = [title for title, *_ in SHOWN]
    table = _table(title, [titles[0], f"beside {base} (95 %)", *titles[1:]])
    for name, found in rungs.items():
        if "word_error" not in found:
            continue
        cells = [format(factor * found[measure]["value"], form) for _, measure, factor, form in SHOWN]
        table.add_row(name, cells[0], "" if name == base else apart_from(found["word_error"]), *cells[1:])
    return table


def apart_from(error: Mapping[str, float]) -> str:
    """A difference of word errors in percent, and its interval."""
    return f"{100 * error['apart']:+.1f} ({100 * error['apart_low']:+.1f} to {100 * error['apart_high']:+.1f})"
