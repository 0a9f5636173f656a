"""Walking a tree from the root down, all rows of the batch at once; and `matching`, the way that needs no q.

The target draws its own token behind every node reached, and the draft is followed while it agrees. Loops run over
levels and siblings, whose numbers the host knows; on a CPU they end when no row is left to follow.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.protocol import Scores

_AT_ONCE = 128  # nodes; beyond, it is cheaper to look only at the rows that are reached
_FEW = 8  # rows that are quicker walked one by one, on a CPU


class Record:
    """Collects what happened to each node, and writes it into [B, N] tables once."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.parts: list[tuple[Tensor, ...]] = []

    def add(self, node: Tensor, tried: Tensor, chance: Tensor, p: Tensor, q: Tensor) -> None:
        """Nodes [B, W] and what they were tried with."""
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
    """[B, W] the children of node [B] (-1: the root) that may be tried, in order; -1 elsewhere."""
    table = table.expand(draft.rows, -1, -1)
    kids = table.gather(1, (node + 1)[:, None, None].expand(-1, 1, table.shape[2]))[:, 0]
    ready = draft.tried.gather(1, kids.clamp(min=0)) & (kids >= 0)
    return torch.where(ready, kids, -1)


def nobody(active: Tensor) -> bool:
    """Is there no row left? Asked on a CPU only, where looking costs nothing."""
    return active.device.type == "cpu" and not bool(active.any())


def matching(draft: Draft, scores: Scores, draw: Callable[[Distribution, Tensor, Tensor], Tensor]) -> Verdict:
    """Draw the target's token behind each node reached, draw(distribution [B, S], row [B], where [B]) -> [B], and
    follow the child that is that token. Exact whatever the draft, since every emitted token is the target's own
    draw."""
    rows, device = draft.rows, draft.tokens.device
    active = torch.ones(rows, dtype=torch.bool, device=device)
    if not draft.size:
        return undrafted(
            draft, draw(scores.distributions().column(0), torch.zeros_like(active, dtype=torch.long), active)
        )
    if scores.sampling.greedy and draft.size <= _AT_ONCE:
        return _matching_at_once(draft, scores)
    node = torch.full((rows,), -1, dtype=torch.long, device=device)
    token, resampled = torch.zeros_like(node), torch.zeros_like(active)
    path: list[Tensor] = []
    record = Record(draft)
    for level in range(draft.tree.depth + 1):
        distribution = scores.distribution(node + 1)
        token = torch.where(active, draw(distribution, node + 1, active), token)
        if level == draft.tree.depth:
            break
        kids = live_children(draft, draft.tree.children, node)
        ids = draft.tokens.gather(1, kids.clamp(min=0))
        there = (kids >= 0) & active[:, None]
        p = distribution.at(ids)
        record.add(kids, there, p, p, torch.ones_like(p))
        hit, place = (there & (ids == token[:, None])).max(1)
        resampled = torch.where(active, there.any(1) & ~hit, resampled)
        node = torch.where(hit, kids.gather(1, place[:, None])[:, 0], node)
        path.append(torch.where(hit, node, -1))
        active = hit
        if nobody(active):
            break
    return to_verdict(draft, path, token, resampled, record)


def undrafted(draft: Draft, token: Tensor, *, priced: bool = False) -> Verdict:
    """Nothing was drafted: the target's own draw is all there is, and costs the distribution nothing."""
    none, nowhere = draft.live.float(), torch.zeros_like(token)
    return Verdict(
        path=draft.tokens,
        accepted=nowhere,
        token=token,
        resampled=nowhere.bool(),
        tried=draft.live,
        chance=none,
        p=none,
        q=none,
        total_variation=nowhere[:, None].double() if priced else None,
        relaxed=draft.live if priced else None,
    )


def _matching_at_once(draft: Draft, scores: Scores) -> Verdict:
    """The same where every distribution is a single token: all rows' tokens are known at once, so no level waits for
    another."""
    tree, own = draft.tree, scores.distributions().sole()
    if own.device.type == "cpu" and draft.rows <= _FEW:
        return _matching_one_by_one(draft, own)
    parents = tree.parents.expand(draft.rows, -1)
    hits = draft.tried & (draft.tokens == own.gather(1, parents + 1))
    reached = (hits[:, None] | ~tree.ancestors).all(-1)  # [B, N]
    accepted, best = torch.where(reached, tree.depths + 1, 0).max(1)
    end = torch.where(accepted > 0, best, -1)
    above = reached.gather(1, parents.clamp(min=0)) | (parents < 0)
    path = tree.paths.expand(draft.rows, -1, -1).gather(1, best[:, None, None].expand(-1, 1, tree.paths.shape[2]))[:, 0]
    tried = draft.tried & above
    certain = (hits & tried).to(torch.float32)
    return Verdict(
        path=torch.where(accepted[:, None] > 0, path, -1),
        accepted=accepted,
        token=own.gather(1, end[:, None] + 1)[:, 0],
        resampled=(tried & (parents == end[:, None])).any(1),
        tried=tried,
        chance=certain,
        p=certain,
        q=tried.to(torch.float32),
    )


def _matching_one_by_one(draft: Draft, own: Tensor) -> Verdict:
    """The same for a few rows, on the host: calling as many operations takes longer."""
    paths, tokens, resampled, tries, hits = [], [], [], [], []
    shapes = draft.tree.parents.expand(draft.rows, -1).tolist()
    rows = zip(shapes, draft.tokens.tolist(), draft.tried.tolist(), own.tolist(), strict=True)
    for parents, guesses, able, said in rows:
        tried, right = list[bool](), list[bool]()
        ways: dict[int, list[int]] = {-1: []}  # to the root, and to each node that is right
        best: list[int] = []
        for node, (parent, guess, one) in enumerate(zip(parents, guesses, able, strict=True)):
            tried.append(one and parent in ways)
            right.append(tried[-1] and guess == said[parent + 1])
            if right[-1]:
                ways[node] = [*ways[parent], node]
                best = max(best, ways[node], key=len)
        end = best[-1] if best else -1
        paths.append(best + [-1] * (draft.tree.depth - len(best)))
        tokens.append(said[end + 1])
        resampled.append(any(one and parent == end for one, parent in zip(tried, parents, strict=True)))
        tries.append(tried)
        hits.append(right)
    path, tested = np.array(paths), np.array(tries)
    certain = torch.from_numpy(np.array(hits, dtype=np.float32))
    return Verdict(
        path=torch.from_numpy(path),
        accepted=torch.from_numpy((path >= 0).sum(1)),
        token=torch.from_numpy(np.array(tokens)),
        resampled=torch.from_numpy(np.array(resampled)),
        tried=torch.from_numpy(tested),
        chance=certain,
        p=certain,
        q=torch.from_numpy(tested.astype(np.float32)),
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
    """Level by level lists, filled up to the draft's depth."""
    depth, none = draft.tree.depth, torch.full_like(token, -1)

    def table(levels: list[Tensor], size: int, fill: Tensor) -> Tensor:
        return torch.stack([*levels, *[fill] * (size + 1 - len(levels))], 1)[:, :size]

    nodes = table(path, depth, none)
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
