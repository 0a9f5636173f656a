"""Attention of a draft tree's nodes to a KV store, contiguous or of pages, split over the keys as in flash-decoding
(https://pytorch.org/blog/flash-decoding/), in one kernel.

The query heads of a key/value head are rows of one product, so keys and values are not repeated. Lengths and the tree's
mask are read on the device, so a recorded launch holds for every length. The last split of a block to finish, found by
a counter, combines the partial results in the order of the splits, so results do not depend on which one it is."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.kernels.gpu import launched_on

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_WAVES = 2  # programs for each multiprocessor that the splits of few rows aim for
_BLOCKS = 4096  # blocks of query rows in a launch, each with a counter


def counters(device: torch.device) -> Tensor:
    """How many splits of each block of query rows are done: all 0 between launches. Launches that may run at the same
    time need counters of their own."""
    return torch.zeros(_BLOCKS, dtype=torch.int32, device=device)


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tree_attention(
    qkv: Tensor,
    store: Tensor,
    done: Tensor,
    columns: int,
    mask: Tensor | None = None,
    entries: Tensor | None = None,
    table: Tensor | None = None,
    scale: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """The queries in `qkv` [B Q, (H + 2 K) d] over the first `columns` slots of a layer's store [B, 2 K, C, d] ->
    [B Q, H d].

    `mask` [B|1, Q, T]: true where a query attends to a slot. Without `entries`, T is `columns`. With `entries` [B] the
    mask is that of the T slots after each row's entries; the entries are attended to and later slots are not. `done`:
    counters. `splits`: of the keys; None: as many as keep the device busy. `table` [B, N]: the pages of each row, if
    the store is of pages [P, 2 K, slots, d], a multiple of 64 slots each."""
    rows, twice, page, dim = store.shape
    rows = rows if table is None else len(table)
    kv, count = twice // 2, len(qkv) // rows
    heads = qkv.shape[1] // dim - twice
    group = heads // kv
    out = torch.empty(len(qkv), heads * dim, dtype=qkv.dtype, device=qkv.device)
    if not out.numel():
        return out
    narrow = qkv.dtype.itemsize == 2
    height = min(max(triton.next_power_of_2(count * group), 16), 64 if narrow and dim <= 128 else 16)
    width = 64 if narrow and dim <= 128 else 32
    blocks = rows * kv * triton.cdiv(count * group, height)
    if splits is None:
        wanted = min(triton.cdiv(_WAVES * _processors(qkv.device), blocks), triton.cdiv(columns, width))
        splits = 1 if wanted < 2 else 4 if wanted < 8 else 16  # few, as each is compiled
    if blocks > len(done):
        splits = 1
    size = triton.next_power_of_2(max(dim, 16))
    parts = torch.empty(blocks * splits * height * (size + 2) if splits > 1 else 1, device=qkv.device)
    given = qkv if mask is None else mask.view(torch.int8) if mask.dtype == torch.bool else mask
    with launched_on(qkv):
        _tree_attention[(splits, triton.cdiv(count * group, height), rows * kv)](
            qkv,
            store,
            out,
            given,
            qkv if entries is None else entries,
            qkv if table is None else table,
            parts,
            done,
            count,
            kv,
            columns,
            0 if table is None else table.shape[1],
            0 if mask is None else mask.shape[2],
            (scale or dim**-0.5) * 1.4426950408889634,
            *store.stride()[:3],
            0 if mask is None or len(mask) == 1 else mask.stride(0),
            0 if mask is None else mask.stride(1),
            0 if mask is None else mask.stride(2),
            MASK=mask is not None,
            ENTRIES=entries is not None,
            PAGE=0 if table is None else page,
            SPLITS=splits,
            GROUP=group,
            DIM=dim,
            SIZE=size,
            HEIGHT=height,
            WIDTH=width,
            UNROLL=min(splits, 4) if height == 16 else 1,
            WIDEN=_INTERPRETED,
            num_warps=4,
            num_stages=2,
        )
    return out


@triton.jit(do_not_specialize=["count", "kv", "columns", "pages", "tree", "mask_row", "mask_query"])  # type: ignore[untyped-decorator]
def _tree_attention(  # type: ignore[no-untyped-def]
    qkv, store, out, mask, entries, table, parts, done, count, kv, columns, pages, tree, scale,
    store_row, store_head, store_slot, mask_row, mask_query, mask_slot,
    MASK: tl.constexpr, ENTRIES: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    split, block, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = pair // kv, pair % kv
    line = block * HEIGHT + tl.arange(0, HEIGHT)  # a query head of a node
    node, member = line // GROUP, line % GROUP
    live = node < count
    place = tl.arange(0, SIZE)
    real = place < DIM
    start = (row.to(tl.int64) * count + node) * (kv * GROUP + 2 * kv) * DIM
    query = tl.load(
        qkv + (start + (head * GROUP + member) * DIM)[:, None] + place[None, :],
        mask=live[:, None] & real[None, :],
        other=0.0,
    )
    kind = query.dtype
    if WIDEN:
        query = query.to(tl.float32)
    begin = 0
    end = columns
    if ENTRIES:
        begin = tl.load(entries + row).to(tl.int32)
        end = tl.minimum(begin + tree, columns)
    share = tl.cdiv(tl.cdiv(end, SPLITS), WIDTH) * WIDTH
    keys = store + head.to(tl.int64) * store_head
    top = tl.full((HEIGHT,), -1e30, tl.float32)
    total = tl.zeros((HEIGHT,), tl.float32)
    sums = tl.zeros((HEIGHT, SIZE), tl.float32)
    for first in range(split * share, tl.minimum((split + 1) * share, end), WIDTH):
        slot = first + tl.arange(0, WIDTH)
        inside = slot < end
        past = row
        at = slot
        if PAGE > 0:  # all of these slots are in one page
            past = tl.load(table + row * pages + first // PAGE)
            at = slot % PAGE
        at = past.to(tl.int64) * store_row + at.to(tl.int64) * store_slot
        key = tl.load(keys + at[None, :] + place[:, None], mask=inside[None, :] & real[:, None], other=0.0)
        at += kv.to(tl.int64) * store_head
        value = tl.load(keys + at[:, None] + place[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        if WIDEN:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        seen = inside[None, :] & live[:, None]
        if MASK:
            after = slot - begin
            bits = tl.load(
                mask + row * mask_row + node[:, None] * mask_query + after[None, :] * mask_slot,
                mask=seen & (after >= 0)[None, :],
                other=1,
            )
            seen = seen & (bits != 0)
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        decay = tl.exp2(top - higher)
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(kind)
        if WIDEN:
            weights = weights.to(tl.float32)
        sums = sums * decay[:, None] + tl.dot(weights, value, input_precision="ieee")
        top = higher
    into = out + ((row.to(tl.int64) * count + node) * kv * GROUP + head * GROUP + member)[:, None] * DIM
    into += place[None, :]
    shown = live[:, None] & real[None, :]
    if SPLITS == 1:
        tl.store(into, (sums / tl.maximum(total, 1e-30)[:, None]).to(kind), mask=shown)
    else:
        each = pair * tl.num_programs(1) + block
        many = tl.num_programs(1) * tl.num_programs(2) * SPLITS * HEIGHT
        lane = tl.arange(0, HEIGHT)
        spot = (each * SPLITS + split) * HEIGHT + lane
        tl.store(parts + spot, top)
        tl.store(parts + many + spot, total)
        box = parts + 2 * many + place[None, :]
        tl.store(box + spot.to(tl.int64)[:, None] * SIZE, sums, mask=(total > 0)[:, None])
        tl.debug_barrier()  # all of the program's stores come before the counter
        if tl.atomic_add(done + each, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(done + each, 0)
            every = (each * SPLITS + tl.arange(0, SPLITS))[:, None] * HEIGHT + lane[None, :]
            top = tl.max(tl.load(parts + every, cache_modifier=".cg"), 0)
            total = tl.zeros((HEIGHT,), tl.float32)
            sums = tl.zeros((HEIGHT, SIZE), tl.float32)
            for base in range(0, SPLITS, UNROLL):
                for ahead in tl.static_range(UNROLL):
                    from_split = (each * SPLITS + base + ahead) * HEIGHT + lane
                    mass = tl.load(parts + many + from_split, cache_modifier=".cg")
                    decay = tl.exp2(tl.load(parts + from_split, cache_modifier=".cg") - top)
                    total += mass * decay
                    there = box + from_split.to(tl.int64)[:, None] * SIZE
                    filled = (mass > 0)[:, None]
                    sums += decay[:, None] * tl.load(there, mask=filled, other=0.0, cache_modifier=".cg")
            tl.store(into, (sums / tl.maximum(total, 1e-30)[:, None]).to(kind), mask=shown)
