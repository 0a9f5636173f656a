"""Steps, drafts and summaries in a terminal of any width, with or without colour.

The text of a token is given by the caller. Independent of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from outrider.app.viz.token_styles import STYLES, Kind, tokens_of
from outrider.core.trace import Step, Summary, Times

Name = Callable[[int], str]  # the text of a token, of the same width for all
NARROW = 60  # columns; narrower terminals show numbers without their names
_BAR, _NARROW_BAR = 16, 10


def mark(token: str, kind: Kind) -> Text:
    """A token with the mark and the style of its kind."""
    style = STYLES[kind]
    return Text.assemble((style.mark, style.style.replace(" strike", "")), (token, style.style))


def legend(example: str, kinds: Iterable[Kind] = STYLES) -> Table:
    """The kinds of tokens with their marks and descriptions."""
    grid = Table.grid(padding=(0, 2))
    for kind in kinds:
        grid.add_row(mark(example, kind), STYLES[kind].description)
    return grid


def stream(console: Console, steps: Iterable[Step], name: Name, pause: float = 0.0) -> list[Step]:
    """Print the tokens of one batch row as they arrive, pausing after each target pass; returns the steps."""
    seen: list[Step] = []
    across = max((console.width - 1) // (len(name(0)) + 2), 1)
    column = 0
    for step in steps:
        seen.append(step)
        line = Text(end="")
        for token, kind in tokens_of(step):
            line.append("\n" if column and column % across == 0 else "")
            line.append_text(mark(name(token), kind)).append(" ")
            column += 1
        console.print(line, end="", soft_wrap=True)
        time.sleep(pause)
    console.print()
    return seen


def draft_tree(step: Step, root: int, name: Name, *, narrow: bool = False) -> Tree:
    """A step's draft as a tree below the token before it: accepted and rejected nodes, and the number not tried."""
    tree = Tree(Text(name(root), style="bold"), guide_style="dim")
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(step.parents):
        children.setdefault(parent, []).append(node)

    def descendants(node: int) -> int:
        return sum(1 + descendants(child) for child in children.get(node, ()))

    def grow(branch: Tree, node: int, level: int) -> None:
        untried = 0
        for child in children.get(node, ()):
            if child not in step.path and not step.tried[child]:
                untried += 1 + descendants(child)
                continue
            kind: Kind = step.sources[level] if child in step.path else "rejected"
            label = mark(name(step.drafted[child]), kind).append_text(_numbers(step, child, narrow))
            grow(branch.add(label), child, level + 1)
        if untried:
            branch.add(Text(f"({untried} not tried)", style="dim"))
        if level == len(step.path) < len(step.emitted) and (not step.path or node == step.path[-1]):
            branch.add(mark(name(step.emitted[-1]), step.sources[-1]))

    grow(tree, -1, 0)
    return tree


def _numbers(step: Step, node: int, narrow: bool) -> Text:
    if not step.p:
        return Text("")
    p, probability = f"{step.p[node]:4.2f}", f"{step.chance[node]:4.2f}"
    q = " fix" if step.fixed[node] else f"{step.q[node]:4.2f}"
    if narrow:
        return Text(f" {p} {q} {probability}")
    return Text.assemble(("  p ", "dim"), p, ("  q ", "dim"), q, ("  accept ", "dim"), probability)


def comparison(columns: Mapping[str, Summary]) -> Table:
    """A table that compares the summaries of several generations."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right")
    summaries = columns.values()
    rows: dict[str, Callable[[Summary], str]] = {
        "tokens": lambda summary: f"{summary.tokens}",
        "target passes": lambda summary: f"{summary.target_passes}",
        "tokens per pass": lambda summary: f"{summary.tokens_per_pass:.2f}",
    }
    if any(summary.equivalents_per_token * summary.tokens != summary.target_passes for summary in summaries):
        rows["passes per token, by bytes read"] = lambda summary: f"{summary.equivalents_per_token:.2f}"
    rows["accepted of drafted"] = lambda s: f"{s.accepted} of {s.drafted}" if s.drafted else "-"
    rows["acceptance rate"] = lambda s: f"{s.acceptance_rate:.0%}" if s.drafted else "-"
    rows["time"] = lambda summary: f"{1e3 * summary.seconds:.0f} ms"
    for title, cell in rows.items():
        table.add_row(title, *(cell(summary) for summary in summaries))
    return table


def acceptance(summary: Summary, *, narrow: bool = False, ascii_only: bool = False) -> Columns:
    """Two small charts: accepted tokens per target pass, and acceptance by position."""
    width = _NARROW_BAR if narrow else _BAR
    block, top = "#" if ascii_only else "█", max(summary.histogram, default=1)
    counts = Table(box=None, pad_edge=False, title="accepted per pass", title_justify="left", show_header=False)
    for accepted, passes in enumerate(summary.histogram):
        counts.add_row(f"{accepted}", Text(block * round(width * passes / top), style="green"), f"{passes}")
    positions = Table(box=None, pad_edge=False, title="accepted, by position", title_justify="left", show_header=False)
    for position, (share, reached) in enumerate(zip(summary.by_position, summary.conditional, strict=True), 1):
        bar = Text(block * round(width * share), style="green")
        positions.add_row(f"{position}", bar, f"{share:.0%}", Text(f"{reached:.0%} if reached", style="dim"))
    return Columns([counts, positions], padding=(0, 6))


def time_split(times: Times) -> Text:
    total = times.total or 1.0
    shares = [f"{part.name} {getattr(times, part.name) / total:.0%}" for part in fields(times)]
    return Text("Time: " + ", ".join(shares))


def total_variation(steps: Iterable[Step]) -> Text:
    """The total variation between the output's distribution and the target's, under a relaxed rule."""
    values = [value for step in steps for value in (step.total_variation or [0.0] * len(step.emitted))]
    mean, largest = sum(values) / max(len(values), 1), max(values, default=0.0)
    return Text.assemble(
        ("Total variation: ", "bold yellow"),
        f"{mean:.3f} per token on average, {largest:.3f} at most, {sum(values):.2f} in total ",
        ("(between the distribution of the output and the target's)", "dim"),
    )


def report(console: Console, columns: Mapping[str, Summary]) -> None:
    """Print a comparison of several generations, and the charts of the last one."""
    *_, last = columns.values()
    parts: list[RenderableType] = [comparison(columns)]
    if last.drafted:
        parts += [acceptance(last, narrow=console.width < NARROW, ascii_only=console.options.ascii_only), ""]
    for part in [*parts, time_split(last.times)]:
        console.print(part)
