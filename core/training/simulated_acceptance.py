"""Simulated acceptance: how far a draft head's drafts would get on answers that are known, without running the loop.

For greedy answers and chains this is exactly what the loop does: a draft made behind a position is followed while it
agrees with what came, and the next one is made behind the first token after that. Knows booleans alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Curve:
    """What chains of drafts would have come to."""

    calls: int
    tokens: int
    tried: tuple[int, ...]  # by place in the draft: how often all guesses before it were right
    right: tuple[int, ...]  # ... and it was too

    @property
    def tokens_per_call(self) -> float:
        return self.tokens / self.calls if self.calls else 1.0

    @property
    def conditional(self) -> tuple[float, ...]:
        """The share of right guesses at each place, of those whose predecessors were right."""
        return tuple(right / tried if tried else 0.0 for right, tried in zip(self.right, self.tried, strict=True))

    @property
    def unconditional(self) -> tuple[float, ...]:
        """The share of drafts that got so far."""
        return tuple(right / self.calls if self.calls else 0.0 for right in self.right)

    def __add__(self, other: Curve) -> Curve:
        tried = tuple(map(sum, zip(self.tried, other.tried, strict=True)))
        right = tuple(map(sum, zip(self.right, other.right, strict=True)))
        return Curve(self.calls + other.calls, self.tokens + other.tokens, tried, right)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "tokens_per_call": self.tokens_per_call,
            "conditional": self.conditional,
            "unconditional": self.unconditional,
        }


def walk(hits: Tensor, answer: Tensor) -> Curve:
    """hits [B, T, K] and answer [B, T] as Draft head.hits and Batch have them: go through each answer draft by
    draft."""
    depth = hits.shape[2]
    runs = hits.long().cumprod(-1).sum(-1).tolist()  # [B, T] accepted in a row
    calls, tokens, tried, right = 0, 0, [0] * depth, [0] * depth
    for row, counts in enumerate(answer.tolist()):
        places = [place for place, one in enumerate(counts) if one]
        if not places:
            continue
        place, last = places[0], places[-1]
        while place <= last:
            room = last - place  # a guess beyond the answer's end can't be judged
            run = min(runs[row][place], room)
            for depth_ in range(min(run + 1, depth, room)):
                tried[depth_] += 1
                right[depth_] += depth_ < run
            calls, tokens, place = calls + 1, tokens + run + 1, place + run + 1
    return Curve(calls, tokens, tuple(tried), tuple(right))
