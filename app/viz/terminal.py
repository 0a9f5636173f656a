"""Steps, drafts and summaries drawn in a terminal of any width, with colour or without.

Knows traces and rich; nothing of models, nor what a token means: who calls says what a token is to be called.
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

from outrider.app.viz.token_styles import LOOKS, Kind, told
from outrider.core.trace import Step, Summary, Times

Name = Callable[[int], str]  # of a token, the same width for all
NARROW = 60  # columns; below, numbers go without their names
_BAR, _NARROW_BAR = 16, 10


def mark(token: str, kind: Kind) -> Text:
    look = LOOKS[kind]
    return Text.assemble((look.mark, look.style.replace(" strike", "")), (token, look.style))


def legend(example: str, kinds: Iterable[Kind] = LOOKS) -> Table:
    """What the marks mean."""
    grid = Table.grid(padding=(0, 2))
    for kind in kinds:
        grid.add_row(mark(example, kind), LOOKS[kind].words)
    return grid


def stream(console: Console, steps: Iterable[Step], name: Name, pause: float = 0.0) -> list[Step]:
    """Print the tokens of one row as they come, waiting a little behind each call of the target."""
    seen: list[Step] = []
    across = max((console.width - 1) // (len(name(0)) + 2), 1)
    column = 0
    for step in steps:
        seen.append(step)
        line = Text(end="")
        for token, kind in told(step):
            line.append("\n" if column and column % across == 0 else "")
            line.append_text(mark(name(token), kind)).append(" ")
            column += 1
        console.print(line, end="", soft_wrap=True)
        time.sleep(pause)
    console.print()
    return seen


def draft_tree(step: Step, root: int, name: Name, *, narrow: bool = False) -> Tree:
    """A step's draft behind the last token before it: the accepted path, what was rejected, what was never reached."""
    drawn = Tree(Text(name(root), style="bold"), guide_style="dim")
    kids: dict[int, list[int]] = {}
    for node, parent in enumerate(step.parents):
        kids.setdefault(parent, []).append(node)

    def below(node: int) -> int:
        return sum(1 + below(kid) for kid in kids.get(node, ()))

    def grow(branch: Tree, node: int, level: int) -> None:
        missed = 0
        for kid in kids.get(node, ()):
            if kid not in step.path and not step.tried[kid]:
                missed += 1 + below(kid)
                continue
            kind: Kind = step.sources[level] if kid in step.path else "rejected"
            label = mark(name(step.drafted[kid]), kind).append_text(_numbers(step, kid, narrow))
            grow(branch.add(label), kid, level + 1)
        if missed:
            branch.add(Text(f"({missed} not tried)", style="dim"))
        if level == len(step.path) < len(step.emitted) and (not step.path or node == step.path[-1]):
            branch.add(mark(name(step.emitted[-1]), step.sources[-1]))

    grow(drawn, -1, 0)
    return drawn


def _numbers(step: Step, node: int, narrow: bool) -> Text:
    if not step.p:
        return Text("")
    p, q, chance = step.p[node], step.q[node], step.chance[node]
    drawn = " fix" if step.fixed[node] else f"{q:4.2f}"
    if narrow:
        return Text(f" {p:4.2f} {drawn} {chance:4.2f}")
    return Text.assemble(("  p ", "dim"), f"{p:4.2f}", ("  q ", "dim"), drawn, ("  chance ", "dim"), f"{chance:4.2f}")


def comparison(columns: Mapping[str, Summary]) -> Table:
    """Generations side by side."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right")
    every = columns.values()
    rows: dict[str, Callable[[Summary], str]] = {
        "tokens": lambda one: f"{one.tokens}",
        "calls of the target": lambda one: f"{one.target_passes}",
        "tokens per call": lambda one: f"{one.tokens_per_pass:.2f}",
    }
    if any(one.equivalents_per_token * one.tokens != one.target_passes for one in every):
        rows["passes per token, by bytes read"] = lambda one: f"{one.equivalents_per_token:.2f}"
    rows["accepted of drafted"] = lambda one: f"{one.accepted} of {one.drafted}" if one.drafted else "-"
    rows["acceptance rate"] = lambda one: f"{one.acceptance_rate:.0%}" if one.drafted else "-"
    rows["time"] = lambda one: f"{1e3 * one.seconds:.0f} ms"
    for title, value in rows.items():
        table.add_row(title, *(value(one) for one in every))
    return table


def acceptance(summary: Summary, *, narrow: bool = False, ascii_only: bool = False) -> Columns:
    """How many guesses a call accepted, and how often each position was: two small charts."""
    wide = _NARROW_BAR if narrow else _BAR
    full, most = "#" if ascii_only else "█", max(summary.histogram, default=1)
    counts = Table(box=None, pad_edge=False, title="accepted a call", title_justify="left", show_header=False)
    for accepted, calls in enumerate(summary.histogram):
        counts.add_row(f"{accepted}", Text(full * round(wide * calls / most), style="green"), f"{calls}")
    places = Table(box=None, pad_edge=False, title="accepted, by position", title_justify="left", show_header=False)
    for place, (share, reached) in enumerate(zip(summary.by_position, summary.conditional, strict=True), 1):
        bar = Text(full * round(wide * share), style="green")
        places.add_row(f"{place}", bar, f"{share:.0%}", Text(f"{reached:.0%} if reached", style="dim"))
    return Columns([counts, places], padding=(0, 6))


def time_split(times: Times) -> Text:
    total = times.total or 1.0
    shares = [f"{part.name} {getattr(times, part.name) / total:.0%}" for part in fields(times)]
    return Text("Time: " + ", ".join(shares))


def total_variation(steps: Iterable[Step]) -> Text:
    """What a relaxed rule cost: total variation of each token's distribution from the target's."""
    paid = [one for step in steps for one in (step.total_variation or [0.0] * len(step.emitted))]
    mean, most = sum(paid) / max(len(paid), 1), max(paid, default=0.0)
    return Text.assemble(
        ("Price: ", "bold yellow"),
        f"{mean:.3f} a token on average, {most:.3f} at most, {sum(paid):.2f} in all ",
        ("(total variation between the distribution of what came out and the target's own distribution)", "dim"),
    )


def report(console: Console, columns: Mapping[str, Summary]) -> None:
    """The summary of the last of several generations, beside the others."""
    *_, last = columns.values()
    parts: list[RenderableType] = [comparison(columns)]
    if last.drafted:
        parts += [acceptance(last, narrow=console.width < NARROW, ascii_only=console.options.ascii_only), ""]
    for part in [*parts, time_split(last.times)]:
        console.print(part)
