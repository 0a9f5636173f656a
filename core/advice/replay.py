"""What a shorter draft would have done, from the record of a longer one.

The record of a decoding says at each of its tokens whether a guess was made there and whether it was right. With a
shorter draft the text is the same, and so is a guess that depends on the text alone: decoding is replayed on the
record, pass by pass. At temperature 0 that is exact for a draft model, and for lookups up to where their drafts begin.
Independent of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.core.trace import Step

_SHORT = 0.02  # the share of passes in which a drafter that fills its drafts may draft less, as at an end token


@dataclass(frozen=True, slots=True)
class Pass:
    """One target pass for one row."""

    drafted: int  # guesses that were scored
    emitted: int  # tokens


@dataclass(frozen=True, slots=True)
class Attempt:
    """One recorded step."""

    drafted: int
    depth: int  # guesses on the longest path
    accepted: int
    emitted: int

    @property
    def chain(self) -> bool:
        return self.depth == self.drafted


def attempts(steps: Iterable[Step]) -> tuple[Attempt, ...]:
    """The record of one row's steps."""
    return tuple(Attempt(len(step.drafted), _depth(step.parents), step.accepted, len(step.emitted)) for step in steps)


def _depth(parents: Sequence[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def as_recorded(record: Sequence[Attempt]) -> list[Pass]:
    """The passes that were made."""
    return [Pass(attempt.drafted, attempt.emitted) for attempt in record]


def fills(records: Iterable[Sequence[Attempt]], length: int) -> bool:
    """Whether a drafter drafts `length` tokens in every pass that has room for them, as a draft model does."""
    passes = short = 0
    for record in records:
        left = sum(attempt.emitted for attempt in record)
        for attempt in record:
            passes += 1
            short += attempt.depth < min(length, left - 1)
            left -= attempt.emitted
    return bool(length and passes) and short <= _SHORT * passes


def replay(record: Sequence[Attempt], length: int, *, always: bool) -> list[Pass]:
    """The passes that chains of at most `length` tokens would have taken; no longer than those of the record.

    `always`: the drafter drafts `length` tokens in every pass. If not, it drafts what is left of the draft that was
    recorded at a token, and nothing where nothing was."""
    right, offered = _by_token(record)
    passes, start, count = [], 0, len(right)
    while start < count:
        drafted = min(length if always else min(length, offered[start]), count - start - 1)
        accepted = 0
        while accepted < drafted and right[start + accepted]:
            accepted += 1
        passes.append(Pass(drafted, accepted + 1))
        start += accepted + 1
    return passes


def _by_token(record: Sequence[Attempt]) -> tuple[list[bool], list[int]]:
    """For each token, whether a guess is right there, and how many tokens were drafted from there on.

    A token after a draft that was accepted whole has no guess of its own; it counts as right, as those before it."""
    right: list[bool] = []
    offered: list[int] = []
    for attempt in record:
        whole = attempt.accepted == attempt.depth > 0
        for place in range(attempt.emitted):
            right.append(place < attempt.accepted or whole)
            offered.append(max(attempt.depth - place, 0))
    return right, offered
