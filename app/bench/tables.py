"""What was measured, as tables for a terminal. Knows the report's JSON and rich; nothing of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outrider.app.options import file_size

Row = Mapping[str, Any]
Cell = str | Text
_WIDE = 100  # columns of the terminal; below, what matters least is left out


def name_of(row: Row) -> str:
    drafter = str(row["drafter"])
    return drafter if row["engine"] == "outrider" else f"{row['engine']} {drafter}"


def draw(console: Console, report: Mapping[str, Any]) -> None:
    """All tables, and what has to be said about them."""
    asked, rows = report["settings"], [*report["rows"], *report["peers"]]
    console.print(Text(_headline(report), style="bold"))
    console.print(_figures(rows, wide=console.width >= _WIDE))
    looping = asked.get("looping", [])
    without = [{**row, **part} for row in rows if (part := row["without_looping"])]
    if looping and without:
        title = (
            f"Without the {len(looping)} of {asked['prompts']} prompts on which plain decoding goes round in circles"
        )
        console.print(_figures(without, title, wide=console.width >= _WIDE))
    tasks = sorted({task for row in report["rows"] for task in row["tasks"]})
    if len(tasks) > 1:
        console.print(_by_task(rows, tasks))
    for line in remarks(report):
        console.print(line, soft_wrap=True)


def _headline(report: Mapping[str, Any]) -> str:
    asked = report["settings"]
    prompts = f"{asked['prompts']} prompts"
    if asked["prompts"] < asked["prompts_wanted"]:
        prompts = f"{asked['prompts']} of {asked['prompts_wanted']} prompts"
    threads = report["machine"].get("threads", "?")
    where = asked["device"] if asked["device"] != "cpu" else f"{threads} threads"
    sampled = "greedy" if asked["temperature"] == 0 else f"temperature {asked['temperature']:g}"
    return f"{asked['model']}, {asked['dtype']}, {where}; {prompts}, up to {asked['max_new_tokens']} tokens, {sampled}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _speedup(row: Row) -> Cell:
    if row["speedup"] is None:
        return "-"
    style = "green" if row["speedup_low"] > 1 else "red" if row["speedup_high"] < 1 else ""
    return Text(f"{row['speedup']:.2f} ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})", style)


def same(row: Row) -> Cell:
    """How many outputs equal plain's; near-ties and faults apart."""
    if row["identical"] is None:
        return "-"
    said = Text(f"{row['identical']:.0%}")
    if row["near_ties"]:
        said.append(f" +{row['near_ties']:.0%} ties")
    if row["wrong"]:
        said.append(f" {row['wrong']:.0%} WRONG", "bold red")
    return said


COLUMNS: dict[str, tuple[Callable[[Row], Cell], bool]] = {  # title -> (what is in it, shown on narrow terminals too)
    "tok/s": (lambda row: _number(row["tokens_per_second"], ".1f"), True),
    "quartiles": (lambda row: f"{row['tokens_per_second_low']:.0f}-{row['tokens_per_second_high']:.0f}", False),
    "speedup (95 %)": (_speedup, True),
    "decoding": (lambda row: _number(row.get("decode_speedup"), ".2f"), False),  # reports of before lack it
    "tok/call": (lambda row: _number(row["tokens_per_pass"], ".2f"), True),
    "accepted": (lambda row: _number(row["acceptance_rate"], ".0%"), True),
    "passes/tok": (lambda row: _number(row["equivalents_per_token"], ".2f"), False),
    "same output": (same, True),
    "memory": (lambda row: file_size(row["memory"]) if row["memory"] else "-", False),
}


def _table(title: str | None) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", style="cyan", overflow="fold")
    return table


def _figures(rows: Sequence[Row], title: str | None = None, *, wide: bool) -> Table:
    table = _table(title)
    shown = [(head, cell) for head, (cell, always) in COLUMNS.items() if wide or always]
    for head, _ in shown:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(name_of(row), *(cell(row) for _, cell in shown))
    return table


def _by_task(rows: Sequence[Row], tasks: Sequence[str]) -> Table:
    table = _table("By task: tokens a second of plain decoding, and how many times that")
    for task in tasks:
        table.add_column(escape(task), justify="right")
    for place, row in enumerate(rows):
        found = [row["tasks"].get(task) for task in tasks]
        key, form = ("tokens_per_second", ".1f") if place == 0 else ("speedup", ".2f")
        table.add_row(name_of(row), *(_number(part and part[key], form) for part in found))
    return table


def remarks(report: Mapping[str, Any]) -> list[Text]:
    """What is switched off, what doesn't pay, what is wrong, what was left out."""
    lines = [Text(f"{name_of(row)}: {row['note']}") for row in report["rows"] if row.get("note")]
    lines += [Text(_fault(row), "red") for row in report["rows"] if row["wrong"]]
    lines += [Text(f"skipped {name}: {why}", "yellow") for name, why in report["skipped"].items()]
    return lines


def _fault(row: Row) -> str:
    return (
        f"{name_of(row)}: {row['wrong']:.0%} of outputs hold tokens that the target would not have chosen "
        f"(up to {row['quality']['worst_gap']:.2f} below the likeliest): that is a fault, please report it"
    )
