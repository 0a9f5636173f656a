"""What a decoding round costs, by rows and tokens per row, and when drafting is worth its cost.

A target pass is a rectangle: every row is as wide as the widest draft, so all rows of a batch decide together.
Independent of drafters and decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.core.errors import InvalidOption

Cost = Callable[[int, int], float]  # (rows, tokens per row) -> cost of a round, in any unit

DRAFTED = 0  # "tokens per row" of a round in which drafters guess and nothing is verified
DRAFTED_CHEAPLY = -1  # the same with only the drafters that run no model
_OVERHEAD = 0.05  # cost of guessing, in plain rounds, if it was not measured


class Costs:
    """Measured costs of rounds, (rows, tokens per row) -> milliseconds, interpolated linearly and extrapolated beyond
    the last. If only one row was measured, several rows cost as much as one with all of their tokens."""

    def __init__(self, measured: Mapping[tuple[int, int], float]) -> None:
        self._lines: dict[int, tuple[list[int], list[float]]] = {}
        self._overheads: dict[int, dict[int, float]] = {DRAFTED: {}, DRAFTED_CHEAPLY: {}}
        for rows in sorted({rows for rows, _ in measured}):
            widths = sorted(tokens for at, tokens in measured if at == rows and tokens not in self._overheads)
            times = [measured[rows, tokens] for tokens in widths]
            if rows < 1 or len(widths) < 2 or widths[0] < 1 or min(times) <= 0:
                raise InvalidOption("costs need at least two different numbers of tokens, and times above 0")
            # other load only slows a machine down, so a round that took longer than a wider one is a wrong measurement
            self._lines[rows] = widths, np.minimum.accumulate(times[::-1])[::-1].tolist()
            for kind, overheads in self._overheads.items():
                if (rows, kind) in measured:
                    overheads[rows] = max(measured[rows, kind] / self._lines[rows][1][0] - 1, 0.0)
        if 1 not in self._lines:
            raise InvalidOption("costs need those of one row; those of several are written as '4x2:17.1'")
        self.rows = tuple(self._lines)

    @classmethod
    def parse(cls, text: str) -> Costs:
        """From the notation of traces: tokens and milliseconds of one row, "1:14.3 2:14.5 4:14.9", and of several rows,
        "8x1:20.1 8x2:31.4" (rows x tokens per row); 0 tokens is DRAFTED, -1 DRAFTED_CHEAPLY."""
        measured: dict[tuple[int, int], float] = {}
        try:
            for part in text.split():
                shape, ms = part.split(":")
                rows, _, tokens = shape.rpartition("x")
                measured[int(rows or 1), int(tokens)] = float(ms)
        except ValueError:
            raise InvalidOption(
                f"costs is {text!r:.60}; give tokens and milliseconds such as '1:14.3 4:14.9'"
            ) from None
        return cls(measured)

    def __call__(self, rows: int, tokens: int) -> float:
        known = self.rows
        if len(known) == 1:
            return _interpolated(*self._lines[1], rows * tokens)
        low, high = _neighbours(known, rows)
        if rows == low:
            return _interpolated(*self._lines[low], tokens)
        return _interpolated((low, high), [_interpolated(*self._lines[count], tokens) for count in (low, high)], rows)

    def ratio(self, rows: int, guesses: int) -> float:
        """The cost of verifying `guesses` tokens in each row, in plain rounds of as many rows."""
        return self(rows, guesses + 1) / self(rows, 1)

    def overhead(self, rows: int) -> float:
        """The cost of guessing alone, on top of a plain round, in plain rounds."""
        measured = self._overhead(DRAFTED, rows)
        return _OVERHEAD if measured is None else measured

    def cheap_overhead(self, rows: int) -> float:
        """The same with only the drafters that run no model."""
        measured = self._overhead(DRAFTED_CHEAPLY, rows)
        return self.overhead(rows) if measured is None else min(measured, self.overhead(rows))

    def _overhead(self, kind: int, rows: int) -> float | None:
        overheads = self._overheads[kind]
        known = tuple(overheads)
        if len(known) < 2:
            return overheads[known[0]] if known else None
        low, high = _neighbours(known, rows)
        return max(_interpolated((low, high), [overheads[low], overheads[high]], rows), 0.0)


def _neighbours(known: Sequence[int], value: int) -> tuple[int, int]:
    """The two numbers of a sorted sequence (of at least two) around a value, or nearest to it."""
    index = min(max(int(np.searchsorted(known, value, "right")), 1), len(known) - 1)
    return known[index - 1], known[index]


def _interpolated(points: Sequence[int], values: Sequence[float], x: int) -> float:
    if x <= points[-1]:
        return float(np.interp(x, points, values))
    slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
    return float(values[-1] + slope * (x - points[-1]))


@dataclass
class RecentSpeed:
    """A running average of tokens per plain round's time, at least 1. What a draft is worth is measured against it
    (Dinkelbach's algorithm for the largest ratio of sums): a guess is worth drafting if it yields more tokens than the
    average does in the time it takes."""

    memory: float = 64.0  # time constant, in plain rounds

    def __post_init__(self) -> None:
        self._tokens = self._time = self.memory

    def record(self, tokens: float, rounds: float) -> None:
        """Add a round that yielded `tokens` per row in the time of `rounds` plain rounds."""
        decay = math.exp(-rounds / self.memory)
        self._tokens, self._time = decay * self._tokens + tokens, decay * self._time + rounds

    def worth(self, tokens: float, rounds: float) -> float:
        """The tokens gained over the average by a round of this yield and duration."""
        return tokens - max(self._tokens / self._time, 1.0) * rounds


@dataclass
class ModelDraftValue:
    """Running means of the tokens of a round in which model-based drafters are queried, and of its time in plain
    rounds. They recover slowly from a disappointment, so that these drafters are tried again."""

    rounds: float  # initial time, of a round with a usual draft
    tokens: float = 2.2  # initial value
    rate: float = 0.1  # of the means, per query
    recovery: float = 0.01  # towards the initial values, per round without a query

    def __post_init__(self) -> None:
        self._initial = self.tokens, self.rounds

    def record(self, tokens: float, rounds: float) -> None:
        """Add a round in which they were queried."""
        self._move(self.rate, tokens, rounds)

    def skip(self) -> None:
        """Add a round in which they were not queried."""
        if self.tokens * self._initial[1] < self._initial[0] * self.rounds:
            self._move(self.recovery, *self._initial)

    def _move(self, rate: float, tokens: float, rounds: float) -> None:
        self.tokens += rate * (tokens - self.tokens)
        self.rounds += rate * (rounds - self.rounds)


_MAX_FAILURES = 4  # tries in a row without a draft, before a pause
_PAUSE, _MAX_PAUSE = 8, 64  # rounds; doubled each time


@dataclass
class DraftBudget:
    """Decides when to draft, or to try whether drafting pays. Losses against plain decoding are paid from a budget, in
    plain rounds: it starts at `initial`, earns `income` per plain round, and holds at most `limit`."""

    income: float = 0.02
    initial: float = 0.5
    limit: float = 2.0

    def __post_init__(self) -> None:
        self.balance = self.initial
        self.drafting = False  # whether the last try found that drafting pays
        self._rows = 0  # at the last try
        self._failures, self._pause, self._next_pause = 0, 0, _PAUSE

    def may_draft(self, cost: float, rows: int) -> bool:
        """Called once per round: whether to draft, at a cost in plain rounds; if not, the round is plain. Halving the
        rows since the last try makes the next one due."""
        if 2 * rows <= self._rows:
            self.balance = max(self.balance, self.initial, cost)
            self._failures, self._pause, self._next_pause = 0, 0, _PAUSE
        if self._pause:
            self._pause -= 1
        elif self.balance >= (0.0 if self.drafting else cost):
            self._rows = rows
            return True
        self.drafting = False
        self._rows = max(self._rows, rows)
        self.balance = min(self.balance + self.income, max(self.limit, cost))
        return False

    def succeeded(self) -> None:
        """The guesses are worth verifying."""
        self.drafting, self._failures, self._next_pause = True, 0, _PAUSE

    def failed(self, cost: float) -> None:
        """The guesses, which cost this many plain rounds, are not worth verifying."""
        self.balance -= cost
        self.drafting, self._failures = False, self._failures + 1
        if self._failures >= _MAX_FAILURES:
            self._failures, self._pause = 0, self._next_pause
            self._next_pause = min(2 * self._next_pause, _MAX_PAUSE)

    def add(self, rounds: float) -> None:
        """Add the gain of a round with a draft over plain rounds; a loss is negative."""
        self.balance = min(self.balance + rounds, self.limit)
