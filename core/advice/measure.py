"""Measures what a round of decoding costs, by rows and tokens, all shapes in turn.

A round is the target pass with the rule and the bookkeeping around it, without the drafter's own work. Its guesses are
tokens of the prompts: a mixture of experts reads the experts that they need. Uses targets through the protocol only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.cost.break_even import Costs
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.protocol import Plain, Target
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact
from outrider.core.step_recorder import Record
from outrider.core.trace import Step
from outrider.core.tree import Tree

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 17, 24, 33)  # tokens per row of a pass
_MOST = 128  # tokens of all rows together
Shape = tuple[int, int]  # rows, tokens per row


@dataclass(frozen=True)
class RoundCosts:
    """Milliseconds of rounds, [rounds, shapes]; every line has one measurement of each shape, taken in turn."""

    shapes: tuple[Shape, ...]
    samples: NDArray[np.float64]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(sorted({rows for rows, _ in self.shapes}))

    def costs(self, picked: NDArray[np.int64] | None = None) -> Costs:
        """The costs: the median of all lines, or of those that are picked (for a bootstrap)."""
        lines = self.samples if picked is None else self.samples[picked]
        return Costs(dict(zip(self.shapes, np.median(lines, 0).tolist(), strict=True)))

    def to_dict(self) -> dict[str, float]:
        middle = np.median(self.samples, 0)
        return {f"{rows}x{tokens}": float(ms) for (rows, tokens), ms in zip(self.shapes, middle, strict=True)}

    @classmethod
    def of(cls, costs: Mapping[Shape, float]) -> RoundCosts:
        """Costs that are known exactly."""
        return cls(tuple(costs), np.array([list(costs.values())]))


class _Filler(Plain):
    """Drafts `wanted` tokens of a text in every row."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts, self.wanted, self._round = texts, 0, 0

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        self._round += 1
        if not self.wanted:
            return Draft.empty(len(room), rng.device)
        rows = [
            [text[(self._round * 7 + place) % len(text)] for place in range(self.wanted)]
            for text in (self.texts[row % len(self.texts)] for row in range(len(room)))
        ]
        tokens = torch.tensor(rows, device=rng.device)
        return Draft.guess(tokens, Tree.chain(self.wanted, rng.device), torch.ones_like(tokens, dtype=torch.bool))


def measure(
    target: Callable[[], Target],
    prompts: Sequence[Sequence[int]],
    *,
    sizes: Sequence[int] = (1,),
    widths: Sequence[int] = WIDTHS,
    rounds: int = 9,
    progress: Callable[[], None] = lambda: None,
) -> RoundCosts:
    """Measure rounds of `sizes` rows and of `widths` tokens per row after these prompts; the first round warms up."""
    shapes = [(rows, width) for rows in sizes for width in widths if rows * width <= _MOST or width <= 2]
    limit = 8 + (rounds + 1) * sum(max(width, 1) + 1 for _, width in shapes)
    running: dict[int, tuple[_Filler, Iterator[Step]]] = {}
    lines = np.zeros((rounds, len(shapes)))
    try:
        for rows in sizes:
            chosen = [list(prompts[row % len(prompts)]) for row in range(rows)]
            filler = _Filler(prompts)
            steps = decode(
                target(),
                filler,
                Exact(),
                chosen,
                sampling=Sampling(temperature=0),
                max_new_tokens=limit,
                record=Record(nodes=False),
            )
            for _ in range(rows):  # reads the prompts
                next(steps)
            running[rows] = filler, steps
        for number in range(rounds + 1):
            for place, (rows, width) in enumerate(shapes):
                filler, steps = running[rows]
                filler.wanted = width - 1
                start = time.perf_counter()
                for _ in range(rows):
                    next(steps)
                if number:
                    lines[number - 1, place] = 1e3 * (time.perf_counter() - start)
            progress()
    finally:
        running.clear()  # frees the caches
    return RoundCosts(tuple(shapes), lines)
