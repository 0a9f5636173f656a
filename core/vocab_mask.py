"""Which ids may stand where: a pattern of ranges that repeats itself.

Books of a frame take turns, a picture's rows end in a mark, a grid allows codes alone. A frame of K codebooks is K
tokens in the order of depth, each book with a range of ids of its own, so that drafters and rules need not know of
books. What may not stand somewhere has no mass there. Knows ids and places, not what either means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.errors import InvalidOption


class Allowed(Protocol):
    """Says what may stand where."""

    def only(self, logits: Tensor, place: Tensor) -> Tensor:
        """Logits [..., V] of tokens at places [...], so many emitted before each; -inf for what may not stand there."""


@dataclass(frozen=True)
class Slots:
    """Token i of what is emitted must be from `ranges[i % P]`: from the first number up to, but not, the second."""

    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.ranges or any(not 0 <= first < last for first, last in self.ranges):
            raise InvalidOption(f"slots are {self.ranges[:4]}...; each must be a range of ids with something in it")

    @classmethod
    def books(cls, books: int, codes: int, first: int = 0) -> Slots:
        """Frames of so many books: book k's codes are the ids from `first + k codes` on."""
        if books < 1 or codes < 1:
            raise InvalidOption(f"{books} books of {codes} codes; there must be one of each at least")
        return cls(tuple((first + k * codes, first + (k + 1) * codes) for k in range(books)))

    @classmethod
    def rows(cls, columns: int, codes: int) -> Slots:
        """Rows of so many codes, each followed by a mark, the id behind those of the codes."""
        return cls(((0, codes),) * columns + ((codes, codes + 1),))

    def __len__(self) -> int:
        return len(self.ranges)

    def only(self, logits: Tensor, place: Tensor) -> Tensor:
        ids = torch.arange(logits.shape[-1], device=logits.device)
        first, last = _bounds(self.ranges, str(logits.device))
        slot = (place % len(self.ranges))[..., None]
        return logits.masked_fill((ids < first[slot]) | (ids >= last[slot]), -torch.inf)


@lru_cache(maxsize=64)
def _bounds(ranges: tuple[tuple[int, int], ...], device: str) -> tuple[Tensor, Tensor]:
    first, last = torch.tensor(ranges, device=device).unbind(1)
    return first, last


def frames(tokens: Sequence[int], books: int, codes: int, first: int = 0) -> list[list[int]]:
    """Tokens of frames as each frame's codes; one that isn't whole is left out."""
    whole = len(tokens) // books * books
    taken = [token - first - place % books * codes for place, token in enumerate(tokens[:whole])]
    return [taken[start : start + books] for start in range(0, whole, books)]


def flat(codes: Sequence[Sequence[int]], size: int, first: int = 0) -> list[int]:
    """Frames' codes as tokens: what `frames` undoes."""
    return [first + book * size + code for frame in codes for book, code in enumerate(frame)]
