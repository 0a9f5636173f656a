"""Measures the throughput of a batch against the same prompts decoded one after another, and compares the outputs.

Independent of how a batch is decoded.
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
    """One repetition: all prompts in one batch, and one after another."""

    dtype: str
    drafter: str
    rows: int
    tokens: int
    batched_speed: float  # tokens per second
    serial_speed: float  # tokens per second, one prompt after another
    same: int  # rows with the same output in the batch as alone

    @property
    def ratio(self) -> float:
        return self.batched_speed / self.serial_speed


def compare(
    lm: TextModel, items: Sequence[Item], *, drafter: str | None = None, tokens: int = 96, repeat: int = 3
) -> Iterator[Batched]:
    """Yield one repetition at a time; the first, a warm-up, is dropped."""
    if len(items) < 2:
        raise InvalidOption(f"a batch needs 2 prompts or more, and {len(items)} are given")
    prompts = [str(item.content) for item in items]
    for number in range(repeat + 1):
        start = time.perf_counter()
        batch = lm.generate(prompts, drafter=drafter, max_new_tokens=tokens, temperature=0.0)
        between = time.perf_counter()
        alone = [lm.generate(prompt, drafter=drafter, max_new_tokens=tokens, temperature=0.0) for prompt in prompts]
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
                batched_speed=size / (between - start),
                serial_speed=count / (end - between),
                same=same,
            )


def median_round(rounds: Sequence[Batched]) -> Batched:
    """Return the repetition with the median ratio, with the smallest `same` of all."""
    median = sorted(rounds, key=lambda item: item.ratio)[len(rounds) // 2]
    return replace(median, same=min(item.same for item in rounds))
