"""Predicted speed of a drafter at a draft length and a batch size, from passes and measured costs, with an interval.

Tokens and drafts per pass come from the record of the user's own prompts, costs from this machine. All rows of a batch
are as wide as the widest draft among them. The interval is a bootstrap over prompts and over the measurements of the
costs. Independent of models and of how anything was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outrider.core.advice.measure import RoundCosts
from outrider.core.advice.replay import Attempt, Pass, as_recorded, replay
from outrider.core.cost.break_even import Costs
from outrider.core.errors import InvalidOption

_DRAWS = 400
_SEED = 0
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class DraftCost:
    """Milliseconds of a drafter's own work in a round, by rows and draft length; interpolated between lengths. With
    more rows than were measured it grows in proportion to them, which is the most it can be."""

    measured: Mapping[tuple[int, int], float]  # (rows, length)

    def __call__(self, rows: int, length: int) -> float:
        known = sorted({size for size, _ in self.measured})
        if not known:
            return 0.0
        at = max((size for size in known if size <= rows), default=known[0])
        lengths = sorted(tokens for size, tokens in self.measured if size == at)
        values = [self.measured[at, tokens] for tokens in lengths]
        if length > lengths[-1]:
            own = values[-1] * length / max(lengths[-1], 1)
        else:
            own = float(np.interp(length, lengths, values))
        return own * max(rows / at, 1.0)


@dataclass(frozen=True)
class Candidate:
    """A drafter with its record on every prompt: chains, which are replayed at any length, or drafts as they were."""

    name: str
    records: tuple[tuple[Attempt, ...], ...]
    cost: DraftCost
    always: bool = False  # drafts its whole length in every pass
    longest: int = 0  # of its chains; 0: its drafts are trees, or of lengths that it chooses itself
    shape: str = ""  # of its draft, in words, if it is not a chain
    options: Mapping[str, object] = field(default_factory=dict)
    pace: tuple[float, ...] = (1.0,)  # the time of its rounds where it was tried, over what was predicted

    @property
    def lengths(self) -> tuple[int, ...]:
        """The draft lengths that can be predicted; 0: as recorded."""
        return tuple(range(1, self.longest + 1)) or (0,)

    def passes(self, length: int) -> list[list[Pass]]:
        """The passes of every prompt with chains of this length."""
        if not self.longest:
            return [as_recorded(record) for record in self.records]
        if not 1 <= length <= self.longest:
            raise InvalidOption(f"the length is {length}; '{self.name}' was recorded with up to {self.longest} tokens")
        return [replay(record, length, always=self.always) for record in self.records]

    @cached_property
    def _tallies(self) -> dict[int, _Tally]:
        return {}

    def tally(self, length: int) -> _Tally:
        if length not in self._tallies:
            self._tallies[length] = _Tally.of(self.passes(length))
        return self._tallies[length]

    @property
    def by_position(self) -> list[float]:
        """The acceptance rate at each position of the draft, of drafts that reach so far."""
        deepest = max((attempt.depth for record in self.records for attempt in record), default=0)
        shares = []
        for place in range(deepest):
            offered = [attempt for record in self.records for attempt in record if attempt.depth > place]
            shares.append(sum(attempt.accepted > place for attempt in offered) / len(offered))
        return shares


@dataclass(frozen=True)
class _Tally:
    """Passes as counts: of each draft size by prompt [P, sizes + 1], and tokens by prompt [P]."""

    sizes: Numbers
    tokens: Numbers

    @classmethod
    def of(cls, prompts: Sequence[Sequence[Pass]]) -> _Tally:
        widest = max((each.drafted for passes in prompts for each in passes), default=0)
        sizes = np.zeros((len(prompts), widest + 1))
        tokens = np.zeros(len(prompts))
        for number, passes in enumerate(prompts):
            for each in passes:
                sizes[number, each.drafted] += 1
                tokens[number] += each.emitted
        return cls(sizes, tokens)


@dataclass(frozen=True)
class Prediction:
    """A drafter at one length and batch size."""

    candidate: Candidate
    length: int  # 0: as recorded
    rows: int
    speedup: float
    low: float
    high: float
    tokens_per_pass: float
    drafted_per_pass: float
    pass_cost: float  # of its passes, in plain passes
    draft_cost: float  # of its drafting, in plain passes

    @property
    def acceptance(self) -> float:
        return (self.tokens_per_pass - 1) / self.drafted_per_pass if self.drafted_per_pass else 0.0


@dataclass(frozen=True)
class Machine:
    """The costs of rounds, with resamples of their measurement."""

    rounds: RoundCosts
    draws: int = _DRAWS
    seed: int = _SEED

    @cached_property
    def costs(self) -> Costs:
        return self.rounds.costs()

    @cached_property
    def resampled(self) -> list[Costs]:
        rng, count = np.random.default_rng(self.seed), len(self.rounds.samples)
        if count == 1:
            return [self.costs] * self.draws
        return [self.rounds.costs(rng.integers(count, size=count)) for _ in range(self.draws)]

    def speedup(self, candidate: Candidate, length: int, rows: int = 1) -> float:
        """The predicted speedup alone."""
        tally = candidate.tally(length)
        return float(self._rounds(candidate, tally, np.ones((1, len(tally.tokens))), False, rows)[0][0])

    def predict(self, candidate: Candidate, length: int, rows: int = 1) -> Prediction:
        """The speedup over plain decoding of as many rows, with its 95 % interval."""
        tally = candidate.tally(length)
        prompts = len(tally.tokens)
        speedup, tokens, passes, drafting = self._rounds(candidate, tally, np.ones((1, prompts)), False, rows)
        rng = np.random.default_rng(self.seed)
        picked = rng.multinomial(prompts, np.full(prompts, 1 / prompts), self.draws).astype(float)
        low, high = np.quantile(self._rounds(candidate, tally, picked, True, rows)[0], (0.025, 0.975))
        drafted = float(tally.sizes.sum(0) @ np.arange(tally.sizes.shape[1]) / tally.sizes.sum())
        values = (float(each[0]) for each in (speedup, tokens, passes, drafting))
        speed, per_pass, pass_cost, draft_cost = values
        return Prediction(
            candidate, length, rows, speed, float(low), float(high), per_pass, drafted, pass_cost, draft_cost
        )

    @cached_property
    def _lines(self) -> dict[tuple[bool, int, int], Numbers]:
        return {}

    def _line(self, resampled: bool, rows: int, tokens: int) -> Numbers:
        """The cost of a shape, from the measurements or from each resample of them, [D]."""
        key = resampled, rows, tokens
        if key not in self._lines:
            drawn = self.resampled if resampled else [self.costs]
            self._lines[key] = np.array([costs(rows, tokens) for costs in drawn])
        return self._lines[key]

    def _rounds(
        self, candidate: Candidate, tally: _Tally, weights: Numbers, resampled: bool, rows: int
    ) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """For each line of weights [D, P] of the prompts: the speedup, tokens per pass, and the costs of a round's pass
        and of its drafting in plain rounds."""
        counts = weights @ tally.sizes  # [D, sizes]
        rounds = counts.sum(1)
        tokens = (weights @ tally.tokens) / rounds
        below = np.cumsum(counts, 1) / rounds[:, None]
        widest = np.diff(np.concatenate([np.zeros((len(below), 1)), below**rows], 1), axis=1)  # of `rows` rows
        sizes = range(counts.shape[1])
        plain = self._line(resampled, rows, 1)
        scored = np.stack([self._line(resampled, rows, size + 1) for size in sizes], 1)
        drafts = np.array([candidate.cost(rows, size) for size in sizes])
        pace = np.resize(candidate.pace, len(weights)) if resampled else np.array([np.median(candidate.pace)])
        passes, drafting = pace * (widest * scored).sum(1) / plain, pace * (widest @ drafts) / plain
        return tokens / (passes + drafting), tokens, passes, drafting
