"""A drafter for each row, so that rows may come and go: what a row drafts is what it would draft alone.

Any drafter will do, as often as there are rows. Those that can have rows come and go by themselves, such as a draft
model that reads them all in one pass, are left to it. Knows drafters, drafts and verdicts; nothing of what drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict, beside
from outrider.core.protocol import Drafter, Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG


class Joined(Drafter, Protocol):
    """A drafter whose rows come and go, as the target's do (outrider.core.protocol.BatchedTarget)."""

    def open(self, sampling: Sampling) -> None: ...
    def arrange(self, order: Sequence[int], width: int) -> None: ...
    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None: ...
    def leave(self, row: int) -> None: ...


class Apart:
    """Has rows come and go by itself: each drafts as it would alone, from nobody else's output."""

    _alone = False

    def joins(self) -> bool:
        return True

    def open(self, sampling: Sampling) -> None:
        self.begin(Prefill(), [], sampling)  # type: ignore[attr-defined]
        self._alone = True


def joins(drafter: Drafter) -> bool:
    """Can it have rows come and go by itself?"""
    able = getattr(drafter, "joins", None)
    return able is not None and bool(able())


def joined(make: Callable[[], Drafter]) -> Joined:
    """The drafter itself where it can have rows come and go, else one for each row."""
    made = make()
    return made if joins(made) else PerRow(make, made)  # type: ignore[return-value]


class PerRow:
    """One drafter a row. `first` is one made already, whose needs are everybody's."""

    def __init__(self, make: Callable[[], Drafter], first: Drafter | None = None) -> None:
        self._make, first = make, first or make()
        self.vocabulary, self.needs = first.vocabulary, first.needs
        self._spare: list[Drafter] = [first]
        self._rows: list[Drafter | None] = []
        self._drafts: list[Draft] = []
        self._read = 0  # by those that are gone

    @property
    def bytes_read(self) -> int:
        return self._read + sum(one.bytes_read for one in self._rows if one is not None)

    def open(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._rows = []

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        """All rows at once, as `decode` begins."""
        self.open(sampling)
        self._rows = [None] * len(prompts)
        for row, prompt in enumerate(prompts):
            hidden = {tap: states[row : row + 1, : len(prompt) - 1] for tap, states in prefill.hidden.items()}
            self.enter(row, Prefill(hidden), prompt)

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._rows = [self._rows[row] if row >= 0 else None for row in order]

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        drafter = self._spare.pop() if self._spare else self._make()
        self._rows[row] = drafter
        drafter.begin(prefill, [prompt], self._sampling)

    def leave(self, row: int) -> None:
        drafter, self._rows[row] = self._rows[row], None
        if drafter is not None:
            self._read += drafter.bytes_read
            drafter.end()

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        self._going = (room >= 0).tolist()
        crowd = sum(self._going)
        self._drafts = []
        for row, drafter in enumerate(self._rows):
            if drafter is None or not self._going[row]:
                self._drafts.append(Draft.empty(1, rng.device))
                continue
            if (share := getattr(drafter, "share", None)) is not None:
                share(crowd)
            self._drafts.append(drafter.propose(room[row : row + 1], rng.row(row)))
        return beside(self._drafts)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for row, (drafter, own) in enumerate(zip(self._rows, self._drafts, strict=True)):
            if drafter is not None and self._going[row]:
                drafter.observe(own, scores.row(row, own), verdict.row(row, own), rng.row(row))

    def end(self) -> None:
        for row in range(len(self._rows)):
            self.leave(row)
        self._rows, self._drafts = [], []
