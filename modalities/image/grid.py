"""Where tokens stand in a picture, and which codes are near which. Knows nothing of how either was made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_AT_ONCE = 1 << 22  # distances held, numbers of 64 bits
_SPARE = 16  # codes compared beyond those wanted


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

    codebook [K, D] -> [K, count]. Exact: what is compared are differences in float64. Dot products only say which few
    codes are worth comparing, and where their rounding could leave one out, all are.
    """
    size = codebook.shape[0]
    if not 1 <= count < size:
        raise ValueError(f"{size} codes have 1 to {size - 1} neighbours each, not {count}")
    codes = codebook.detach().double()
    lengths = codes.square().sum(-1)
    rounding = 1e-12 * max(float(lengths.max()), 1e-300)
    some = min(count + _SPARE, size - 1)
    found = []
    for part in torch.split(torch.arange(size), max(_AT_ONCE // size, 1)):
        own = codes[part]
        rough = lengths[part, None] + lengths - 2 * own @ codes.T  # [b, K]
        rough[torch.arange(len(part)), part] = torch.inf
        furthest, worth = rough.topk(some, largest=False)
        chosen, last = _nearest(own, codes, worth.sort(1).values, count)
        if some < size - 1:
            for row in (furthest[:, -1] - rounding <= last).nonzero()[:, 0].tolist():
                others = torch.arange(size)[torch.arange(size) != part[row]][None]
                chosen[row] = _nearest(own[row : row + 1], codes, others, count)[0][0]
        found.append(chosen)
    return torch.cat(found)


def _nearest(own: Tensor, codes: Tensor, worth: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of the codes worth [b, S] comparing, in the order of their ids: the nearest [b, count], how far the last is."""
    far, order = (own[:, None] - codes[worth]).square().sum(-1).sort(dim=1, stable=True)
    return worth.gather(1, order[:, :count]), far[:, count - 1]
