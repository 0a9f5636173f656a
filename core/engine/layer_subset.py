"""Committed tokens read again by a variant of the network, to measure a view or the effect of each sublayer.

The entries of the cache stay as they are. Independent of drafts and rules.
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
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.rows import Rows
from outrider.core.engine.network import Network
from outrider.core.engine.types import PassLayout
from outrider.core.protocol import Prompts


@contextmanager
def reread(cache: Cache, texts: Prompts, count: int) -> Iterator[tuple[Tensor, PassLayout]]:
    """The tokens that precede each of the last `count` tokens of each row, ids [B, count], and a layout to read them
    again in scratch slots, at their own positions. Rows with fewer tokens are padded on the right."""
    rows, device = cache.rows, cache.device
    lengths = [min(count, len(text) - 1) for text in texts]
    starts = [len(text) - 1 - length for text, length in zip(texts, lengths, strict=True)]
    ids = [list(text[start:][:count]) for text, start in zip(texts, starts, strict=True)]
    pending = upload([[*row, *[0] * (count - len(row))] for row in ids], device)
    counts = [max(length, 1) for length in lengths]
    known = upload(starts, device), pending, upload(counts, device), tuple(starts), tuple(counts)
    cache.rows = Rows(*known, False, table=rows.table)
    cache.scored, cache.scratch_owner = -1, None  # existing scratch is overwritten
    try:
        yield cache.plan(Draft.empty(len(texts), device), None, count + rows.pending.shape[1])
    finally:
        cache.rows = rows


def similarity(network: Network, cache: Cache, texts: Prompts, count: int) -> Tensor:
    """[B, 2 L] cosine similarity of the residual stream before and after each attention and MLP, averaged over the last
    `count` tokens."""
    halves = [
        network.map_linears(
            lambda linear: linear, [replace(layer, use_attention=not mlp, use_mlp=mlp) for layer in network.layers]
        )
        for mlp in (False, True)
    ]
    longest = max(map(len, texts))
    similarities = []
    with reread(cache, texts, count) as (ids, layout):
        real = torch.arange(count, device=ids.device) < cache.rows.pending_count[:, None]
        x = network.embed(ids)
        for half in halves:
            half.ensure_positions(longest + 1, cache.long)
        for index in range(len(network.layers)):
            for half in halves:
                after = half.run(x, cache.store, layout, None, (index, index + 1))
                cosine = F.cosine_similarity(x.float(), after.float(), dim=-1).view(ids.shape)
                similarities.append((cosine * real).sum(1) / real.sum(1))
                x = after
    return torch.stack(similarities, 1)
