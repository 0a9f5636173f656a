"""Retrieval from a long KV cache (TriForce, arXiv 2404.11912): for each layer and key/value head, the chunks whose mean
key has the highest attention score with the root's queries.

Independent of drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.draft import Draft
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.int8 import unpack
from outrider.core.engine.network import Network


def root_queries(network: Network, cache: Cache) -> Tensor:
    """The queries [L, B, H, d] of each row's root in each layer, from an extra pass over the cache."""
    cfg, depth = network.config, len(network.layers)
    gap = cache.rows.pending.shape[1] + max(cache.scored, 0)  # keeps existing scratch intact
    ids, layout = cache.plan(Draft.empty(len(cache.rows.host), cache.device), None, gap)
    network.ensure_positions(max(cache.rows.host) + gap + ids.shape[1] + 1, cache.long)
    taps: dict[str, list[Tensor]] = {"embedding": [], **{f"layer.{index}": [] for index in range(depth - 1)}}
    network.run(network.embed(ids), cache.store, layout, taps)
    root = (cache.rows.pending_count - 1)[:, None, None]
    positions = (cache.rows.committed - 1)[:, None]
    queries = []
    for index, (states,) in enumerate(taps.values()):
        x = states.gather(1, root.expand(-1, 1, cfg.hidden_size))[:, 0].to(network.residual_dtype)
        queries.append(network.queries(x, index, positions))
    return torch.stack(queries)


def top_chunks(cache: Cache, queries: Tensor, sinks: int, recent: int, count: int, size: int) -> Tensor:
    """The slots [L, B, K, count size] of the best `count` chunks of `size` entries between the first `sinks` and the
    last `recent` ones, for each key/value head, in order. Undefined for rows that are too short."""
    layers, rows, heads, _ = queries.shape
    end = (cache.rows.entries - recent).clamp(min=0)  # [B] of the entries to choose from
    number = (max(cache.rows.host) - recent - sinks) // size
    keys = cache.read(sinks, sinks + number * size)
    kv = keys.shape[2] // 2
    keys = keys[:, :, :kv]
    if keys.dtype == torch.int8:
        keys = unpack(keys, queries.shape[3], queries.dtype)
    means = keys.reshape(*keys.shape[:3], number, size, -1).mean(4)  # [L, B, K, n, d]
    grouped = queries.view(layers, rows, kv, heads // kv, -1).to(means.dtype)
    attention = torch.einsum("lbkgd,lbknd->lbkgn", grouped, means).float() / queries.shape[3] ** 0.5
    starts = sinks + torch.arange(number, device=cache.device) * size
    usable = (starts + size <= end[:, None])[:, None]  # [B, 1, n]
    weight = F.softmax(attention, -1).sum(3).masked_fill(~usable, -1.0)  # summed over the query heads of a KV head
    best = weight.topk(count, -1).indices.sort(-1).values  # [L, B, K, count]
    slots = starts[best][..., None] + torch.arange(size, device=cache.device)
    return slots.flatten(3)
