"""What decoding prompts side by side brings: tokens a second of a batch beside one after another, and the same outputs.

Knows text models and prompts, nothing of how a batch is decoded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.core.bench.runner import Item
from outrider.core.errors import InvalidOption
from outrider.text.model import TextModel


@dataclass(frozen=True)
class Batched:
    """One round: everybody in one batch, and one after another."""

    dtype: str
    drafter: str
    rows: int
    tokens: int
    together: float  # tokens a second in all
    alone: float
    same: int  # rows whose output is the same in a batch as alone

    @property
    def ratio(self) -> float:
        return self.together / self.alone


def compare(
    lm: TextModel, items: Sequence[Item], *, drafter: str | None = None, tokens: int = 96, repeat: int = 3
) -> Iterator[Batched]:
    """A round at a time, in turns; the first, which warms up, is left out."""
    if len(items) < 2:
        raise InvalidOption(f"a batch of {len(items)} is none; give 2 prompts or more")
    prompts = [str(item.content) for item in items]
    for number in range(repeat + 1):
        start = time.perf_counter()
        batch = lm.generate(prompts, drafter=drafter, max_new_tokens=tokens, temperature=0.0)
        between = time.perf_counter()
        alone = [lm.generate(one, drafter=drafter, max_new_tokens=tokens, temperature=0.0) for one in prompts]
        end = time.perf_counter()
        count = sum(len(one.tokens) for one in alone)
        same = sum(one.tokens == other.tokens for one, other in zip(batch, alone, strict=True))
        if number:
            size = sum(len(one.tokens) for one in batch)
            yield Batched(
                dtype=lm.dtype,
                drafter=drafter or "plain",
                rows=len(prompts),
                tokens=count,
                together=size / (between - start),
                alone=count / (end - between),
                same=same,
            )


def middle(rounds: Sequence[Batched]) -> Batched:
    """The round whose ratio is the middle one, with the fewest rows alike of all."""
    found = sorted(rounds, key=lambda one: one.ratio)[len(rounds) // 2]
    return replace(found, same=min(one.same for one in rounds))
