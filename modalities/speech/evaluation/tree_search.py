"""The tree that is best for a drafter on speech, by measured acceptance: Medusa's construction (arXiv 2401.10774), each
level with a measure of its own, since a head that guesses farther ahead is right less often.

A wide tree is run over some sentences under an exact rule and it is counted which sibling of which level is accepted.
Knows traces and shapes; nothing of what tokens stand for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.drafters.tree_shapes import (
    AcceptanceCounter,
    Shape,
    best_choices,
    branching,
    depths,
    from_choices,
    ranks,
)
from outrider.core.errors import InvalidOption
from outrider.core.trace import Step
from outrider.speech.model import SpeechModel


@dataclass(frozen=True)
class Measured:
    """A tree, what it is predicted to give, and what that rests on."""

    shape: Shape  # to be given as a drafter's option `shape`
    tokens_per_pass: float
    acceptance: tuple[tuple[float, ...], ...]  # of each level, by place among siblings


def measured_tree(
    sp: SpeechModel,
    drafter: str,
    texts: Sequence[str],
    *,
    nodes: int = 24,
    wide: Sequence[int] = (6, 3, 2, 1),
    **options: Any,
) -> Measured:
    """The best tree of up to so many nodes. `wide` says how many siblings are tried on each level; `options` are those
    of a generation, such as the temperature: the tree is best for these."""
    if not texts:
        raise InvalidOption("there are no sentences to measure acceptance on")
    drafting: Mapping[str, Any] = {**options.pop("drafter_options", {}), "tree": branching(wide)}
    found = sp.generate(list(texts), drafter=drafter, drafter_options=drafting, **options)
    return best_tree((step for one in found for step in one.trace.steps), nodes)


def best_tree(steps: Iterable[Step], nodes: int) -> Measured:
    """The same from traces of such a tree."""
    levels: list[AcceptanceCounter] = []
    for step in steps:
        _count(levels, step)
    if not levels:
        raise InvalidOption("nothing was drafted, so there is no acceptance to go by")
    # where few tries have a later sibling ahead of an earlier one, that is noise: siblings come likeliest first
    acceptance = tuple(tuple(sorted(one.vector(), reverse=True)) for one in levels)
    choices = best_choices(acceptance, nodes)
    shape, _ = from_choices(choices)
    reach = dict[tuple[int, ...], float]({(): 1.0})
    for path in choices:
        reach[path] = reach[path[:-1]] * acceptance[len(path) - 1][path[-1]]
    return Measured(shape, sum(reach.values()), acceptance)


def _count(levels: list[AcceptanceCounter], step: Step) -> None:
    """Which sibling was accepted on each level that was reached."""
    deep, place = depths(step.parents), ranks(step.parents)
    above = -1
    for level in range(1 + max(deep, default=-1)):
        group = [node for node, parent in enumerate(step.parents) if parent == above and step.tried[node]]
        if not group:
            return
        if level == len(levels):
            levels.append(AcceptanceCounter())
        taken = step.path[level] if level < len(step.path) else None
        levels[level].add(None if taken is None else place[taken], 1 + max(place[node] for node in group))
        if taken is None:
            return
        above = taken
