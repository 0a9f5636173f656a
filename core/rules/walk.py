"""Parts of a walk down a tree, all rows of the batch side by side. Loops run over levels and siblings, whose numbers
the host knows; on a CPU they end when no row is left."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.draft import Draft, Verdict


class Record:
    """Collects the numbers of each node level by level, for [B, N] tables."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.parts: list[tuple[Tensor, ...]] = []

    def add(self, node: Tensor, tried: Tensor, chance: Tensor, p: Tensor, q: Tensor) -> None:
        """Nodes [B, W], whether each was tried, and its numbers."""
        self.parts.append((node, tried, chance, p, q))

    def tables(self) -> Tensor:
        """[4, B, N]: tried, chance, p, q; 0 where a node was not tried."""
        rows, size = self.draft.rows, self.draft.size
        if not self.parts:
            return torch.zeros(4, rows, size, device=self.draft.tokens.device)
        node, tried, chance, p, q = (torch.cat(column, 1) for column in zip(*self.parts, strict=True))
        values = torch.stack([tried.to(p.dtype), chance, p, q])
        index = torch.where(tried, node, size).expand(4, -1, -1)
        return values.new_zeros(4, rows, size + 1).scatter_(2, index, values)[..., :size]


def live_children(draft: Draft, table: Tensor, node: Tensor) -> Tensor:
    """The children [B, W] of node [B] (-1: the root) that may be tried, in order; -1 elsewhere."""
    table = table.expand(draft.rows, -1, -1)
    nodes = table.gather(1, (node + 1)[:, None, None].expand(-1, 1, table.shape[2]))[:, 0]
    ready = draft.tried.gather(1, nodes.clamp(min=0)) & (nodes >= 0)
    return torch.where(ready, nodes, -1)


def all_ended(active: Tensor) -> bool:
    """Whether no row is active; on a GPU False, since reading the answer would synchronise."""
    return active.device.type == "cpu" and not bool(active.any())


def undrafted(draft: Draft, token: Tensor, *, relaxed: bool = False) -> Verdict:
    """The verdict on an empty draft: the target's own token."""
    empty, zeros = draft.live.float(), torch.zeros_like(token)
    return Verdict(
        path=draft.tokens,
        accepted=zeros,
        token=token,
        resampled=zeros.bool(),
        tried=draft.live,
        chance=empty,
        p=empty,
        q=empty,
        total_variation=zeros[:, None].double() if relaxed else None,
        relaxed=draft.live if relaxed else None,
    )


def to_verdict(
    draft: Draft,
    path: list[Tensor],
    token: Tensor,
    resampled: Tensor,
    record: Record,
    total_variation: list[Tensor] | None = None,
    relaxed: list[Tensor] | None = None,
) -> Verdict:
    """The verdict from lists with an entry a level, padded to the draft's depth."""
    depth = draft.tree.depth

    def table(levels: list[Tensor], size: int, fill: Tensor) -> Tensor:
        return torch.stack([*levels, *[fill] * (size + 1 - len(levels))], 1)[:, :size]

    nodes = table(path, depth, torch.full_like(token, -1))
    tried, chance, p, q = record.tables()
    return Verdict(
        path=nodes,
        accepted=(nodes >= 0).sum(1),
        token=token,
        resampled=resampled,
        tried=tried > 0,
        chance=chance,
        p=p,
        q=q,
        total_variation=None
        if total_variation is None
        else table(total_variation, depth + 1, torch.zeros_like(total_variation[0])),
        relaxed=None if relaxed is None else table(relaxed, depth, torch.zeros_like(resampled)),
    )
