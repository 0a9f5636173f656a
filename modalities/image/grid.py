"""The raster that image tokens are generated in, and nearest neighbours in a codebook. Independent of models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_NUMEL = 1 << 22  # float64 distances held in memory at a time
_EXTRA_CANDIDATES = 16  # codes compared exactly beyond the `count` requested


@dataclass(frozen=True)
class Grid:
    """Tokens in raster order: row by row, left to right. Some models end each row with end-of-row markers."""

    rows: int
    columns: int
    end_markers: int = 0  # tokens at the end of each row that are not part of the image

    @property
    def width(self) -> int:
        """Tokens per row, end-of-row markers included."""
        return self.columns + self.end_markers

    def __len__(self) -> int:
        return self.rows * self.width


def neighbours(codebook: Tensor, count: int) -> Tensor:
    """The `count` nearest other codes of each code, nearest first, smaller ids first at equal distance.

    codebook [K, D] -> [K, count]. The result is exact: candidates are preselected by dot products and then compared by
    their differences in float64. Where rounding could have excluded a nearest code, all codes are compared.
    """
    size = codebook.shape[0]
    if not 1 <= count < size:
        raise ValueError(f"count is {count}; a codebook of {size} codes has 1 to {size - 1} neighbours for each code")
    codes = codebook.detach().double()
    squares = codes.square().sum(-1)
    rounding = 1e-12 * max(float(squares.max()), 1e-300)
    num_candidates = min(count + _EXTRA_CANDIDATES, size - 1)
    chunks = []
    for ids in torch.split(torch.arange(size), max(_CHUNK_NUMEL // size, 1)):
        queries = codes[ids]
        approximate = squares[ids, None] + squares - 2 * queries @ codes.T  # [b, K]
        approximate[torch.arange(len(ids)), ids] = torch.inf
        distances, candidates = approximate.topk(num_candidates, largest=False)
        nearest, furthest = _nearest(queries, codes, candidates.sort(1).values, count)
        if num_candidates < size - 1:
            for row in (distances[:, -1] - rounding <= furthest).nonzero()[:, 0].tolist():
                others = torch.arange(size)[torch.arange(size) != ids[row]][None]
                nearest[row] = _nearest(queries[row : row + 1], codes, others, count)[0][0]
        chunks.append(nearest)
    return torch.cat(chunks)


def _nearest(queries: Tensor, codes: Tensor, candidates: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The nearest of the candidates [b, S], which are sorted by id: ids [b, count], and the distance of the last."""
    distances, order = (queries[:, None] - codes[candidates]).square().sum(-1).sort(dim=1, stable=True)
    return candidates.gather(1, order[:, :count]), distances[:, count - 1]
