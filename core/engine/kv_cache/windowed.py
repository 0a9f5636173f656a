"""A copy of part of each row of a cache: its first and last entries, and chosen ones between. Independent of how those
are chosen."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.engine.kv_cache.cache import Cache


def windowed(cache: Cache, sinks: int, recent: int, layers: int, between: Tensor | None = None) -> tuple[Cache, Tensor]:
    """A new cache with a copy of each row's first `sinks` and last `recent` entries in the first `layers`, and of the
    slots `between` [L, B, K, M]; and the number [B] of entries that it leaves out."""
    rows = cache.rows
    more = 0 if between is None else between.shape[3]
    size = sinks + more + recent
    copied = Cache((layers, *cache.shape[1:]), cache.dtype, cache.device)
    entries = rows.entries.clamp(max=size)
    copied.with_keys, copied.long = cache.with_keys, cache.long
    copied.rows = replace(rows, entries=entries, host=tuple(min(bound, size) for bound in rows.host), table=None)
    copied.scored, copied.scratch_owner = -1, None
    place = torch.arange(min(size, max(rows.host)), device=cache.device)
    left_out = rows.entries - entries
    source = place + torch.where(place < sinks + more, 0, left_out[:, None])  # [B, S]
    slots = source[None, :, None].expand(layers, -1, cache.shape[1], -1)
    if between is not None:
        slots = slots.clone()
        long = (rows.entries >= size)[None, :, None, None]  # shorter rows are copied whole
        middle = slice(sinks, sinks + more)
        chosen = between[:layers].repeat(1, 1, 2, 1)
        slots[..., middle] = torch.where(long, chosen, slots[..., middle])
    layer, row, head = (torch.arange(count, device=cache.device) for count in slots.shape[:3])
    row, slot = rows.located(row[:, None, None], slots)
    copied.store = F.pad(cache.store[layer[:, None, None, None], row, head[:, None], slot], (0, 0, 0, 64))
    return copied, left_out
