"""Which part of a long cache the next tokens are likely to look at: for each layer and head, the chunks whose average
key agrees best with what the last token asks for (TriForce's retrieval, arXiv 2404.11912).

Knows a network and its cache; nothing of drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.draft import Draft
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.int8 import unpack
from outrider.core.engine.network import Network


def asked(network: Network, cache: Cache) -> Tensor:
    """What the root of each row asks for in each layer: queries [L, B, H, d], by a pass of its own over the cache."""
    cfg, depth = network.config, len(network.layers)
    gap = cache.rows.pending.shape[1] + max(cache.scored, 0)  # somebody's scratch may be there
    ids, places = cache.plan(Draft.empty(len(cache.rows.host), cache.device), None, gap)
    network.ensure_positions(max(cache.rows.host) + gap + ids.shape[1] + 1)
    taps: dict[str, list[Tensor]] = {"embedding": [], **{f"layer.{index}": [] for index in range(depth - 1)}}
    network.run(network.embed(ids), cache.store, places, taps)
    root = (cache.rows.waiting - 1)[:, None, None]
    stands = (cache.rows.entries + cache.rows.waiting - 1)[:, None]
    found = []
    for index, (states,) in enumerate(taps.values()):
        x = states.gather(1, root.expand(-1, 1, cfg.hidden_size))[:, 0].to(network.residual_dtype)
        found.append(network.queries(x, index, stands))
    return torch.stack(found)


def most_asked(cache: Cache, queries: Tensor, sinks: int, recent: int, count: int, size: int) -> Tensor:
    """The slots of the `count` chunks of `size` entries, between the sinks and what is recent, that each head of keys
    is asked for most: [L, B, K, count size], in order; nonsense for rows that are too short."""
    layers, rows, heads, _ = queries.shape
    kv = cache.store.shape[2] // 2
    last = (cache.rows.entries - recent).clamp(min=0)  # [B] chunks end before it
    number = (max(cache.rows.host) - recent - sinks) // size
    keys = cache.store[:, :, :kv, sinks : sinks + number * size]
    if keys.dtype == torch.int8:
        keys = unpack(keys, queries.shape[3], queries.dtype)
    means = keys.reshape(*keys.shape[:3], number, size, -1).mean(4)  # [L, B, K, n, d]
    grouped = queries.view(layers, rows, kv, heads // kv, -1).to(means.dtype)
    agree = torch.einsum("lbkgd,lbknd->lbkgn", grouped, means).float() / queries.shape[3] ** 0.5
    starts = sinks + torch.arange(number, device=cache.device) * size
    usable = (starts + size <= last[:, None])[:, None]  # [B, 1, n]
    weight = F.softmax(agree, -1).sum(3).masked_fill(~usable, -1.0)  # a chunk counts for all queries that share a head
    best = weight.topk(count, -1).indices.sort(-1).values  # [L, B, K, count]
    slots = starts[best][..., None] + torch.arange(size, device=cache.device)
    return slots.flatten(3)
