"""Finds the best draft tree for a drafter on speech from measured acceptance rates, by Medusa's construction (arXiv
2401.10774). Ours measures each level of the tree separately, because heads are less accurate the further they predict.

A wide tree is run on sample sentences under an exact rule, and the accepted sibling of each level is counted.
Independent of what tokens mean.
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
class MeasuredTree:
    """A tree, its predicted tokens per target pass, and the acceptance rates that predict them."""

    shape: Shape  # for a drafter's option `shape`
    tokens_per_pass: float
    acceptance: tuple[tuple[float, ...], ...]  # by level and rank among siblings


def measured_tree(
    sp: SpeechModel,
    drafter: str,
    texts: Sequence[str],
    *,
    nodes: int = 24,
    wide: Sequence[int] = (6, 3, 2, 1),
    **options: Any,
) -> MeasuredTree:
    """The best tree of up to `nodes` nodes. `wide` is the number of siblings tried on each level; `options` are those
    of a generation, such as the temperature, for which the tree is best."""
    if not texts:
        raise InvalidOption("there are no sentences to measure acceptance on; give at least one")
    drafting: Mapping[str, Any] = {**options.pop("drafter_options", {}), "tree": branching(wide)}
    results = sp.generate(list(texts), drafter=drafter, drafter_options=drafting, **options)
    return best_tree((step for result in results for step in result.trace.steps), nodes)


def best_tree(steps: Iterable[Step], nodes: int) -> MeasuredTree:
    """The best tree by the acceptance rates of the steps of a wide tree."""
    levels: list[AcceptanceCounter] = []
    for step in steps:
        _count(levels, step)
    if not levels:
        raise InvalidOption("nothing was drafted, so there is no acceptance to measure; use a drafter that grows trees")
    # siblings are ordered by probability, so rates that increase with rank are noise
    acceptance = tuple(tuple(sorted(level.vector(), reverse=True)) for level in levels)
    choices = best_choices(acceptance, nodes)
    shape, _ = from_choices(choices)
    reach = dict[tuple[int, ...], float]({(): 1.0})
    for path in choices:
        reach[path] = reach[path[:-1]] * acceptance[len(path) - 1][path[-1]]
    return MeasuredTree(shape, sum(reach.values()), acceptance)


def _count(levels: list[AcceptanceCounter], step: Step) -> None:
    """Count which sibling was accepted on each level that the step reached."""
    rank, parent = ranks(step.parents), -1
    for level in range(1 + max(depths(step.parents), default=-1)):
        group = [node for node, above in enumerate(step.parents) if above == parent and step.tried[node]]
        if not group:
            return
        if level == len(levels):
            levels.append(AcceptanceCounter())
        accepted = step.path[level] if level < len(step.path) else None
        levels[level].add(None if accepted is None else rank[accepted], 1 + max(rank[node] for node in group))
        if accepted is None:
            return
        parent = accepted
