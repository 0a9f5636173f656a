"""The visual language, in one place: how drafted, relaxed, rejected, resampled and bonus tokens look, in a terminal, on
a page and in a figure. A kind is never told by colour alone: each has a mark and a line of its own as well.

Colours are of Okabe and Ito's palette, which people who see few colours tell apart. Knows steps, nothing of drawing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from outrider.core.trace import Source, Step

Kind = Source | Literal["rejected"]


@dataclass(frozen=True)
class TokenStyle:
    """How a kind of token is told from the others: by a mark as well as by a colour."""

    mark: str
    style: str  # in a terminal
    words: str
    colour: str = "#808080"  # of a shape, on light and on dark
    line: str = "none"  # under or through a word: CSS's text-decoration


LOOKS: dict[Kind, TokenStyle] = {
    "drafted": TokenStyle(" ", "green", "drafted, and accepted by the target", "#009E73", "underline solid 2px"),
    "rejected": TokenStyle(
        "x", "red strike", "drafted in this place, and rejected", "#D55E00", "line-through solid 2px"
    ),
    "resampled": TokenStyle(
        "*", "bold magenta", "the target's own, in place of what it rejected", "#CC79A7", "underline double 1px"
    ),
    "bonus": TokenStyle(
        "+", "bold cyan", "the target's own, behind a draft accepted whole, or none", "#56B4E9", "underline dotted 2px"
    ),
    "relaxed": TokenStyle(
        "~",
        "italic yellow",
        "drafted, and accepted only because the rule is relaxed",
        "#E69F00",
        "underline wavy 1.5px",
    ),
}
UNTRIED = "#9A9A9A"
PARTS = {"draft": "#0072B2", "score": "#009E73", "rule": "#E69F00", "rest": "#9A9A9A"}  # of a step's time
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # of several curves


def told(step: Step) -> Iterator[tuple[int, Kind]]:
    """The tokens of a step in order, each behind the guesses that were rejected in its place."""
    for kind, token, _, _ in placed(step):
        yield token, kind


def placed(step: Step) -> Iterator[tuple[Kind, int, int | None, int | None]]:
    """The same with kind, token, the draft's node it stands for, and its place among those committed."""
    for level, (token, source) in enumerate(zip(step.emitted, step.sources, strict=True)):
        above = step.path[level - 1] if level else -1
        accepted = step.path[level] if level < len(step.path) else None
        for node, parent in enumerate(step.parents):
            if parent == above and step.tried[node] and node != accepted:
                yield "rejected", step.drafted[node], node, None
        yield source, token, accepted, level
