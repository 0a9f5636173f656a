"""Nearest neighbours in a codebook equal those of a full sort, whatever the chunk size."""

from __future__ import annotations

import pytest
import torch

from outrider.image import grid
from outrider.image.grid import neighbours


def test_neighbours_are_those_of_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 4, (60, 3), generator=generator).double()  # with duplicates and ties
    distances = (codes[:, None] - codes).square().sum(-1)
    distances[torch.arange(60), torch.arange(60)] = torch.inf
    expected = distances.sort(stable=True).indices
    for count in (1, 7, 59):
        for numel in (1, 1000, 1 << 22):  # one code at a time, a few, all
            monkeypatch.setattr(grid, "_CHUNK_NUMEL", numel)
            assert (neighbours(codes, count) == expected[:, :count]).all()
    with pytest.raises(ValueError, match="1 to 59 neighbours"):
        neighbours(codes, 60)
