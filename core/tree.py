"""The tree of a draft's nodes; static shapes are cached. Independent of tokens."""

from __future__ import annotations

from collections import Counter
from functools import cache, cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from outrider.core.device import side_number, upload

_FEW = 256  # parents up to which ancestors are found faster on the host


class Tree:
    """Parents come before children; -1 is the root, the last committed token.

    `parents` is [1, N] if all rows share the shape, else [B, N]. `depth` (levels) and `width` (the most children of a
    node) are numbers on the host, or upper bounds, so that walking a tree does not synchronise with the device.
    """

    def __init__(self, parents: Tensor, depth: int | None = None, width: int | None = None) -> None:
        self.parents = parents
        self._depth, self._width = depth, width
        self.static = False  # whether it comes from `of` or `chain`: one object for each shape
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, parents: tuple[int, ...], device: torch.device | str = "cpu") -> Tree:
        """A static shape: one object for the same parents, whose properties are computed once."""
        return _static(parents, str(device), side_number())

    @classmethod
    def chain(cls, length: int, device: torch.device | str = "cpu") -> Tree:
        return _chain(length, str(device), side_number())

    @property
    def size(self) -> int:
        return self.parents.shape[1]

    @cached_property
    def depth(self) -> int:
        if self._depth is not None:
            return self._depth
        return int(self.depths.max()) + 1 if self.size else 0

    @cached_property
    def width(self) -> int:
        if self._width is not None:
            return self._width
        return int(self.ranks.max()) + 1 if self.size else 0

    @cached_property
    def ancestors(self) -> Tensor:
        """[1|B, N, N] bool: node j is on the path from the root to node i, i included."""
        if self.parents.device.type == "cpu" and self.parents.numel() <= _FEW:
            return _ancestors_on_host(self.parents)
        own = torch.eye(self.size, dtype=torch.bool, device=self.parents.device)[None]
        known, parent = own.expand(len(self.parents), -1, -1), self.parents.clamp(min=0)[..., None]
        rooted = (self.parents < 0)[..., None]
        for _ in range(self.size if self._depth is None else self._depth - 1):
            wider = own | (known.gather(1, parent.expand_as(known)) & ~rooted)
            if self._depth is None and bool((wider == known).all()):
                break
            known = wider
        return known

    @cached_property
    def depths(self) -> Tensor:
        """[1|B, N] the level of each node; the root's children are at 0."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def ranks(self) -> Tensor:
        """[1|B, N] each node's index among its siblings."""
        same = self.parents[:, :, None] == self.parents[:, None, :]
        return torch.tril(same, -1).sum(-1)

    @cached_property
    def children(self) -> Tensor:
        """[1|B, N + 1, W] the children of the root (row 0) and of each node (row i + 1) in order; -1: none."""
        return self.children_by(self.ranks)

    def children_by(self, ranks: Tensor) -> Tensor:
        """`children` with another order of siblings: ranks [1|B, N]."""
        width = max(self.width, 1)
        table = ranks.new_full((len(ranks), (self.size + 1) * width), -1)
        nodes = torch.arange(self.size, device=ranks.device).expand_as(ranks)
        table.scatter_(1, (self.parents.expand_as(ranks) + 1) * width + ranks, nodes)
        return table.view(len(ranks), self.size + 1, width)

    @cached_property
    def paths(self) -> Tensor:
        """[1|B, N, D] the nodes from the root's child down to each node, itself included; padded with -1."""
        if not self.size:
            return self.parents.new_zeros(len(self.parents), 0, 0)
        table = self.parents.new_full((len(self.parents), self.size, self.size + 1), -1)
        place = torch.where(self.ancestors, self.depths[:, None, :], self.size)
        nodes = torch.arange(self.size, device=self.parents.device).expand_as(place)
        return table.scatter_(2, place, nodes)[..., : self.depth]

    @cached_property
    def is_chain(self) -> bool:
        return self.width <= 1

    def mask_after(self, wait: int) -> tuple[Tensor, Tensor]:
        """For P = `wait` tokens, the last of which is the root, followed by the nodes: the attention mask
        [1|B, P + N, P + N], and each one's position after the first, [1|B, P + N]."""
        if wait in self._masks:
            return self._masks[wait]
        device, rows = self.parents.device, len(self.parents)
        before = torch.ones(wait, wait, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
        prefix = torch.ones(rows, self.size, wait, dtype=torch.bool, device=device)
        nodes = torch.cat([prefix, self.ancestors], 2)
        mask = torch.cat([torch.nn.functional.pad(before, (0, self.size)), nodes], 1)
        positions = torch.cat([torch.arange(wait, device=device).expand(rows, -1), wait + self.depths], 1)
        if self.static:
            self._masks[wait] = mask, positions
        return mask, positions


def _ancestors_on_host(parents: Tensor) -> Tensor:
    """`ancestors`, node by node."""
    ancestors = np.zeros((*parents.shape, parents.shape[1]), dtype=bool)
    for table, row in zip(ancestors, parents.tolist(), strict=True):
        for node, parent in enumerate(row):
            if parent >= 0:
                table[node] = table[parent]
            table[node, node] = True
    return torch.from_numpy(ancestors)


@cache  # recordings (CUDA graphs) read chains' masks without asking for them again
def _chain(length: int, device: str, side: int) -> Tree:
    return _static(tuple(range(-1, length - 1)), device, side)


@lru_cache(maxsize=512)
def _static(parents: tuple[int, ...], device: str, side: int) -> Tree:
    if any(not -1 <= parent < node for node, parent in enumerate(parents)):
        raise ValueError(f"parents {parents} are not in order: each must be -1 or an earlier node")
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    width = max(Counter(parents).values(), default=0)
    tree = Tree(upload([parents], device, torch.long).view(1, -1), max(depths, default=0), width)
    tree.static = True
    return tree
