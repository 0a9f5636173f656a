"""Rejection down a tree: siblings are tried one after another against what is left of the target's distribution.

For chains it is speculative sampling (arXiv 2211.17192, 2302.01318), for trees the multi-round scheme of SpecInfer
(arXiv 2305.09781) where siblings were drawn with replacement, and of recursive rejection (arXiv 2402.14160) where
without: q is always the distribution a node was really drawn from. A relaxed rule is the same walk with its own
acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.core.device import constant
from outrider.core.distribution import Distribution, residual
from outrider.core.draft import Draft, Verdict
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.rules import native_walk
from outrider.core.rules.walk import Record, live_children, nobody, to_verdict, undrafted

# The chance of accepting each token of the vocabulary, were it the guess: from the target's own distribution here, what
# earlier siblings left of it [B, V], the distribution the guess was drawn from [B, V] (0 where there is no guess), and
# depths [B|1, 1].
Acceptance = Callable[[Distribution, Tensor, Tensor, Tensor], Tensor]
Bend = Callable[[Distribution, Tensor, Tensor], Tensor]


def strict(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q), and 0 where p is 0."""
    return (p / q.clamp(min=torch.finfo(q.dtype).tiny)).clamp(max=1)


def spread(support: Distribution, tokens: Tensor, drawn: Distribution | None, fixed: Tensor | None) -> Tensor:
    """What guesses [...] were drawn from, on another distribution's support [..., S]; all of it on the token where one
    is fixed, and where no distribution is given all are."""
    if drawn is not None and fixed is None:
        return drawn.on(support)
    ids = torch.arange(support.width, device=tokens.device) if support.tokens is None else support.tokens
    point = (ids == tokens[..., None]).to(support.probs.dtype)
    return point if drawn is None or fixed is None else torch.where(fixed[..., None], point, drawn.on(support))


class _Level:
    """The siblings below one node a row, tried in order against what is left of the target's distribution."""

    def __init__(
        self, draft: Draft, distribution: Distribution, kids: Tensor, active: Tensor, rng: CounterRNG, bend: Bend | None
    ) -> None:
        self.draft, self.distribution, self.kids, self.active, self.rng, self.bend = (
            draft,
            distribution,
            kids,
            active,
            rng,
            bend,
        )
        self.left = distribution
        self.hit = torch.full_like(active, -1, dtype=torch.long)
        self.refused = torch.zeros_like(active)
        self.favoured = torch.zeros_like(active)  # accepted, and a strict rule would not have
        self.tries: list[tuple[Tensor, Tensor, Tensor]] = []
        self._price = torch.zeros_like(active, dtype=torch.float64)
        if kids.shape[1]:
            self._look()
            self._emission = (
                torch.zeros_like(distribution.probs) if bend else distribution.probs
            )  # of accepted siblings, averaged
            self._weight = torch.ones_like(
                distribution.probs[:, :1]
            )  # over what they could have been; and of none accepted
            for place in range(kids.shape[1]):
                self._attempt(place)
                if bend is None and nobody(active & (self.hit < 0)):
                    break
            if bend is not None:
                emitted = self._emission + self._weight * self.left.probs
                self._price = (distribution.probs - emitted).clamp(min=0).sum(1).double() * active

    def _look(self) -> None:
        """The siblings' tokens, and q of each given the siblings before it, all [B, W]."""
        draft, node = self.draft, self.kids.clamp(min=0)
        self.there = (self.kids >= 0) & self.active[:, None]
        self.tokens = draft.tokens.gather(1, node)
        self.q = torch.ones_like(self.tokens, dtype=self.distribution.probs.dtype)
        if draft.distributions is None or draft.source is None:
            return
        self.source = draft.source.gather(1, node)
        self.given: Distribution | None = (
            None  # [B, W, S] what each was drawn from, once earlier siblings had been struck out
        )
        width, rows = self.tokens.shape[1], self.source.clamp(min=0)
        if width > 1 and not draft.replacement:
            alike = (self.source[:, :, None] == self.source[:, None, :]) & self.there[:, None, :]
            struck = torch.tril(alike, -1)  # [B, W, W] sibling i may not be what sibling j is
            self.given = draft.distributions.rows(rows)
            for place in range(
                width - 1
            ):  # as it was drawn: 1 - q would lose what a sure distribution leaves to others
                earlier = self.tokens[:, place : place + 1].expand(-1, width)
                self.given = self.given.without(earlier, struck[:, :, place])
            drawn = self.given.at(self.tokens[..., None])[..., 0]
        else:
            drawn = draft.distributions.at_rows(rows, self.tokens[..., None])[..., 0]
        self.q = torch.where(self.source < 0, 1.0, drawn) if draft.mixed else drawn

    def _spread(self, place: int) -> Tensor:
        """The distribution a sibling was drawn from, on the support of what is left of the target's -> [B, S]; 0 where
        there is no sibling."""
        drawn = fixed = None
        if self.draft.distributions is not None:
            source = self.source[:, place]
            drawn = (
                self.draft.distributions.row(source.clamp(min=0)) if self.given is None else self.given.column(place)
            )
            fixed = source < 0 if self.draft.mixed else None
        return spread(self.left, self.tokens[:, place], drawn, fixed) * self.there[:, place : place + 1]

    def _attempt(self, place: int) -> None:
        kid, there, q = self.kids[:, place], self.there[:, place], self.q[:, place]
        token = self.tokens[:, place : place + 1]
        p = self.left.at(token)[:, 0]
        usual = chance = strict(p, q)
        drawn = chances = None
        if self.bend is not None:
            drawn = self._spread(place)
            chances = self.bend(self.distribution, self.left.probs, drawn)
            chance = Distribution(chances, None, self.distribution.vocabulary).at(token)[:, 0]
        tried = there & (self.hit < 0)
        node = kid.clamp(min=0)
        passed = tried & self.rng.accept(chance, node, where=tried)
        self.tries.append((tried, chance, p))
        self.hit = torch.where(passed, kid, self.hit)
        self.refused = self.refused | (tried & ~passed)
        if drawn is not None and chances is not None:
            self.favoured = self.favoured | (passed & ~self.rng.strictly(usual, node))
            self._emission = self._emission + self._weight * drawn * chances
            self._weight = self._weight * (1 - (drawn * chances).sum(1, keepdim=True))
        elif nobody(tried & ~passed):
            return
        self.left = residual(self.left, self._spread(place) if drawn is None else drawn, chances)

    def total_variation(self) -> Tensor:
        """[B] total variation of what this level emits from the target's distribution, guesses averaged over their
        distributions."""
        return self._price

    def record(self, record: Record) -> None:
        if self.tries:
            tried, chance, p = (torch.stack(column, 1) for column in zip(*self.tries, strict=True))
            done = len(self.tries)
            record.add(self.kids[:, :done], tried, chance, p, self.q[:, :done])


def rejection(
    draft: Draft,
    scores: Scores,
    rng: CounterRNG,
    acceptance: Acceptance | None = None,
    children: Tensor | None = None,
) -> Verdict:
    """Try each child with chance f (strict: min(1, p/q)); after a rejection norm((p - q f)+) is left. Under a relaxed
    `acceptance` end tokens are still tried strictly, and every level has its total variation. `children` reorders
    siblings. Compiled on a CPU, for strict rules and for chains."""
    if not draft.size:
        root = torch.zeros(draft.rows, dtype=torch.long, device=draft.tokens.device)
        return undrafted(
            draft, rng.sample(scores.distributions().column(0), root, Purpose.NEXT), priced=acceptance is not None
        )
    reference = partial(_walk, draft, scores, acceptance=acceptance, children=children)
    compiled = native_walk.usable(rng, draft.tokens.device) and children is None
    if compiled and acceptance is None:
        return native_walk.rejection(draft, scores, rng, reference)
    if compiled and acceptance is not None and draft.tree.is_chain:
        chances = partial(_chances, draft, acceptance, scores.sampling.end)
        return native_walk.rejection(draft, scores, rng, reference, chances)
    return reference(rng)


def _walk(
    draft: Draft, scores: Scores, rng: CounterRNG, *, acceptance: Acceptance | None, children: Tensor | None
) -> Verdict:
    """The reference: level by level, all rows side by side."""
    rows, device, depth = draft.rows, draft.tokens.device, draft.tree.depth
    table = draft.tree.children if children is None else children
    node = torch.full((rows,), -1, dtype=torch.long, device=device)
    active = torch.ones(rows, dtype=torch.bool, device=device)
    token, resampled = torch.zeros_like(node), torch.zeros_like(active)
    path: list[Tensor] = []
    prices: list[Tensor] = []
    relaxed: list[Tensor] = []
    record = Record(draft)
    for level in range(depth + 1):
        distribution = scores.distribution(node + 1)
        deep = constant((level,), device)[:, None]
        bend = None if acceptance is None else _bend(acceptance, deep, scores.sampling.end)
        kids = live_children(draft, table, node) if level < depth else node[:, None][:, :0]
        here = _Level(draft, distribution if bend is None else distribution.dense(), kids, active, rng, bend)
        here.record(record)
        ended = active & (here.hit < 0)
        if not nobody(ended):
            token = torch.where(ended, rng.sample(here.left, node + 1, Purpose.NEXT, ended), token)
            resampled = torch.where(ended, here.refused, resampled)
        if acceptance is not None:
            prices.append(here.total_variation())
            relaxed.append(here.favoured)
        active, node = active & ~ended, torch.where(ended, node, here.hit)
        if level < depth:
            path.append(torch.where(active, node, -1))
        if nobody(active):
            break
    if acceptance is None:
        return to_verdict(draft, path, token, resampled, record)
    return to_verdict(draft, path, token, resampled, record, prices, relaxed)


def _strictly(end: Sequence[int], chance: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Exempt end tokens from a relaxed rule: chances, p and q [..., V]."""
    ends = constant(tuple(end), q.device)
    if not len(ends):
        return chance
    return chance.index_copy(-1, ends, strict(p[..., ends], q[..., ends]))


def _chances(
    draft: Draft, acceptance: Acceptance, end: Sequence[int], distributions: Distribution, levels: slice
) -> Tensor:
    """A relaxed rule's chances of accepting each token at some levels of a chain, where the target's distributions are
    [B, L, V] -> [B, L, V]."""
    drawn = fixed = None
    if draft.distributions is not None and draft.source is not None:
        source = draft.source[:, levels]
        if bool((source == torch.arange(levels.start, levels.stop)).all()):  # nothing to copy
            drawn = draft.distributions.span(levels)
        else:
            drawn, fixed = draft.distributions.rows(source.clamp(min=0)), source < 0 if draft.mixed else None
    q, p = spread(distributions, draft.tokens[:, levels], drawn, fixed), distributions.probs
    depth = constant(tuple(range(levels.start, levels.stop)) * len(q), q.device)[:, None]
    flat = Distribution(p.flatten(0, 1), None, distributions.vocabulary)
    chance = acceptance(flat, flat.probs, q.flatten(0, 1), depth).clamp(0, 1).view_as(q)
    return _strictly(end, chance, p, q)


def _bend(acceptance: Acceptance, depth: Tensor, end: Sequence[int]) -> Bend:
    """A relaxed rule's acceptance at depths [B|1, 1], with end tokens exempt from it."""
    return lambda distribution, left, q: _strictly(end, acceptance(distribution, left, q, depth).clamp(0, 1), left, q)
