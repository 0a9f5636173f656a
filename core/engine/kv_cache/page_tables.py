"""Slots of a store of pages [L, P, 2 K, PAGE, d], found by a table [B, N] of each row's pages. Independent of which
pages are in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.engine.types import PassLayout

PAGE = 64  # slots


def located(table: Tensor | None, row: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of slots in the second and the fourth dimension of a store; without a table [L, B, 2 K, C, d]."""
    return (row, slot) if table is None else (table[row, slot // PAGE], slot % PAGE)


def gathered(store: Tensor, table: Tensor) -> Tensor:
    """A copy of the slots of all pages of the table, [L, B, 2 K, N PAGE, d]."""
    pages = store.index_select(1, table.flatten())
    split = pages.view(len(store), *table.shape, *pages.shape[2:])  # [L, B, N, 2 K, PAGE, d]
    return split.transpose(2, 3).flatten(3, 4)


@contextmanager
def contiguous(store: Tensor, layout: PassLayout, count: int) -> Iterator[tuple[Tensor, PassLayout]]:
    """A copy with contiguous rows, for a pass over `count` tokens that reads no tables; what it writes there is copied
    into the pages afterwards."""
    table = layout.table
    assert table is not None
    copied = gathered(store, table[:, : -(-layout.columns // PAGE)])
    yield copied, replace(layout, table=None)
    slot = layout.slots
    if slot is None:
        assert layout.start is not None
        slot = torch.arange(layout.start, layout.start + count, device=store.device).expand(len(table), -1)
    row = torch.arange(len(table), device=store.device)[:, None]
    page, place = located(table, row, slot)
    store[:, page, :, place] = copied[:, row, :, slot]
