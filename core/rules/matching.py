"""Matching, which needs no q: the target's own token is drawn after every node reached, and the draft is followed
while it agrees. Exact whatever the draft, since every emitted token is the target's own draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules import native_walk
from outrider.core.rules.walk import Record, all_ended, live_children, to_verdict, undrafted

Draw = Callable[[Distribution, Tensor, Tensor], Tensor]  # distribution [B, S], row [B], where [B] -> tokens [B]


def matching(draft: Draft, scores: Scores, rng: CounterRNG, draw: Draw) -> Verdict:
    """Draw the target's token after each node reached and follow the child that is that token. Where every
    distribution is a single token nothing is drawn: see `follow`."""
    rows, device = draft.rows, draft.tokens.device
    active = torch.ones(rows, dtype=torch.bool, device=device)
    if not draft.size:
        return undrafted(
            draft, draw(scores.distributions().column(0), torch.zeros_like(active, dtype=torch.long), active)
        )
    if scores.sampling.greedy:
        return follow(draft, scores.distributions().sole(), rng)
    node = torch.full((rows,), -1, dtype=torch.long, device=device)
    token, resampled = torch.zeros_like(node), torch.zeros_like(active)
    path: list[Tensor] = []
    record = Record(draft)
    for level in range(draft.tree.depth + 1):
        distribution = scores.distribution(node + 1)
        token = torch.where(active, draw(distribution, node + 1, active), token)
        if level == draft.tree.depth:
            break
        nodes = live_children(draft, draft.tree.children, node)
        ids = draft.tokens.gather(1, nodes.clamp(min=0))
        tried = (nodes >= 0) & active[:, None]
        p = distribution.at(ids)
        record.add(nodes, tried, p, p, torch.ones_like(p))
        hit, place = (tried & (ids == token[:, None])).max(1)
        resampled = torch.where(active, tried.any(1) & ~hit, resampled)
        node = torch.where(hit, nodes.gather(1, place[:, None])[:, 0], node)
        path.append(torch.where(hit, node, -1))
        active = hit
        if all_ended(active):
            break
    return to_verdict(draft, path, token, resampled, record)


def follow(draft: Draft, own: Tensor, rng: CounterRNG) -> Verdict:
    """Accept the deepest node all of whose path are the target's own tokens [B, N + 1]. Compiled on a CPU."""
    reference = partial(_follow, draft, own)
    if native_walk.usable(rng, own.device):
        return native_walk.follow(draft, own, rng, reference)
    return reference(rng)


def _follow(draft: Draft, own: Tensor, rng: CounterRNG) -> Verdict:
    """The reference: all rows and levels side by side."""
    tree = draft.tree
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
