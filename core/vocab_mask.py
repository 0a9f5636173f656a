"""Masks that restrict the token ids at each position: a repeating pattern of id ranges.

A frame of K codebooks is K tokens in the order of depth, each codebook with its own range of ids, so that drafters and
rules need not know about codebooks; a raster's rows can end in a marker. Ids outside the range have probability 0.
Works on ids and positions, independent of their meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.errors import InvalidOption


class VocabMask(Protocol):
    """Restricts the token ids at each position."""

    def apply(self, logits: Tensor, position: Tensor) -> Tensor:
        """Logits [..., V] of tokens at positions [...] of the output, with -inf for ids that are not allowed there."""


@dataclass(frozen=True)
class RepeatingRanges:
    """Token i of the output must be in the half-open range `ranges[i % P]`."""

    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.ranges or any(not 0 <= first < last for first, last in self.ranges):
            raise InvalidOption(f"ranges are {self.ranges[:4]}...; each must be (first, last) with 0 <= first < last")

    @classmethod
    def codebooks(cls, books: int, codes: int, first: int = 0) -> RepeatingRanges:
        """Frames of `books` codebooks: the ids of book k start at `first + k codes`."""
        if books < 1 or codes < 1:
            raise InvalidOption(f"books={books}, codes={codes}: each must be 1 or more")
        return cls(tuple((first + k * codes, first + (k + 1) * codes) for k in range(books)))

    @classmethod
    def raster(cls, columns: int, codes: int) -> RepeatingRanges:
        """Rows of `columns` codes, each followed by the end-of-row marker, whose id is `codes`."""
        return cls(((0, codes),) * columns + ((codes, codes + 1),))

    def __len__(self) -> int:
        return len(self.ranges)

    def apply(self, logits: Tensor, position: Tensor) -> Tensor:
        ids = torch.arange(logits.shape[-1], device=logits.device)
        first, last = _bounds(self.ranges, str(logits.device))
        index = (position % len(self.ranges))[..., None]
        return logits.masked_fill((ids < first[index]) | (ids >= last[index]), -torch.inf)


@lru_cache(maxsize=64)
def _bounds(ranges: tuple[tuple[int, int], ...], device: str) -> tuple[Tensor, Tensor]:
    first, last = torch.tensor(ranges, device=device).unbind(1)
    return first, last


def frames(tokens: Sequence[int], books: int, codes: int, first: int = 0) -> list[list[int]]:
    """The codes of each complete frame, from tokens as in `RepeatingRanges.codebooks`."""
    complete = len(tokens) // books * books
    flat = [token - first - index % books * codes for index, token in enumerate(tokens[:complete])]
    return [flat[start : start + books] for start in range(0, complete, books)]


def frame_tokens(codes: Sequence[Sequence[int]], size: int, first: int = 0) -> list[int]:
    """The tokens of frames of codes, the inverse of `frames`; `size` is that of a codebook."""
    return [first + book * size + code for frame in codes for book, code in enumerate(frame)]
