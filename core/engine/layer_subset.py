"""What has been read, read once more by other weights: how a cheaper view would have done on it, and what each sublayer
does to it. Nothing that the cache holds is written over.

Knows a cache and a network; nothing of drafts or rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.device import upload
from outrider.core.draft import Draft
from outrider.core.engine.kv_cache.cache import Cache, Rows
from outrider.core.engine.network import Network
from outrider.core.engine.types import PassLayout
from outrider.core.protocol import Prompts


@contextmanager
def replayed(cache: Cache, texts: Prompts, count: int) -> Iterator[tuple[Tensor, PassLayout]]:
    """The tokens ahead of each of the last `count` of each row's, ids [B, count], and places for them behind what the
    cache holds, as if they were still to be read. Rows with fewer are padded on the right."""
    kept, device = cache.rows, cache.device
    backs = [min(count, len(text) - 1) for text in texts]
    starts = [len(text) - 1 - back for text, back in zip(texts, backs, strict=True)]
    ids = [list(text[start:][:count]) for text, start in zip(texts, starts, strict=True)]
    pending = upload([[*row, *[0] * (count - len(row))] for row in ids], device)
    left = [max(back, 1) for back in backs]
    cache.rows = Rows(upload(starts, device), pending, upload(left, device), tuple(starts), tuple(left), False)
    cache.scored, cache.writer = -1, None  # whatever scratch there was is written over
    try:
        yield cache.plan(Draft.empty(len(texts), device), None, count + kept.pending.shape[1])
    finally:
        cache.rows = kept


def likeness(network: Network, cache: Cache, texts: Prompts, count: int) -> Tensor:
    """[B, 2 L] cosine of what enters and what leaves each layer's attention and MLP, residual stream included."""
    halves = [
        network.map_linears(
            lambda linear: linear, [replace(layer, use_attention=not mlp, use_mlp=mlp) for layer in network.layers]
        )
        for mlp in (False, True)
    ]
    longest = max(map(len, texts))
    found = []
    with replayed(cache, texts, count) as (ids, places):
        there = torch.arange(count, device=ids.device) < cache.rows.waiting[:, None]
        x = network.embed(ids)
        for half in halves:
            half.ensure_positions(longest + 1)
        for index in range(len(network.layers)):
            for half in halves:
                after = half.run(x, cache.store, places, None, (index, index + 1))
                alike = F.cosine_similarity(x.float(), after.float(), dim=-1).view(ids.shape)
                found.append((alike * there).sum(1) / there.sum(1))
                x = after
    return torch.stack(found, 1)
