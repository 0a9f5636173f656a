"""Where tokens stand in a picture, and which codes are near which. Knows nothing of how either was made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """Tokens in raster order: row by row, from the left; some models end each row with marks."""

    rows: int
    columns: int
    marks: int = 0  # tokens behind each row that are no part of the picture

    @property
    def width(self) -> int:
        """Tokens from one to the one below it."""
        return self.columns + self.marks

    def __len__(self) -> int:
        return self.rows * self.width


def neighbours(codebook: Tensor, count: int) -> Tensor:
    """The `count` nearest other codes of each code, nearest first, smaller ids first at equal distance.

    codebook [K, D] -> [K, count]. Exact: differences are taken in float64, code by code, never by a dot product.
    """
    size = codebook.shape[0]
    if not 1 <= count < size:
        raise ValueError(f"{size} codes have 1 to {size - 1} neighbours each, not {count}")
    codes = codebook.detach().double()
    found = []
    for own, code in enumerate(codes):
        distance = (codes - code).square().sum(-1)
        distance[own] = -1.0  # first, and left out, even where two codes are equal
        found.append(distance.sort(stable=True).indices[1 : count + 1])
    return torch.stack(found)
