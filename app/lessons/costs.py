"""What rounds of drafting, a target pass and bookkeeping cost in time, and whether their texts are those of plain
decoding.

Reads results and traces; the target is only asked about texts that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.app.lessons.intervals import Interval, ratio
from outrider.core.trace import Step


@dataclass(frozen=True)
class RoundCost:
    """The mean costs of a drafter's rounds, in plain rounds on the same machine.

    A round has to yield more tokens than its total for the drafter to be faster than plain decoding.
    """

    draft: float
    target: float  # the pass over the draft
    rest: float  # the rule and bookkeeping
    nodes: float  # tokens in a draft
    by_bytes: float  # drafting, in target passes, by the bytes of weights that it reads

    @property
    def total(self) -> float:
        """The break-even: tokens that a round has to yield."""
        return self.draft + self.target + self.rest

    def __str__(self) -> str:
        return (
            f"{self.total:.2f} plain rounds: {self.draft:.2f} for drafting, {self.target:.2f} for the target pass over "
            f"{self.nodes + 1:.0f} tokens, {self.rest:.2f} for the rest"
        )

    @classmethod
    def of(cls, outputs: Sequence[Any], plain: Sequence[Any]) -> RoundCost:
        """From results of single prompts (a batch shares the time of a round among its rows)."""
        steps = [step for output in outputs for step in output.trace.steps]
        base = [step for output in plain for step in output.trace.steps]
        unit = seconds(base) / len(base) * len(steps)
        return cls(
            draft=sum(step.times.draft for step in steps) / unit,
            target=sum(step.times.score for step in steps) / unit,
            rest=sum(step.times.rule + step.times.rest for step in steps) / unit,
            nodes=sum(len(step.drafted) for step in steps) / len(steps),
            by_bytes=sum(step.cost - 1 for step in steps) / len(steps),
        )


def seconds(steps: Sequence[Step]) -> float:
    """Seconds of the rounds of a single row."""
    return sum(step.times.total for step in steps)


def speedup(outputs: Sequence[Any], plain: Sequence[Any]) -> Interval:
    """Tokens per second over those of plain decoding, of single prompts given in the same order."""
    after = [seconds(output.trace.steps) / len(output.tokens) for output in outputs]
    before = [seconds(output.trace.steps) / len(output.tokens) for output in plain]
    return ratio(before, after)


def same_text(lm: Any, outputs: Sequence[Any], plain: Sequence[Any]) -> str:
    """A sentence on whether greedy texts are those of plain decoding, token for token.

    With our kernels they are. Elsewhere rounding can decide between two tokens of about equal probability, after which
    the texts go on differently; any other difference is an error.
    """
    from outrider.text.bench.comparison import compare, gaps, near_tie

    near, end, kinds = near_tie(lm.dtype), {*lm.end}, []
    for base, result in zip(plain, outputs, strict=True):

        def worst(tokens: Sequence[int], prompt: Sequence[int] = result.prompt) -> float:
            return max(gaps(lm.target(), prompt, tokens), default=0.0)

        kinds.append(compare(base.tokens, result.tokens, worst=worst, near=near, end=end))
    assert "wrong" not in kinds, "a text differs from plain decoding's by more than rounding"
    if "near" not in kinds:
        return "The text is that of plain decoding, token for token."
    return (
        f"{kinds.count('same')} of {len(kinds)} texts are those of plain decoding, token for token; the others part "
        "from it where two tokens are about equally likely and rounding decides."
    )
