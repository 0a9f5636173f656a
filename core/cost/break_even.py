"""What a round of decoding costs, by how many rows share it and how many tokens each row brings; and how seldom to look
whether drafting pays, where it doesn't.

A pass is a rectangle: every row is as wide as the widest draft, so rows decide together, and a row's guesses cost more
than they do alone. Knows numbers; nothing of what drafts or decodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.core.errors import InvalidOption

Cost = Callable[[int, int], float]  # of a round of so many rows with so many tokens in each, in any unit

LOOK = 0  # "so many tokens": guesses are made, and none is tried
GLANCE = -1  # the same by those alone who ask no model
_LOOK = 0.05  # plain rounds that this costs besides, where it was not measured


class Costs:
    """Rounds measured at some numbers of rows and of tokens in each, in milliseconds; straight lines between, and on
    behind the last. Where one row alone was measured, more rows are taken for one with all of their tokens."""

    def __init__(self, measured: Mapping[tuple[int, int], float]) -> None:
        self._lines: dict[int, tuple[list[int], list[float]]] = {}
        self._looks: dict[int, dict[int, float]] = {LOOK: {}, GLANCE: {}}
        for rows in sorted({rows for rows, _ in measured}):
            widths = sorted(tokens for at, tokens in measured if at == rows and tokens not in self._looks)
            times = [measured[rows, tokens] for tokens in widths]
            if rows < 1 or len(widths) < 2 or widths[0] < 1 or min(times) <= 0:
                raise InvalidOption("costs need at least two different numbers of tokens, and times above 0")
            # whatever else a machine does only slows it down: what took longer than a wider round took too long
            self._lines[rows] = widths, np.minimum.accumulate(times[::-1])[::-1].tolist()
            for kind, looks in self._looks.items():
                if (rows, kind) in measured:
                    looks[rows] = max(measured[rows, kind] / self._lines[rows][1][0] - 1, 0.0)
        if 1 not in self._lines:
            raise InvalidOption("costs need those of one row; those of several are written as '4x2:17.1'")
        self.rows = tuple(self._lines)

    @classmethod
    def parse(cls, text: str) -> Costs:
        """As a trace notes them: tokens and milliseconds of one row, "1:14.3 2:14.5 4:14.9", and of more rows, each
        with so many tokens, "8x1:20.1 8x2:31.4"; 0 tokens: guesses are made and none is tried, -1: by few."""
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
            return _between(*self._lines[1], rows * tokens)
        low, high = _around(known, rows)
        if rows == low:
            return _between(*self._lines[low], tokens)
        return _between((low, high), [_between(*self._lines[one], tokens) for one in (low, high)], rows)

    def ratio(self, rows: int, guesses: int) -> float:
        """A round in which each row tries so many guesses, in plain rounds of as many rows."""
        return self(rows, guesses + 1) / self(rows, 1)

    def look(self, rows: int) -> float:
        """What guessing costs where nothing is tried, in plain rounds: besides the plain round itself."""
        found = self._look(LOOK, rows)
        return _LOOK if found is None else found

    def glance(self, rows: int) -> float:
        """The same where those alone guess who ask no model."""
        found = self._look(GLANCE, rows)
        return self.look(rows) if found is None else min(found, self.look(rows))

    def _look(self, kind: int, rows: int) -> float | None:
        looks = self._looks[kind]
        known = tuple(looks)
        if len(known) < 2:
            return looks[known[0]] if known else None
        low, high = _around(known, rows)
        return max(_between((low, high), [looks[low], looks[high]], rows), 0.0)


def _around(known: Sequence[int], wanted: int) -> tuple[int, int]:
    """The two of at least two numbers, in order, that lie around the one wanted, or nearest to it."""
    place = min(max(int(np.searchsorted(known, wanted, "right")), 1), len(known) - 1)
    return known[place - 1], known[place]


def _between(points: Sequence[int], values: Sequence[float], wanted: int) -> float:
    if wanted <= points[-1]:
        return float(np.interp(wanted, points, values))
    slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
    return float(values[-1] + slope * (wanted - points[-1]))


@dataclass
class Pace:
    """Tokens in the time of a plain round, lately. What a round is worth is what it brings beyond that (Dinkelbach's
    way to the largest quotient of sums): a guess is tried if it brings more than others would in the time it takes."""

    memory: float = 64.0  # plain rounds, after which a round counts for a third

    def __post_init__(self) -> None:
        self._tokens = self._time = self.memory

    def took(self, tokens: float, rounds: float) -> None:
        """So many tokens, a row, came of what took as long as so many plain rounds."""
        kept = math.exp(-rounds / self.memory)
        self._tokens, self._time = kept * self._tokens + tokens, kept * self._time + rounds

    def worth(self, tokens: float, rounds: float) -> float:
        return tokens - max(self._tokens / self._time, 1.0) * rounds


@dataclass
class Promise:
    """What rounds bring in which the dear are asked too, lately: they are, where the others promise less by more than
    asking costs. What is long ago counts less, so that they get another chance."""

    tokens: float = 2.5  # until it is known
    learns: float = 0.1
    forgets: float = 0.01

    def __post_init__(self) -> None:
        self._usual = self.tokens

    def kept(self, tokens: float) -> None:
        """They were asked, and the round brought so many."""
        self.tokens += self.learns * (tokens - self.tokens)

    def above(self, others: float) -> float:
        """How many tokens more than the others promise. If it is too few, they are not asked."""
        return self.tokens - others

    def passed(self) -> None:
        """They were not asked."""
        self.tokens += self.forgets * max(self._usual - self.tokens, 0.0)


_IN_VAIN = 4  # looks one after another, before looking rests
_PAUSE, _LONGEST_PAUSE = 8, 64  # rounds that it rests, twice as many each time


@dataclass
class Rest:
    """When to draft, or to look whether it would pay. What that loses against plain decoding is paid out of what was
    set aside: `share` of every plain round, and `first` plain rounds to begin with; no more than `most` is saved up."""

    share: float = 0.02
    first: float = 0.5
    most: float = 2.0

    def __post_init__(self) -> None:
        self.left = self.first
        self.drafting = False  # did the last look find that it pays?
        self._rows = 0  # that there were then
        self._vain, self._pause, self._next = 0, 0, _PAUSE

    def due(self, price: float, rows: int) -> bool:
        """Asked once a round: may so many rows look, at a price in plain rounds? If not, the round is plain. Where a
        pass has half of the rows that it had at the last look, it is time for the next one."""
        if 2 * rows <= self._rows:
            self.left = max(self.left, self.first, price)
            self._vain, self._pause, self._next = 0, 0, _PAUSE
        if self._pause:
            self._pause -= 1
        elif self.left >= (0.0 if self.drafting else price):
            self._rows = rows
            return True
        self.drafting = False
        self._rows = max(self._rows, rows)
        self.left = min(self.left + self.share, max(self.most, price))
        return False

    def paid(self) -> None:
        """What was looked at is tried."""
        self.drafting, self._vain, self._next = True, 0, _PAUSE

    def vain(self, price: float) -> None:
        """It is not, and this is what the look cost."""
        self.left -= price
        self.drafting, self._vain = False, self._vain + 1
        if self._vain >= _IN_VAIN:
            self._vain, self._pause, self._next = 0, self._next, min(2 * self._next, _LONGEST_PAUSE)

    def gained(self, rounds: float) -> None:
        """What a round in which guesses were tried gained over plain rounds, or lost."""
        self.left = min(self.left + rounds, self.most)
