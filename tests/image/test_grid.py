"""Which codes are near which: nearest first, smaller ids first at equal distance, whatever is worked out at once."""

from __future__ import annotations

import pytest
import torch

from outrider.image import grid
from outrider.image.grid import neighbours


def test_neighbours_are_those_of_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 4, (60, 3), generator=made).double()  # many equal, and at equal distance
    far = (codes[:, None] - codes).square().sum(-1)
    far[torch.arange(60), torch.arange(60)] = torch.inf
    wanted = far.sort(stable=True).indices
    for count in (1, 7, 59):
        for held in (1, 1000, 1 << 22):  # a code at a time, a few, all
            monkeypatch.setattr(grid, "_AT_ONCE", held)
            assert (neighbours(codes, count) == wanted[:, :count]).all()
    with pytest.raises(ValueError, match="1 to 59 neighbours"):
        neighbours(codes, 60)
