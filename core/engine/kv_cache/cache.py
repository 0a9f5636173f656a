"""The KV cache of a batch whose rows differ in length, with scratch slots for draft trees.

The committed tokens of a row are its entries in the store plus one or more pending tokens that have not been read; the
last pending token is the root of the next draft. A pass writes pending tokens and draft nodes into the slots after the
entries (the scratch). The accepted path is then moved forward and becomes entries; the other slots are overwritten
later. On a GPU the host follows the lengths without synchronising, exactly or as upper bounds. Independent of weights,
distributions and rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.draft import Draft, Verdict
from outrider.core.engine.cuda_graphs import GraphPool
from outrider.core.engine.kv_cache import buckets, mapped
from outrider.core.engine.kv_cache.rows import (
    Rows,
    advance,
    full_mask,
    prefilled_rows,
    scratch_mask,
    sequence_positions,
    unread_rows,
)
from outrider.core.engine.types import PassLayout
from outrider.core.protocol import Prompts


class Cache:
    """The store of keys and values, and the state of its rows."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape  # layers, key heads + value heads, head size (in 8 bits: slot size)
        self.dtype, self.device = dtype, device
        self.exact = device.type == "cpu"
        self.store = torch.zeros(0)  # [L, B, 2 K, C, d]
        self._lent: Tensor | None = None  # the buffer whose first rows the store is; None: it is the store
        self._mapped: mapped.Mapped | None = None  # whose tensor the buffer is
        self.with_keys = False  # whether layouts say which position each slot has, for attention windows
        self.long = False  # whether its keys have LongRoPE's long factors
        self.pool: GraphPool | None = None  # lends stores with fixed addresses, for captured passes
        self.context = 1 << 20  # tokens that a row may have
        self._fixed_columns: int | None = None  # while a recording is made that holds for many lengths
        self.block = 32  # slots that are kept together
        self.reclaim: Callable[[], bool] = lambda: False  # drops what was kept longest; False: nothing is kept

    def begin(self, prompts: Prompts) -> None:
        """Start with these prompts, all pending."""
        longest = max(map(len, prompts))
        self.rows = unread_rows(prompts, self.device)
        self.scored = -1  # draft nodes in the scratch; -1: not even the pending tokens
        self.scratch_owner: object = None  # the model or view that wrote the scratch
        layers, heads, dim = self.shape
        self._release()
        shape = layers, len(prompts), heads, longest + 64, dim
        self.store = self._allocate(shape if self.pool is None else self.pool.roomy(shape, self.dtype, self.context))

    def _allocate(self, shape: tuple[int, int, int, int, int]) -> Tensor:
        if self.pool is not None:
            return self.pool.borrow(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _release(self) -> None:
        if self.pool is not None and self.store.dim() == 5:
            self.pool.give_back(self.store if self._lent is None else self._lent)
        self.store, self._lent, self._mapped = torch.zeros(0), None, None

    def end(self) -> None:
        self._release()
        empty = torch.zeros(0, dtype=torch.long, device=self.device)
        self.rows = Rows(empty, empty[:, None], empty, (), (), True)

    def prompt_chunk(self, start: int, stop: int, rows: slice = slice(None)) -> tuple[Tensor, PassLayout]:
        """Prompt tokens `start` to `stop` - 1 of these rows, ids [B, Q], and their layout. Shorter rows read padding,
        which is never attended and is overwritten by a later pass."""
        self.grow(stop)
        return self.rows.pending[rows, start:stop], self.sequential_layout(start, stop)

    def sequential_layout(self, start: int, stop: int) -> PassLayout:
        """The layout of tokens `start` to `stop` - 1 of a plain sequence, with a causal mask."""
        positions = torch.arange(start, stop, device=self.device)
        mask = torch.arange(stop, device=self.device) <= positions[:, None]
        return PassLayout(positions[None], stop, mask[None], start)

    def part(self, rows: slice, layout: PassLayout) -> tuple[Tensor, PassLayout]:
        """The store and a layout for a pass over these rows only."""
        return self.store[:, rows], layout

    # ---- slots

    @property
    def slots(self) -> int:
        """The slots that each row may use."""
        return self.store.shape[3]

    def hold(self, row: int, count: int) -> None:
        """Make room for this many slots in a row."""
        self.grow(count)

    def read(self, start: int, stop: int, rows: slice = slice(None)) -> Tensor:
        """Slots `start` to `stop` - 1 of these rows [L, B, 2 K, n, d], in place if rows are contiguous."""
        return self.store[:, rows, :, start:stop]

    # ---- what rows share (outrider.core.engine.kv_cache.prefixes)

    def copy(self, row: int, source: int, count: int) -> None:
        """Fill the first slots of an empty row with those of another."""
        self.grow(count)
        self.store[:, row, :, :count] = self.store[:, source, :, :count]

    def keep_slots(self, row: int, start: int, stop: int) -> tuple[Any, int]:
        """Slots of a row that leaves, at most a `block`, as `fill` takes them, and their bytes."""
        kept = self.store[:, row, :, start:stop].clone()
        return kept, kept.nbytes

    def fill(self, row: int, kept: Sequence[Any], count: int) -> None:
        """Fill the first slots of an empty row with kept ones."""
        self.grow(count)
        self.store[:, row, :, :count] = torch.cat([*kept], 2)[:, :, :count]

    def drop(self, kept: Any) -> None:
        """Forget kept slots."""

    # ---- continuous batching

    def provide(self, rows: int, slots: int | None) -> None:
        """Make room for this many rows that have `slots` slots together (None: as many as are common) and that stay
        where they are. Nothing to do where a larger buffer costs only addresses, or is made by `arrange`."""

    def open(self) -> None:
        """Start without rows."""
        layers, heads, dim = self.shape
        empty = torch.zeros(0, dtype=torch.long, device=self.device)
        self.rows, self.scored, self.scratch_owner = Rows(empty, empty[:, None], empty, (), (), False), -1, None
        self._release()
        self.store = torch.zeros(layers, 0, heads, 64, dim, dtype=self.dtype, device=self.device)

    @property
    def bytes(self) -> int:
        """The size of the store."""
        return self.store.numel() * self.store.element_size()

    @property
    def slot_bytes(self) -> int:
        """The size of one token's keys and values in all layers."""
        layers, heads, dim = self.shape
        return layers * heads * dim * self.dtype.itemsize

    @property
    def page(self) -> int | None:
        """The slots for which a row of a continuous batch holds memory are a multiple of this; None: all of them."""
        if not self.exact or not self.slot_bytes or not mapped.available():
            return None
        smallest = 4096 // (self.shape[2] * self.dtype.itemsize)
        return max(-(-smallest // 64) * 64, 64)

    def free(self, row: int) -> None:
        """Return the memory of a row."""
        self.set_row(row, 0, 0)
        self._free(self.store, row)

    def arrange(self, order: Sequence[int], width: int) -> None:
        """Make row i the former row order[i], or an empty row for -1. The store gets `width` slots per row, or more if
        a row needs them."""
        self._arrange_rows(order)
        host, wait = self.rows.host, self.rows.pending.shape[1]
        layers, batch, heads, size, dim = self.store.shape
        width = -(-max(width, max(host, default=0) + wait) // 64) * 64
        if self.pool is None and self.page is None:
            if list(order) != list(range(batch)) or width != size:
                store = self.store.new_zeros(layers, len(order), heads, width, dim)
                for new, old in enumerate(order):
                    if old >= 0 and (filled := min(host[new], size)):
                        store[:, new, :, :filled] = self.store[:, old, :, :filled]
                self.store = store
            return
        self._arrange_in_place(order, [min(count, size) for count in host], width)

    def _arrange_rows(self, order: Sequence[int]) -> None:
        rows = self.rows
        host = tuple(rows.host[row] if row >= 0 else 0 for row in order)
        host_pending = tuple(rows.host_pending[row] if row >= 0 else 1 for row in order)
        wait = max(host_pending, default=1) if self.exact else max(rows.pending.shape[1], 1)  # rows that leave had more
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        entries = F.pad(rows.entries, (0, 1), value=0)[index]  # index -1 selects the padding
        pending_count = F.pad(rows.pending_count, (0, 1), value=1)[index]
        pending = F.pad(rows.pending, (0, wait - rows.pending.shape[1], 0, 1))[index]
        self.rows = Rows(entries, pending, pending_count, host, host_pending, False, rows.bounds)
        self.scored, self.scratch_owner = -1, None

    def _arrange_in_place(self, order: Sequence[int], host: Sequence[int], width: int) -> None:
        """Move the rows within one buffer, which is replaced by a larger one if it is too small. A buffer of the pool
        has the same address while rows come and go, so that recorded passes stay valid."""
        buffer = self.store if self._lent is None else self._lent
        filled = [(new, old, host[new]) for new, old in enumerate(order) if old >= 0 and host[new]]
        if buffer.shape[1] < len(order) or buffer.shape[3] < width:
            larger, mapping = self._larger(buffer, len(order), width)
            for new, old, count in filled:
                larger[:, new, :, :count] = self.store[:, old, :, :count]
            if self.pool is not None:
                self.pool.give_back(buffer)
            buffer, self._mapped = larger, mapping
        else:
            moved = [(new, self.store[:, old, :, :count].clone()) for new, old, count in filled if new != old]
            kept = {new for new, old, _ in filled if new == old}
            for row in range(self.store.shape[1]):
                if row not in kept:
                    self._free(buffer, row)
            for new, part in moved:
                buffer[:, new, :, : part.shape[2]] = part
        self._lent, self.store = buffer, buffer[:, : len(order)]

    def _larger(self, buffer: Tensor, rows: int, width: int) -> tuple[Tensor, mapped.Mapped | None]:
        """A buffer for more rows, or wider ones."""
        layers, before, heads, size, dim = buffer.shape
        if self.pool is not None:
            return self.pool.borrow((layers, max(rows, before), heads, width, dim), self.dtype), None
        rows = max(1 << max(rows - 1, 0).bit_length(), before)  # what is not used costs only addresses
        size = max((1 << (width - 1).bit_length()) + 64, size)  # not a power of two, for processors' caches
        mapping = mapped.Mapped((layers, rows, heads, size, dim), self.dtype)
        return mapping.tensor, mapping

    def _free(self, buffer: Tensor, row: int) -> None:
        """Return the memory of a row of the buffer, if that is possible."""
        if self._mapped is not None:
            for layer in buffer:
                self._mapped.release(layer[row])

    def set_row(self, row: int, entries: int, root: int) -> None:
        """Record that a row has this many entries and that only `root` is pending."""
        rows = self.rows
        read, pending, count = rows.entries.clone(), rows.pending.clone(), rows.pending_count.clone()
        read[row], pending[row, 0], count[row] = entries, root, 1
        host = (*rows.host[:row], entries, *rows.host[row + 1 :])
        host_pending = (*rows.host_pending[:row], 1, *rows.host_pending[row + 1 :])
        self.rows = Rows(read, pending, count, host, host_pending, False, rows.bounds, rows.table)

    def set_prefilled(self, prompts: Prompts) -> None:
        """Record that all of each prompt but its last token has been read."""
        self.rows = prefilled_rows(prompts, self.device, self.exact)

    def plan(
        self, draft: Draft, since: int | None, gap: int = 0, *, lengths: bool = False
    ) -> tuple[Tensor, PassLayout]:
        """The ids [B, Q] to feed and their layout: pending tokens and draft nodes, or with `since` the nodes from that
        one on. The first `gap` scratch slots are left to another owner. `lengths`: attention reads them on a device."""
        rows = self.rows
        wait, size = rows.pending.shape[1], draft.size
        skip = 0 if since is None else wait + since
        total = wait + size
        self.reserve(gap + total)
        rows = self.rows
        columns = self.columns(max(rows.host) + gap + total, lengths)
        if not rows.uniform or rows.table is not None:
            return self.device_plan(rows, draft, columns, skip, gap, lengths=lengths)
        ids = torch.cat([rows.pending, draft.tokens], 1)[:, skip:]
        scratch_positions = sequence_positions(rows, draft)
        positions = scratch_positions[:, skip:]
        first, start = rows.host[0], rows.host[0] + gap
        keys = self._key_positions(rows, scratch_positions, start + total, gap) if self.with_keys else None
        if draft.tree.is_chain and total - skip == 1 and not gap:
            return ids, PassLayout(positions, start + total, None, start + skip, None, keys)
        mask = full_mask(first, gap, scratch_mask(rows, draft)[:, skip:])
        return ids, PassLayout(positions, start + total, mask, start + skip, None, keys)

    def device_plan(
        self, rows: Rows, draft: Draft, columns: int, skip: int = 0, gap: int = 0, *, lengths: bool = False
    ) -> tuple[Tensor, PassLayout]:
        """`plan` with the rows' lengths read on the device only: a recording of it holds for other lengths."""
        total = rows.pending.shape[1] + draft.size
        ids = torch.cat([rows.pending, draft.tokens], 1)[:, skip:]
        scratch_positions = sequence_positions(rows, draft)
        scratch = scratch_mask(rows, draft)[:, skip:].expand(len(ids), -1, -1)
        slots = rows.entries[:, None] + torch.arange(gap + skip, gap + total, device=self.device)
        positions = scratch_positions[:, skip:]
        if lengths:
            mask = F.pad(scratch, (gap, 0)) if gap else scratch
            return ids, PassLayout(positions, columns, mask, None, slots, None, rows.entries, rows.table)
        column = torch.arange(columns, device=self.device)
        offset = (column - rows.entries[:, None])[:, None]  # [B, 1, C] from the end of the entries
        place = offset - gap
        inside = (place >= 0) & (place < total)
        visible = scratch.gather(2, place.clamp(0, total - 1).expand(-1, scratch.shape[1], -1))
        keys = self._key_positions(rows, scratch_positions, columns, gap) if self.with_keys else None
        mask = (offset < 0) | (inside & visible)
        return ids, PassLayout(positions, columns, mask, None, slots, keys, None, rows.table)

    def _key_positions(self, rows: Rows, scratch: Tensor, columns: int, gap: int) -> Tensor:
        """[B, columns] the position of the token in each slot: an entry's is its slot, the scratch's are given [B, T]
        (from `gap` on)."""
        column = torch.arange(columns, device=self.device)
        place = column - rows.entries[:, None] - gap
        inside = (place >= 0) & (place < scratch.shape[1])
        positions = scratch.expand(len(place), -1).gather(1, place.clamp(0, scratch.shape[1] - 1))
        return torch.where(inside, positions, column)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> Tensor:
        """Commit the first `count` [B] emitted tokens of each row; returns them [B, D + 1], padded with -1."""
        rows, wait = self.rows, self.rows.pending.shape[1]
        moves = self.moves(draft, verdict.path.shape[1])
        self.rows, tokens, kept = advance(rows, self.scored, draft, verdict, count, self.exact)
        if moves:
            self.reserve(wait + max(wait, kept.shape[1]))  # the draft may be deeper than its scored part
            if self.exact:
                self._move_where_needed(rows, verdict.path, kept)
            else:
                self.move(rows, verdict.path, kept)
        self.scored = -1
        return tokens

    def moves(self, draft: Draft, depth: int) -> bool:
        """Whether an accepted path of the scored draft may be in other slots than those of entries."""
        return self.scored > 0 and depth > 0 and not (self.rows.pending.shape[1] == 1 and draft.tree.is_chain)

    def move(self, rows: Rows, path: Tensor, kept: Tensor) -> None:
        """Copy the kept nodes of the paths [B, D] to the slots after the entries and pending tokens, in all layers."""
        target = (rows.entries + rows.pending_count)[:, None] + torch.arange(kept.shape[1], device=self.device)
        source = (rows.entries + rows.pending.shape[1])[:, None] + path
        row = torch.arange(len(path), device=self.device)[:, None]
        source = torch.where(kept, source, target)
        (page, target), (read_page, source) = rows.located(row, target), rows.located(row, source)
        self.store[:, page, :, target] = self.store[:, read_page, :, source]

    def _move_where_needed(self, rows: Rows, path: Tensor, kept: Tensor) -> None:
        """As `move`, but computed on the host: most nodes are in the right slot already."""
        wait, count = rows.pending.shape[1], rows.pending_count.tolist()
        moves = [
            (row, rows.host[row] + wait + node, rows.host[row] + count[row] + place)
            for row, (nodes, flags) in enumerate(zip(path.tolist(), kept.tolist(), strict=True))
            for place, (node, flag) in enumerate(zip(nodes, flags, strict=True))
            if flag and wait + node != count[row] + place
        ]
        if moves:
            row, source, target = torch.tensor(moves).unbind(1)
            (page, target), (read_page, source) = rows.located(row, target), rows.located(row, source)
            self.store[:, page, :, target] = self.store[:, read_page, :, source]

    @contextmanager
    def on_device(self, rows: Rows, columns: int) -> Iterator[None]:
        """While open, the rows are these, whose lengths only the device knows, and passes read this many columns."""
        before = self.rows, self.scored, self.scratch_owner
        self.rows, self.scored, self._fixed_columns = rows, -1, columns
        try:
            yield
        finally:
            self.rows, self.scored, self.scratch_owner = before
            self._fixed_columns = None

    def mark(self) -> Rows:
        return self.rows

    def rewind(self, rows: Rows) -> None:
        """Return to a mark; later marks become invalid. If nothing was kept since, the pending tokens stay read and
        only the draft's nodes are dropped."""
        self.scored = min(self.scored, 0) if rows.entries is self.rows.entries else -1
        self.rows = rows

    def columns(self, needed: int, lengths: bool = False) -> int:
        """Columns to read. On a GPU they are rounded up, so that there are few shapes, and fewer where passes are
        captured; all of them where attention reads the rows' lengths itself."""
        if self._fixed_columns is not None:
            return self._fixed_columns
        size = self.slots
        if self.exact or self.pool is None:
            return needed if self.exact else min(-(-needed // 64) * 64, size)
        return size if lengths else buckets.bucket(needed, size)

    def larger(self, columns: int) -> list[int]:
        """The numbers of columns that passes over these rows may read later."""
        return buckets.larger(columns, self.slots)

    def reserve(self, extra: int) -> None:
        """Make room for this many slots after the entries of the longest row."""
        if max(self.rows.host) + extra <= self.slots:
            return
        self._count()
        self.grow(max(self.rows.host) + extra)

    def _count(self) -> None:
        """Replace the host's bounds, which may be loose, by the lengths; this synchronisation is rare."""
        if self.rows.bounds:
            host, host_pending = torch.stack([self.rows.entries, self.rows.pending_count]).tolist()
            self.rows = replace(self.rows, host=tuple(host), host_pending=tuple(host_pending), bounds=False)

    def grow(self, needed: int) -> None:
        """Make room for this many slots in each row."""
        layers, batch, heads, size, dim = self.store.shape
        if needed <= size:
            return
        larger = self._allocate((layers, batch, heads, -(-max(needed, size * 3 // 2) // 64) * 64, dim))
        larger[:, :, :, :size] = self.store
        self._release()
        self.store = larger
