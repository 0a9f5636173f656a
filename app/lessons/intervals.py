"""Intervals of the figures that lessons print: 95 % bootstraps over prompts, pictures or sentences.

Independent of models; a conclusion of a lesson names the interval that supports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.core.trace import Step, Trace

_DRAWS = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    def __format__(self, form: str) -> str:
        if not form:
            return str(self)
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"

    def above(self, base: float) -> bool:
        """Whether the whole interval is above a value."""
        return self.low > base

    def below(self, base: float) -> bool:
        return self.high < base

    def than(self, base: float, more: str, less: str, unclear: str) -> str:
        """One of three statements: the interval is above `base`, below it, or contains it."""
        return more if self.above(base) else less if self.below(base) else unclear


def mean(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean of values, one for each prompt.

    >>> str(mean([1.0, 1.0, 1.0]))
    '1.00 (1.00 to 1.00)'
    """
    return ratio(values, [1.0] * len(values), seed)


def difference(after: Sequence[float], before: Sequence[float], seed: int = 0) -> Interval:
    """The mean of paired differences, such as the errors of the same sentences under two rules.

    >>> difference([2.0, 3.0], [1.0, 2.0]).above(0)
    True
    """
    return mean([a - b for a, b in zip(after, before, strict=True)], seed)


def ratio(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval:
    """A ratio of sums, such as all tokens over all target passes, with a pair of numbers for each prompt.

    >>> ratio([4.0, 8.0], [2.0, 4.0]).value
    2.0
    """
    pairs = np.array([above, below], dtype=float)  # [2, prompts]
    if pairs.shape[1] == 0:
        raise ValueError("there are no values")
    picked = np.random.default_rng(seed).integers(pairs.shape[1], size=(_DRAWS, pairs.shape[1]))
    sums = pairs[:, picked].sum(-1)  # [2, draws]
    low, high = np.quantile(sums[0] / sums[1], (0.025, 0.975))
    return Interval(float(pairs[0].sum() / pairs[1].sum()), float(low), float(high))


def median(values: Sequence[float], seed: int = 0) -> Interval:
    """The median of repeated timings. Other programs make single ones far too long, which a mean would follow.

    >>> median([1.0, 1.0, 9.0]).value
    1.0
    """
    return median_ratio(values, [1.0] * len(values), seed)


def median_ratio(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval:
    """The median of paired ratios, such as the seconds of two passes that were timed in turns.

    >>> median_ratio([2.0, 3.0, 90.0], [1.0, 1.5, 3.0]).value
    2.0
    """
    ratios = np.array([a / b for a, b in zip(above, below, strict=True)])
    if not len(ratios):
        raise ValueError("there are no values")
    picked = np.random.default_rng(seed).integers(len(ratios), size=(_DRAWS, len(ratios)))
    low, high = np.quantile(np.median(ratios[picked], 1), (0.025, 0.975))
    return Interval(float(np.median(ratios)), float(low), float(high))


def tokens_per_pass(outputs: Iterable[Any]) -> Interval:
    """Tokens per target pass of several results, or of the rows of one batch's trace."""
    rows = [row for output in outputs for row in _rows(output)]
    return ratio([sum(len(step.emitted) for step in row) for row in rows], [len(row) for row in rows])


def by_prompt(outputs: Iterable[Any]) -> list[float]:
    """Tokens per target pass of each result or row, for paired differences."""
    rows = [row for output in outputs for row in _rows(output)]
    return [sum(len(step.emitted) for step in row) / len(row) for row in rows]


def equivalents_per_token(outputs: Iterable[Any]) -> Interval:
    """Target-equivalents per token: the passes of all models, weighted by the bytes of weights that they read."""
    rows = [row for output in outputs for row in _rows(output)]
    return ratio([sum(step.cost for step in row) for row in rows], [sum(len(s.emitted) for s in row) for row in rows])


def accepted(outputs: Iterable[Any]) -> Interval:
    """The share of the first guesses of drafts that are accepted."""
    firsts = [[bool(step.path) for step in row if step.drafted] for output in outputs for row in _rows(output)]
    firsts = [row for row in firsts if row]
    return ratio([sum(row) for row in firsts], [len(row) for row in firsts])


def _rows(output: Any) -> list[list[Step]]:
    """The steps of each row, of a trace or of a result with one."""
    trace: Trace = output if isinstance(output, Trace) else output.trace
    rows: dict[int, list[Step]] = {}
    for step in trace.steps:
        rows.setdefault(step.row, []).append(step)
    return list(rows.values())
