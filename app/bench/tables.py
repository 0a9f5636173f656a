"""Benchmark results as tables for a terminal. Loads no models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outrider.app.options import file_size
from outrider.app.viz.fitted import Fitted
from outrider.core.bench.runner import PLAIN
from outrider.core.bench.settings import label

Row = Mapping[str, Any]
Cell = str | Text
_WIDE = 100  # columns of the terminal; narrower ones show fewer columns of the table


def name_of(row: Row) -> str:
    drafter = str(row["drafter"])
    if row["engine"] != "outrider":
        return f"{row['engine']} {drafter}"
    options = row.get("options", {})  # absent from older results
    return drafter if drafter == PLAIN else label(drafter, row["rule"], options)


def draw(console: Console, report: Mapping[str, Any]) -> None:
    """Print all tables and the remarks on them."""
    settings, rows = report["settings"], [*report["rows"], *report["peers"]]
    console.print(Text(_headline(report), style="bold"))
    console.print(Fitted(_figures(rows, wide=console.width >= _WIDE)))
    looping = settings.get("looping", [])
    without = [{**row, **part} for row in rows if (part := row["without_looping"])]
    if looping and without:
        title = f"Without the {len(looping)} of {settings['prompts']} prompts on which plain decoding repeats itself"
        console.print(Fitted(_figures(without, title, wide=console.width >= _WIDE)))
    tasks = sorted({task for row in report["rows"] for task in row["tasks"]})
    if len(tasks) > 1:
        console.print(Fitted(_by_task(rows, tasks)))
    for line in remarks(report):
        console.print(line, soft_wrap=True)


def _headline(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    prompts = f"{settings['prompts']} prompts"
    if settings["prompts"] < settings["prompts_wanted"]:
        prompts = f"{settings['prompts']} of {settings['prompts_wanted']} prompts"
    device = settings["device"] if settings["device"] != "cpu" else f"{report['machine'].get('threads', '?')} threads"
    model = f"{settings['model']}, {settings['dtype']}, {device}"
    return f"{model}; {prompts}, up to {settings['max_new_tokens']} tokens, {sampling_name(settings['temperature'])}"


def sampling_name(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _speedup(row: Row) -> Cell:
    if row["speedup"] is None:
        return "-"
    style = "green" if row["speedup_low"] > 1 else "red" if row["speedup_high"] < 1 else ""
    return Text(f"{row['speedup']:.2f} ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})", style)


def same(row: Row) -> Cell:
    """The share of outputs equal to plain decoding's; then those that differ by near-ties, and those that are wrong."""
    if row["identical"] is None:
        return "-"
    text = Text(f"{row['identical']:.0%}")
    if row["near_ties"]:
        text.append(f" +{row['near_ties']:.0%} ties")
    if row["wrong"]:
        text.append(f" {row['wrong']:.0%} WRONG", "bold red")
    return text


COLUMNS: dict[str, tuple[Callable[[Row], Cell], bool]] = {  # title -> (cell, shown on narrow terminals too)
    "tokens / s": (lambda row: _number(row["tokens_per_second"], ".1f"), True),
    "quartiles": (lambda row: f"{row['tokens_per_second_low']:.0f}-{row['tokens_per_second_high']:.0f}", False),
    "speedup (95 %)": (_speedup, True),
    "decoding": (lambda row: _number(row.get("decode_speedup"), ".2f"), False),  # absent from older results
    "tokens / pass": (lambda row: _number(row["tokens_per_pass"], ".2f"), True),
    "accepted": (lambda row: _number(row["acceptance_rate"], ".0%"), True),
    "passes / token": (lambda row: _number(row["equivalents_per_token"], ".2f"), False),
    "same output": (same, True),
    "TV / token": (lambda row: _number(row.get("total_variation_per_token"), ".4f"), True),
    "NLL / token": (lambda row: _number(row.get("quality", {}).get("nll"), ".3f"), True),
    "memory": (lambda row: file_size(row["memory"]) if row["memory"] else "-", False),
}


_PRICES = ("TV / token", "NLL / token")  # beside relaxed rules


def columns(rows: Sequence[Row]) -> list[str]:
    """The titles of the columns that these rows fill."""
    return [title for title in COLUMNS if title not in _PRICES or any("nll" in row.get("quality", {}) for row in rows)]


def _table(title: str | None) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", style="cyan", overflow="fold")
    return table


def _figures(rows: Sequence[Row], caption: str | None = None, *, wide: bool) -> Table:
    table = _table(caption)
    shown = [title for title in columns(rows) if wide or COLUMNS[title][1]]
    for title in shown:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(name_of(row), *(COLUMNS[title][0](row) for title in shown))
    return table


def _by_task(rows: Sequence[Row], tasks: Sequence[str]) -> Table:
    table = _table("By task: tokens / s of plain decoding, and speedups")
    for task in tasks:
        table.add_column(escape(task), justify="right")
    for index, row in enumerate(rows):
        results = [row["tasks"].get(task) for task in tasks]
        key, form = ("tokens_per_second", ".1f") if index == 0 else ("speedup", ".2f")
        table.add_row(name_of(row), *(_number(result and result[key], form) for result in results))
    return table


def remarks(report: Mapping[str, Any]) -> list[Text]:
    """Notes on rows (a drafter was switched off, does not pay), wrong outputs, and skipped contenders."""
    lines = [Text(f"{name_of(row)}: {row['note']}") for row in report["rows"] if row.get("note")]
    lines += [Text(_fault(row), "red") for row in report["rows"] if row["wrong"]]
    lines += [Text(f"skipped {name}: {why}", "yellow") for name, why in report["skipped"].items()]
    return lines


def _fault(row: Row) -> str:
    return (
        f"{name_of(row)}: {row['wrong']:.0%} of outputs contain tokens that the target would not have chosen (up to "
        f"{row['quality']['worst_gap']:.2f} below the most likely token). This is a bug; please report it"
    )
