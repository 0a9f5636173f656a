"""Scoring a tree with a model that only knows sequences: every leaf's branch becomes a row of its own.

Afterwards the cache looks as if the tree had been read in one pass: a column for each waiting token and each node.
Knows where keys and values are kept in a cache of transformers, and nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.engine.kv_cache.cache import Rows, sequence_positions

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Branches:
    """`forward` takes ids [R, Q], a mask [R, columns + Q] and positions [R, Q], behind the cache."""

    forward: Forward

    def __call__(self, cache: Any, rows: Rows, draft: Draft, read: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits [B, P + N, V] and hidden states of the waiting tokens and the nodes; `read` [B, T] says which columns
        of the cache are some token's."""
        device, (batch, wait) = draft.tokens.device, rows.pending.shape
        paths, home = branches(draft)
        width, depth = len(paths[0]), max(len(path) for row in paths for path in row)
        table = torch.tensor([[[*p, *[-1] * (depth - len(p))] for p in row] for row in paths], device=device)
        inside = (table >= 0).flatten(0, 1)  # [B W, D]
        nodes = table.clamp(min=0).flatten(1)  # [B, W D]
        tokens = draft.tokens.gather(1, nodes).view(batch * width, depth)
        ids = torch.cat([rows.pending.repeat_interleave(width, 0), tokens], 1)
        stands = sequence_positions(rows, draft)
        deeper = stands[:, wait:].gather(1, nodes).view(batch * width, depth)
        positions = torch.cat([stands[:, :wait].repeat_interleave(width, 0), deeper], 1)
        real = torch.arange(wait, device=device) < rows.pending_count[:, None]
        mask = torch.cat([torch.cat([read, real], 1).repeat_interleave(width, 0), inside], 1).long()
        before = [(layer.keys, layer.values) if layer.is_initialized else None for layer in cache.layers]
        cache.batch_repeat_interleave(width)
        logits, hidden = self.forward(ids, mask, positions)
        # where each waiting token and node is found among the rows' columns, [B, P + N]
        waits = torch.arange(wait, device=device).expand(batch, -1)
        spots = torch.tensor(home, device=device)  # [B, N, 2] branch and depth
        where = torch.cat([waits, spots[..., 0] * (wait + depth) + wait + spots[..., 1]], 1)
        for layer, old in zip(cache.layers, before, strict=True):
            columns = 0 if old is None else old[0].shape[2]
            keys, values = (collect(part[:, :, columns:], where, width) for part in (layer.keys, layer.values))
            layer.keys = keys if old is None else torch.cat([old[0], keys], 2)
            layer.values = values if old is None else torch.cat([old[1], values], 2)
        pick = where[..., None]
        found = logits.view(batch, -1, logits.shape[2]).gather(1, pick.expand(-1, -1, logits.shape[2]))
        rest = {
            tap: states.view(batch, -1, states.shape[2]).gather(1, pick.expand(-1, -1, states.shape[2]))
            for tap, states in hidden.items()
        }
        return found, rest


def collect(part: Tensor, where: Tensor, width: int) -> Tensor:
    """Columns of branches [B W, H, Q, d] -> those at `where` [B, K] of all of a row's branches, [B, H, K, d]."""
    rows, heads, count, dim = part.shape
    merged = part.view(rows // width, width, heads, count, dim).transpose(1, 2).flatten(2, 3)
    return merged.gather(2, where[:, None, :, None].expand(-1, heads, -1, dim))


def branches(draft: Draft) -> tuple[list[list[list[int]]], list[list[tuple[int, int]]]]:
    """For each row the paths to its leaves, the rows padded to equally many; and for each node a branch that it is on,
    and how deep."""
    paths: list[list[list[int]]] = []
    home: list[list[tuple[int, int]]] = []
    for parents in draft.tree.parents.expand(draft.rows, -1).tolist():
        down: list[list[int]] = []
        for node, parent in enumerate(parents):
            down.append([*(down[parent] if parent >= 0 else []), node])
        leaves = [down[node] for node in range(len(parents)) if node not in parents]
        branch = {node: index for index, path in enumerate(leaves) for node in path}
        paths.append(leaves)
        home.append([(branch[node], len(down[node]) - 1) for node in range(len(parents))])
    width = max(map(len, paths))
    return [[*row, *[row[0]] * (width - len(row))] for row in paths], home
