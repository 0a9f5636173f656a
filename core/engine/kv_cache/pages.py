"""A KV cache whose rows in a continuous batch share one store by pages, as in PagedAttention (arXiv 2309.06180): a row
holds the pages that it has used, so a short row beside a long one takes little, and the store stays where recorded
passes read it. Passes read a table of each row's pages on the device. Outside of batches rows are contiguous."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.page_tables import PAGE, gathered
from outrider.core.engine.types import PassLayout

_SCRATCH = 1024  # slots beyond the context that a table has room for


class PagedCache(Cache):
    """In a batch the store is [L, pages, 2 K, PAGE, d]. Page 0 takes what empty rows write, and is never attended."""

    def open(self) -> None:
        super().open()
        self.block = PAGE
        self._held: list[list[int]] = []  # the pages of each row; an empty row has none
        self._unused: list[int] = []
        self._holders = Counter[int]()  # of each page: rows, and blocks of `Prefixes`
        self.rows = replace(self.rows, table=torch.zeros(0, 0, dtype=torch.int32, device=self.device))

    @property
    def page(self) -> int | None:
        return PAGE

    @property
    def slots(self) -> int:
        return super().slots if self.rows.table is None else self.rows.table.shape[1] * PAGE

    def provide(self, rows: int, slots: int | None) -> None:
        layers, heads, dim = self.shape
        if slots is None:
            usual = layers, rows, heads, PAGE, dim
            slots = rows * (PAGE if self.pool is None else self.pool.roomy(usual, self.dtype, self.context)[3])
        self._enlarge(1 + slots // PAGE)

    def _enlarge(self, pages: int) -> None:
        """Move to a store of this many pages, if that is more."""
        layers, before, heads, _, dim = self.store.shape
        if pages <= before:
            return
        shape = layers, pages, heads, PAGE, dim
        store = self._allocate(shape) if self.pool is None else self.pool.borrow(shape, self.dtype, exact=True)
        store[:, :before] = self.store
        self._release()
        self.store = store
        self._unused += range(max(before, 1), pages)

    def arrange(self, order: Sequence[int], width: int) -> None:
        held, kept = self._held, {*order}
        self._arrange_rows(order)
        for row, pages in enumerate(held):
            if row not in kept:
                self._return(pages)
        self._held = [held[row] if row >= 0 else [] for row in order]
        if self.store.shape[1] == 0:
            self.provide(len(order), None)
        self._widen(max(map(len, self._held), default=0))

    def _widen(self, pages: int) -> None:
        """Make a table in which rows may have at least this many pages."""
        pages = max(pages, -(-(self.context + _SCRATCH) // PAGE))
        table = torch.zeros(len(self._held), pages, dtype=torch.int32, device=self.device)
        self.rows = replace(self.rows, table=table)
        self._enter([(row, place, page) for row, held in enumerate(self._held) for place, page in enumerate(held)])

    def _enter(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Put pages into the table: rows, places and pages."""
        if pages:
            row, place, page = upload(pages, self.device, torch.long).unbind(1)
            assert self.rows.table is not None
            self.rows.table[row, place] = page.to(torch.int32)

    def hold(self, row: int, count: int) -> None:
        self._hold({row: count})

    def reserve(self, extra: int) -> None:
        if self.rows.table is None:
            super().reserve(extra)
            return
        for exactly in (False, True):
            if exactly:
                self._count()
            counts = {row: count + extra for row, count in enumerate(self.rows.host) if self._held[row]}
            if self._missing(counts) <= len(self._unused):
                break
        self._hold(counts)

    def _missing(self, counts: dict[int, int]) -> int:
        """How many more pages these rows need for so many slots each."""
        return sum(max(-(-count // PAGE) - len(self._held[row]), 0) for row, count in counts.items())

    def _hold(self, counts: dict[int, int]) -> None:
        """Make room for so many slots in these rows."""
        missing = self._missing(counts)
        if not missing:
            return
        while missing > len(self._unused) and self.reclaim():
            pass
        if missing > len(self._unused):
            total = self.store.shape[1]
            self._enlarge(total + max(missing - len(self._unused), total // 2))
        new = list[tuple[int, int, int]]()
        for row, count in counts.items():
            held = self._held[row]
            while len(held) * PAGE < count:
                page = self._unused.pop()
                self._holders[page] = 1
                new.append((row, len(held), page))
                held.append(page)
        if (longest := max(map(len, self._held))) * PAGE > self.slots:
            self._widen(longest)
        else:
            self._enter(new)

    def free(self, row: int) -> None:
        if self.rows.table is None:
            super().free(row)
            return
        self.set_row(row, 0, 0)
        self._return(self._held[row])
        self._held[row] = []
        self.rows.table[row].zero_()

    def part(self, rows: slice, layout: PassLayout) -> tuple[Tensor, PassLayout]:
        if self.rows.table is None:
            return super().part(rows, layout)
        return self.store, replace(layout, table=self.rows.table[rows])

    def read(self, start: int, stop: int, rows: slice = slice(None)) -> Tensor:
        if self.rows.table is None:
            return super().read(start, stop, rows)
        first = start // PAGE
        table = self.rows.table[rows, first : -(-stop // PAGE)]
        return gathered(self.store, table)[..., start - first * PAGE : stop - first * PAGE, :]

    # ---- what rows share: whole pages, since nothing is written into the entries of a row

    def copy(self, row: int, source: int, count: int) -> None:
        if self.rows.table is None:
            super().copy(row, source, count)
        else:
            self.fill(row, self._held[source], count)

    def keep_slots(self, row: int, start: int, stop: int) -> tuple[Any, int]:
        if self.rows.table is None:
            return super().keep_slots(row, start, stop)
        page = self._held[row][start // PAGE]
        self._holders[page] += 1
        return page, PAGE * self.slot_bytes

    def fill(self, row: int, kept: Sequence[Any], count: int) -> None:
        if self.rows.table is None:
            super().fill(row, kept, count)
            return
        whole, rest = divmod(count, PAGE)
        shared, last = kept[:whole], kept[whole : whole + bool(rest)]
        self._holders.update([*shared, *last])
        self._held[row] = [*shared]
        self._enter([(row, place, page) for place, page in enumerate(shared)])
        self._hold({row: count})
        for page in last:  # the row writes behind these slots
            self.store[:, self._held[row][whole], :, :rest] = self.store[:, page, :, :rest]
        self._return(last)

    def drop(self, kept: Any) -> None:
        if self.rows.table is not None:
            self._return([kept])

    def _return(self, pages: Sequence[int]) -> None:
        """Each of these pages has a holder less."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._unused.append(page)
