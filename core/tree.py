"""Who follows whom in a draft: trees of nodes, and the shapes that come up again and again.

Knows numbers of nodes, nothing of the tokens that stand there.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from outrider.core.device import upload

_FEW = 256  # nodes that are quicker counted one by one on the host


class Tree:
    """Who follows whom. Parents come before children; -1 is the root, the last committed token.

    `parents` is [1, N] where all rows share the shape, else [B, N]. `depth` and `width` (levels; most children of
    one node) are numbers on the host, or bounds on them, so that walking a tree needs no look at the device.
    """

    def __init__(self, parents: Tensor, depth: int | None = None, width: int | None = None) -> None:
        self.parents = parents
        self._depth, self._width = depth, width
        self.static = False  # is it one of the shapes that come up again, each the same object?
        self._behind: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, parents: tuple[int, ...], device: torch.device | str = "cpu") -> Tree:
        """A static shape, the same object for the same parents, so that all below is computed once."""
        return _static(parents, str(device))

    @classmethod
    def chain(cls, length: int, device: torch.device | str = "cpu") -> Tree:
        return _static(tuple(range(-1, length - 1)), str(device))

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
        """[1|B, N, N] bool: column j stands on the path from the root to row i, i itself included."""
        if self.parents.device.type == "cpu" and self.parents.numel() <= _FEW:
            return _followed(self.parents)
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
        """[1|B, N] levels below the root's children, which are at 0."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def ranks(self) -> Tensor:
        """[1|B, N] place among the children of the same parent."""
        same = self.parents[:, :, None] == self.parents[:, None, :]
        return torch.tril(same, -1).sum(-1)

    @cached_property
    def children(self) -> Tensor:
        """[1|B, N + 1, W] the children of the root (row 0) and of each node (row i + 1) in order; -1: none."""
        return self.children_by(self.ranks)

    def children_by(self, ranks: Tensor) -> Tensor:
        """`children` with another order among siblings: ranks [1|B, N]."""
        width = max(self.width, 1)
        table = ranks.new_full((len(ranks), (self.size + 1) * width), -1)
        nodes = torch.arange(self.size, device=ranks.device).expand_as(ranks)
        table.scatter_(1, (self.parents.expand_as(ranks) + 1) * width + ranks, nodes)
        return table.view(len(ranks), self.size + 1, width)

    @cached_property
    def paths(self) -> Tensor:
        """[1|B, N, D] the nodes from the root's child down to each node, itself included; -1 fills up."""
        if not self.size:
            return self.parents.new_zeros(len(self.parents), 0, 0)
        table = self.parents.new_full((len(self.parents), self.size, self.size + 1), -1)
        place = torch.where(self.ancestors, self.depths[:, None, :], self.size)
        nodes = torch.arange(self.size, device=self.parents.device).expand_as(place)
        return table.scatter_(2, place, nodes)[..., : self.depth]

    @cached_property
    def is_chain(self) -> bool:
        return self.width <= 1

    def behind(self, wait: int) -> tuple[Tensor, Tensor]:
        """Of `wait` tokens, the last of which is the root, and the nodes behind them: which of all of them each may
        look at, [1|B, P + N, P + N] bool, and how far behind the first it stands, [1|B, P + N]."""
        if wait in self._behind:
            return self._behind[wait]
        device, rows = self.parents.device, len(self.parents)
        before = torch.ones(wait, wait, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
        all_of_them = torch.ones(rows, self.size, wait, dtype=torch.bool, device=device)
        nodes = torch.cat([all_of_them, self.ancestors], 2)
        sight = torch.cat([torch.nn.functional.pad(before, (0, self.size)), nodes], 1)
        steps = torch.cat([torch.arange(wait, device=device).expand(rows, -1), wait + self.depths], 1)
        if self.static:  # a shape that comes up again
            self._behind[wait] = sight, steps
        return sight, steps


def _followed(parents: Tensor) -> Tensor:
    """`ancestors` by following parents on the host."""
    found = np.zeros((*parents.shape, parents.shape[1]), dtype=bool)
    for table, row in zip(found, parents.tolist(), strict=True):
        for node, parent in enumerate(row):
            if parent >= 0:
                table[node] = table[parent]
            table[node, node] = True
    return torch.from_numpy(found)


@lru_cache(maxsize=512)
def _static(parents: tuple[int, ...], device: str) -> Tree:
    if any(not -1 <= parent < node for node, parent in enumerate(parents)):
        raise ValueError(f"parents {parents} are not in order: each must be -1 or an earlier node")
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    width = max(Counter(parents).values(), default=0)
    tree = Tree(upload([parents], device, torch.long).view(1, -1), max(depths, default=0), width)
    tree.static = True
    return tree
