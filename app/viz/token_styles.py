"""How drafted, relaxed, rejected, resampled and bonus tokens look in a terminal, on the page and in figures.

Kinds differ by mark and line as well as by colour. The colours are those of Okabe and Ito's colour-blind-safe palette.
Draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from outrider.core.trace import Source, Step

Kind = Source | Literal["rejected"]


@dataclass(frozen=True)
class TokenStyle:
    """The appearance of a kind of token."""

    mark: str
    style: str  # of rich, in a terminal
    description: str
    colour: str = "#808080"  # readable on light and dark backgrounds
    line: str = "none"  # CSS text-decoration


STYLES: dict[Kind, TokenStyle] = {
    "drafted": TokenStyle(" ", "green", "drafted and accepted", "#009E73", "underline solid 2px"),
    "rejected": TokenStyle("x", "red strike", "drafted and rejected", "#D55E00", "line-through solid 2px"),
    "resampled": TokenStyle(
        "*", "bold magenta", "chosen by the target after a rejection", "#CC79A7", "underline double 1px"
    ),
    "bonus": TokenStyle(
        "+", "bold cyan", "chosen by the target after the accepted draft", "#56B4E9", "underline dotted 2px"
    ),
    "relaxed": TokenStyle(
        "~", "italic yellow", "drafted, accepted only because the rule is relaxed", "#E69F00", "underline wavy 1.5px"
    ),
}
_SIBLINGS = 32  # at most so many rejected tokens are shown at one position
UNTRIED = "#9A9A9A"  # draft nodes that the rule did not reach
TIME_COLOURS = {"draft": "#0072B2", "score": "#009E73", "rule": "#E69F00", "rest": "#9A9A9A"}  # parts of a step's time
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # colours of several curves


def tokens_of(step: Step) -> Iterator[tuple[int, Kind]]:
    """The tokens of a step in order with their kinds; rejected ones come before the token committed in their place."""
    for kind, token, _, _ in nodes_of(step):
        yield token, kind


def nodes_of(step: Step) -> Iterator[tuple[Kind, int, int | None, int | None]]:
    """The same as (kind, token, node of the draft, index among the committed tokens); None where there is none."""
    tried: dict[int, list[int]] = {}
    for node, parent in enumerate(step.parents):
        if step.tried[node]:
            tried.setdefault(parent, []).append(node)
    for level, (token, source) in enumerate(zip(step.emitted, step.sources, strict=True)):
        accepted = step.path[level] if level < len(step.path) else None
        if level <= len(step.path):  # some engines report more committed tokens than accepted nodes
            previous = step.path[level - 1] if level else -1
            for node in tried.get(previous, [])[:_SIBLINGS]:
                if node != accepted:
                    yield "rejected", step.drafted[node], node, None
        yield source, token, accepted, level
