"""Drafters for continuous batching: one drafter per row, so that rows can enter and leave, and each row drafts what it
would draft alone.

Works with any drafter. Drafters that support such batches themselves (a draft model reads all rows in one pass) are
used directly. Independent of how drafts are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict, stack
from outrider.core.protocol import (
    BatchedDrafter,
    CrowdAwareDrafter,
    Drafter,
    LateDrafter,
    OverlappedDrafter,
    Prefill,
    Prompts,
    Scores,
    WeightFree,
    readings_of,
)
from outrider.core.rng import CounterRNG


class IndependentRows(WeightFree):
    """Base of drafters that support continuous batching: each row drafts from its own tokens, as it would alone."""

    _batched = False  # whether rows enter and leave

    def supports_batching(self) -> bool:
        return True

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        """Start with these rows."""

    def open(self, sampling: Sampling) -> None:
        self.begin(Prefill(), [], sampling)
        self._batched = True


def batches(drafter: Drafter) -> bool:
    """Whether the drafter supports continuous batching."""
    return isinstance(drafter, BatchedDrafter) and drafter.supports_batching()


def batched(make: Callable[[], Drafter]) -> BatchedDrafter:
    """A drafter for continuous batching: the one that `make` returns if it supports it, else a `PerRow`."""
    drafter = make()
    if isinstance(drafter, BatchedDrafter) and drafter.supports_batching():
        return drafter
    return per_row(make, drafter)


def per_row(make: Callable[[], Drafter], first: Drafter) -> PerRow:
    """One drafter per row, which drafts ahead of the target if `first`, the one for the first row, does."""
    if isinstance(first, LateDrafter):
        return LatePerRow(make, first)
    return (OverlappedPerRow if isinstance(first, OverlappedDrafter) else PerRow)(make, first)


class PerRow:
    """One drafter per row, made by `make`; `first`, if given, is used for the first row."""

    def __init__(self, make: Callable[[], Drafter], first: Drafter | None = None) -> None:
        self._make, first = make, first or make()
        self.vocabulary, self.needs, self.readings = first.vocabulary, first.needs, readings_of(first)
        self._spare: list[Drafter] = [first]
        self._rows: list[Drafter | None] = []
        self._drafts: list[Draft] = []
        self._read = 0  # bytes read by the drafters of rows that have left

    @property
    def bytes_read(self) -> int:
        return self._read + sum(drafter.bytes_read for drafter in self._rows if drafter is not None)

    def supports_batching(self) -> bool:
        return True

    def open(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._rows = []

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        """Start with all rows at once, as `decode` does."""
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
            if isinstance(drafter, CrowdAwareDrafter):
                drafter.set_crowd(crowd)
            self._drafts.append(drafter.propose(room[row : row + 1], rng.row(row)))
        return stack(self._drafts)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for row, (drafter, own) in enumerate(zip(self._rows, self._drafts, strict=True)):
            if drafter is not None and self._going[row]:
                drafter.observe(own, scores.row(row, own), verdict.row(row, own), rng.row(row))

    def end(self) -> None:
        for row in range(len(self._rows)):
            self.leave(row)
        self._rows, self._drafts = [], []


class OverlappedPerRow(PerRow):
    """The same of drafters that draft ahead: each open row prepares for the outcomes of its own draft."""

    def draft_ahead(self, draft: Draft) -> None:
        for row, (drafter, own) in enumerate(zip(self._rows, self._drafts, strict=True)):
            if isinstance(drafter, OverlappedDrafter) and self._going[row]:
                drafter.draft_ahead(own)


class LatePerRow(OverlappedPerRow):
    """The same of drafters whose late guess is verified too."""

    def late_guess(self) -> Draft | None:
        guesses = [
            drafter.late_guess() if isinstance(drafter, LateDrafter) and going else None
            for drafter, going in zip(self._rows, self._going, strict=True)
        ]
        known = next((guess for guess in guesses if guess is not None), None)
        if known is None:
            return None
        dead = replace(known, live=torch.zeros_like(known.live))
        return stack([dead if guess is None else guess for guess in guesses])
