"""Rejection down a tree, the reference: level by level, siblings one after another, each against what the earlier ones
left of the target's distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.device import constant
from outrider.core.distribution import Distribution, residual
from outrider.core.draft import Draft, Verdict
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.rules.acceptance import (
    Acceptance,
    GreedyAcceptance,
    Redraw,
    exempt,
    redrawn,
    spread,
    stand_ins,
    strict,
)
from outrider.core.rules.walk import Record, all_ended, live_children, to_verdict


class _Siblings:
    """The children [B, W] of one node a row (-1: none), tried in order."""

    def __init__(self, draft: Draft, distribution: Distribution, nodes: Tensor, active: Tensor) -> None:
        self.draft, self.distribution, self.nodes, self.active = draft, distribution, nodes, active
        self.left = distribution  # of the target's distribution, after the rejections so far
        self.accepted = torch.full_like(active, -1, dtype=torch.long)
        self.rejected = torch.zeros_like(active)
        self.relaxed = torch.zeros_like(active)  # accepted, and a strict rule would have rejected it
        self.tries: list[tuple[Tensor, Tensor, Tensor]] = []
        index = nodes.clamp(min=0)
        self.exists = (nodes >= 0) & active[:, None]
        self.tokens = draft.tokens.gather(1, index)
        self.q = torch.ones_like(self.tokens, dtype=distribution.probs.dtype)
        self.source: Tensor | None = None
        self.drawn: Distribution | None = None  # [B, W, S]
        if draft.distributions is not None and draft.source is not None and nodes.shape[1]:
            self.source = draft.source.gather(1, index)
            self.drawn = self._drawn(draft.distributions, self.source)
            q = self.drawn.at(self.tokens[..., None])[..., 0]
            self.q = torch.where(self.source < 0, 1.0, q) if draft.mixed else q

    def _drawn(self, distributions: Distribution, source: Tensor) -> Distribution:
        """What each sibling was drawn from: without replacement, its distribution less the earlier siblings drawn from
        it. They are struck out one by one, as in the draw: 1 - q would lose what a near-certainty leaves to others."""
        drawn, width = distributions.rows(source.clamp(min=0)), source.shape[1]
        if width == 1 or self.draft.replacement:
            return drawn
        alike = (source[:, :, None] == source[:, None, :]) & self.exists[:, None, :]
        struck = torch.tril(alike, -1)  # [B, W, W] sibling i may not be what sibling j is
        for place in range(width - 1):
            earlier = self.tokens[:, place : place + 1].expand(-1, width)
            drawn = drawn.without(earlier, struck[:, :, place])
        return drawn

    def _spread(self, place: int) -> Tensor:
        """The distribution a sibling was drawn from, on the support of what is left -> [B, S]; 0 without a sibling."""
        drawn = None if self.drawn is None else self.drawn.column(place)
        fixed = self.source[:, place] < 0 if self.source is not None and self.draft.mixed else None
        return spread(self.left, self.tokens[:, place], drawn, fixed) * self.exists[:, place : place + 1]

    def _accept(self, place: int, chance: Tensor, p: Tensor, rng: CounterRNG) -> tuple[Tensor, Tensor]:
        """Try one sibling with chance [B] -> which rows tried it, and which accepted it."""
        tried = self.exists[:, place] & (self.accepted < 0)
        passed = tried & rng.accept(chance, self.nodes[:, place].clamp(min=0), where=tried)
        self.tries.append((tried, chance, p))
        self.accepted = torch.where(passed, self.nodes[:, place], self.accepted)
        self.rejected = self.rejected | (tried & ~passed)
        return tried, passed

    def try_strictly(self, rng: CounterRNG) -> None:
        """Accept each with min(1, p/q); after a rejection norm((p - q)+) is left."""
        for place in range(self.nodes.shape[1]):
            p = self.left.at(self.tokens[:, place : place + 1])[:, 0]
            tried, passed = self._accept(place, strict(p, self.q[:, place]), p, rng)
            if not all_ended(tried & ~passed):
                self.left = residual(self.left, self._spread(place))
            if all_ended(self.active & (self.accepted < 0)):
                break

    def try_relaxed(
        self,
        rng: CounterRNG,
        acceptance: Acceptance,
        end: tuple[int, ...],
        deep: Tensor,
        stand_ins: Tensor | None,
        redraw: Redraw | None = None,
    ) -> Tensor:
        """Accept each with the rule's chance f, end tokens strictly; after a rejection norm((p - q f)+) is left, or
        what `redraw` says -> [B] the total variation of what is emitted here, averaged over the guesses that could have
        been drawn. At temperature 0 `stand_ins` [B, V] are accepted beside the target's own token."""
        emitted = torch.zeros_like(self.distribution.probs)
        weight = torch.ones_like(emitted[:, :1])  # the chance that no sibling so far was accepted
        for place in range(self.nodes.shape[1]):
            token, left = self.tokens[:, place : place + 1], self.left.probs
            q = self._spread(place)
            if stand_ins is None:
                f = acceptance(self.distribution, left, q, deep).clamp(0, 1)
            else:
                f = torch.maximum(left, stand_ins.to(left.dtype))
            f = exempt(end, f, left, q)
            p = self.left.at(token)[:, 0]
            _, passed = self._accept(place, Distribution(f, None, self.left.vocabulary).at(token)[:, 0], p, rng)
            usual = strict(p, self.q[:, place])
            self.relaxed = self.relaxed | (passed & ~rng.strictly(usual, self.nodes[:, place].clamp(min=0)))
            emitted = emitted + weight * q * f
            weight = weight * (1 - (q * f).sum(1, keepdim=True))
            rest, tried = residual(self.left, q, f), self.exists[:, place : place + 1]
            if redraw is not None:
                again = redrawn(redraw, self.distribution.probs, rest.probs, end)
                rest = Distribution(torch.where(tried, again, left), None, rest.vocabulary)
            self.left = rest
        return (self.distribution.probs - emitted - weight * self.left.probs).clamp(min=0).sum(1).double()

    def record(self, record: Record) -> None:
        if self.tries:
            tried, chance, p = (torch.stack(column, 1) for column in zip(*self.tries, strict=True))
            count = len(self.tries)
            record.add(self.nodes[:, :count], tried, chance, p, self.q[:, :count])


def down_tree(
    draft: Draft,
    scores: Scores,
    rng: CounterRNG,
    acceptance: Acceptance | None,
    children: Tensor | None,
    greedy: GreedyAcceptance | None = None,
    redraw: Redraw | None = None,
) -> Verdict:
    """The verdict on trees: strict, or with a relaxed rule's acceptance (`greedy` if given) and `redraw`; `children`
    [1|B, N + 1, W] is another order of siblings."""
    rows, device, depth = draft.rows, draft.tokens.device, draft.tree.depth
    table = draft.tree.children if children is None else children
    node = torch.full((rows,), -1, dtype=torch.long, device=device)
    active = torch.ones(rows, dtype=torch.bool, device=device)
    token, resampled = torch.zeros_like(node), torch.zeros_like(active)
    path: list[Tensor] = []
    total_variation: list[Tensor] = []
    relaxed: list[Tensor] = []
    record = Record(draft)
    for level in range(depth + 1):
        distribution = scores.distribution(node + 1)
        distribution = distribution if acceptance is None else distribution.dense()
        nodes = live_children(draft, table, node) if level < depth else node[:, None][:, :0]
        siblings = _Siblings(draft, distribution, nodes, active)
        if acceptance is None:
            siblings.try_strictly(rng)
        else:
            deep = constant((level,), device)[:, None]
            also = None if greedy is None else stand_ins(greedy, scores, node[:, None] + 1, deep)[:, 0]
            price = siblings.try_relaxed(rng, acceptance, scores.sampling.end, deep, also, redraw)
            total_variation.append(price * active)
            relaxed.append(siblings.relaxed)
        siblings.record(record)
        ended = active & (siblings.accepted < 0)
        if not all_ended(ended):
            token = torch.where(ended, rng.sample(siblings.left, node + 1, Purpose.NEXT, ended), token)
            resampled = torch.where(ended, siblings.rejected, resampled)
        active, node = active & ~ended, torch.where(ended, node, siblings.accepted)
        if level < depth:
            path.append(torch.where(active, node, -1))
        if all_ended(active):
            break
    if acceptance is None:
        return to_verdict(draft, path, token, resampled, record)
    return to_verdict(draft, path, token, resampled, record, total_variation, relaxed)
