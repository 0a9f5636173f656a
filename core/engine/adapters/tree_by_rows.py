"""Scores a tree with a model that takes no tree mask: each path from the root to a leaf becomes a batch row.

Afterwards the cache is as if the tree had been read in one pass, with a column per pending token and node. Of the model
it uses only the keys and values of its transformers cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.engine.kv_cache.rows import Rows, sequence_positions

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class BranchScorer:
    """`forward` runs ids [R, Q] with a mask [R, columns + Q] and positions [R, Q] after the cache's columns."""

    forward: Forward

    def __call__(self, cache: Any, rows: Rows, draft: Draft, filled: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits [B, P + N, V] and hidden states of the pending tokens and the nodes. `filled` [B, T]: which columns of
        the cache hold a token."""
        device, (batch, wait) = draft.tokens.device, rows.pending.shape
        paths, locations = leaf_paths(draft)
        width, depth = len(paths[0]), max(len(path) for row in paths for path in row)
        table = torch.tensor([[[*p, *[-1] * (depth - len(p))] for p in row] for row in paths], device=device)
        real_nodes = (table >= 0).flatten(0, 1)  # [B W, D]
        nodes = table.clamp(min=0).flatten(1)  # [B, W D]
        tokens = draft.tokens.gather(1, nodes).view(batch * width, depth)
        ids = torch.cat([rows.pending.repeat_interleave(width, 0), tokens], 1)
        tree_positions = sequence_positions(rows, draft)
        node_positions = tree_positions[:, wait:].gather(1, nodes).view(batch * width, depth)
        positions = torch.cat([tree_positions[:, :wait].repeat_interleave(width, 0), node_positions], 1)
        real_pending = torch.arange(wait, device=device) < rows.pending_count[:, None]
        shared = torch.cat([filled, real_pending], 1).repeat_interleave(width, 0)
        mask = torch.cat([shared, real_nodes], 1).long()
        before = [(layer.keys, layer.values) if layer.is_initialized else None for layer in cache.layers]
        cache.batch_repeat_interleave(width)
        logits, hidden = self.forward(ids, mask, positions)
        # the column of each pending token and node among the columns of the row's branches, [B, P + N]
        pending_columns = torch.arange(wait, device=device).expand(batch, -1)
        branch, level = torch.tensor(locations, device=device).unbind(-1)  # [B, N] each
        columns = torch.cat([pending_columns, branch * (wait + depth) + wait + level], 1)
        for layer, old in zip(cache.layers, before, strict=True):
            start = 0 if old is None else old[0].shape[2]
            keys, values = (_merge_branches(part[:, :, start:], columns, width) for part in (layer.keys, layer.values))
            layer.keys = keys if old is None else torch.cat([old[0], keys], 2)
            layer.values = values if old is None else torch.cat([old[1], values], 2)

        def at_columns(part: Tensor) -> Tensor:
            return part.view(batch, -1, part.shape[2]).gather(1, columns[..., None].expand(-1, -1, part.shape[2]))

        return at_columns(logits), {tap: at_columns(states) for tap, states in hidden.items()}


def _merge_branches(part: Tensor, columns: Tensor, width: int) -> Tensor:
    """Keys or values [B W, H, Q, d] of all branches -> those at `columns` [B, K] of each row, [B, H, K, d]."""
    rows, heads, count, dim = part.shape
    merged = part.view(rows // width, width, heads, count, dim).transpose(1, 2).flatten(2, 3)
    return merged.gather(2, columns[:, None, :, None].expand(-1, heads, -1, dim))


def leaf_paths(draft: Draft) -> tuple[list[list[list[int]]], list[list[tuple[int, int]]]]:
    """For each row the node paths to its leaves, padded to equally many per row; and for each node the index of a path
    that contains it and its place in that path."""
    paths: list[list[list[int]]] = []
    locations: list[list[tuple[int, int]]] = []
    for parents in draft.tree.parents.expand(draft.rows, -1).tolist():
        to_node: list[list[int]] = []
        for node, parent in enumerate(parents):
            to_node.append([*(to_node[parent] if parent >= 0 else []), node])
        leaves = [to_node[node] for node in range(len(parents)) if node not in parents]
        path_of = {node: index for index, path in enumerate(leaves) for node in path}
        paths.append(leaves)
        locations.append([(path_of[node], len(to_node[node]) - 1) for node in range(len(parents))])
    width = max(map(len, paths))
    return [[*row, *[row[0]] * (width - len(row))] for row in paths], locations
