"""The norm of queries and keys, their rotation, and the write of keys and values into the cache, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.core.kernels.gpu import launched_on


def rotate_and_write_(
    qkv: Tensor,
    store: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor | int,
    norm: Tensor | None = None,
    eps: float = 0.0,
    table: Tensor | None = None,
) -> Tensor:
    """Queries, keys and values [B Q, (H + 2 K) d] of a layer: rotates the queries in place and returns `qkv`; writes
    the rotated keys and the values to the layer's store [B, 2 K, C, d].

    `cos` and `sin` [positions, d] as `rope_table` makes them; positions [B|1, Q]; `slots`: those written
    [B, Q], or the first one of all rows; `norm`: weights [H + K, d] of an RMSNorm of queries and keys. `table` [B, N]:
    the pages of each row, if the store is of pages [P, 2 K, slots, d]."""
    rows, twice, columns, dim = store.shape
    page, pages = columns, 0
    if table is not None:
        rows, pages = table.shape
        columns = page * pages
    if not qkv.numel():
        return qkv
    count, heads = len(qkv) // rows, qkv.shape[1] // dim - twice
    with launched_on(qkv):
        _rotate_and_write[(rows * count, heads + twice)](
            qkv,
            store,
            cos,
            sin,
            positions,
            positions if isinstance(slots, int) else slots,
            qkv if norm is None else norm,
            qkv if table is None else table,
            slots if isinstance(slots, int) else 0,
            count,
            heads,
            twice // 2,
            columns,
            pages,
            len(cos),
            eps,
            positions.stride(0) if len(positions) > 1 else 0,
            positions.stride(1),
            0 if isinstance(slots, int) else slots.stride(0),
            0 if isinstance(slots, int) else slots.stride(1),
            *store.stride()[:3],
            FIXED=isinstance(slots, int),
            NORM=norm is not None,
            PAGE=0 if table is None else page,
            DIM=dim,
            HALF=triton.next_power_of_2(dim // 2),
            num_warps=1,
        )
    return qkv


@triton.jit(do_not_specialize=["first", "count", "columns", "pages", "known", "position_row", "slot_row"])  # type: ignore[untyped-decorator]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    qkv, store, cos, sin, positions, slots, norm, table, first, count, heads, kv, columns, pages, known, eps,
    position_row, position_step, slot_row, slot_step, store_row, store_head, store_slot,
    FIXED: tl.constexpr, NORM: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    row, node = token // count, token % count
    place = tl.arange(0, HALF)
    inside = place < DIM // 2
    here = qkv + (token.to(tl.int64) * (heads + 2 * kv) + head) * DIM + place
    low = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(here + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if head < heads + kv:
        if NORM:
            scale = 1.0 / tl.sqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / DIM + eps)
            low = low * scale * tl.load(norm + head * DIM + place, mask=inside, other=0.0).to(tl.float32)
            high = high * scale * tl.load(norm + head * DIM + DIM // 2 + place, mask=inside, other=0.0).to(tl.float32)
        position = tl.load(positions + row * position_row + node * position_step)
        position = tl.minimum(tl.maximum(position, 0), known - 1)
        angle = position.to(tl.int64) * DIM + place
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle + DIM // 2, mask=inside, other=0.0).to(tl.float32)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    if head < heads:
        tl.store(here, low.to(qkv.dtype.element_ty), mask=inside)
        tl.store(here + DIM // 2, high.to(qkv.dtype.element_ty), mask=inside)
    else:
        slot = first + node
        if not FIXED:
            slot = tl.load(slots + row * slot_row + node * slot_step).to(tl.int32)
        written = (slot >= 0) & (slot < columns)
        inside = inside & written
        if PAGE > 0:
            row = tl.load(table + row * pages + slot // PAGE, mask=written, other=0)
            slot = slot % PAGE
        there = store + row.to(tl.int64) * store_row + (head - heads).to(tl.int64) * store_head
        there += slot.to(tl.int64) * store_slot + place
        tl.store(there, low.to(store.dtype.element_ty), mask=inside)
        tl.store(there + DIM // 2, high.to(store.dtype.element_ty), mask=inside)
