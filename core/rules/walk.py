"""Walking a tree from the root down, all rows of the batch at once: the two ways in which a path is accepted.

`rejection` tries siblings one after another against what is left of the target's law (for trees the multi-round
scheme of SpecInfer, arXiv 2305.09781, with replacement, and of recursive rejection, arXiv 2402.14160, without; for
chains plain speculative sampling, arXiv 2211.17192 and 2302.01318). `matching` lets the target draw its own token
behind every node and follows the draft while it agrees. Loops run over levels and siblings, whose numbers the host
knows; on a CPU they end when no row is left to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.core.dice import Dice, Purpose
from outrider.core.draft import Draft, Verdict
from outrider.core.laws import Law, residual
from outrider.core.target import Scores

# The chance of accepting each token of the vocabulary, were it the guess: from the target's own law here, what earlier
# siblings left of it [B, V], the law the guess was drawn from [B, V] (0 where there is no guess), and the depth.
Acceptance = Callable[[Law, Tensor, Tensor, int], Tensor]
Bend = Callable[[Law, Tensor, Tensor], Tensor]


def strict(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q), and 0 where p is 0."""
    return (p / q.clamp(min=torch.finfo(q.dtype).tiny)).clamp(max=1)


class _Record:
    """Collects what happened to each node, and writes it into [B, N] tables once."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.nodes: list[Tensor] = []
        self.values: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, node: Tensor, tried: Tensor, chance: Tensor, p: Tensor, q: Tensor) -> None:
        """node [B, ...] (-1 where there is none) and what it was tried with."""
        batch = len(node)
        self.nodes.append(torch.where(tried, node, self.draft.size).view(batch, -1))
        self.values.append(tuple(value.double().view(batch, -1) for value in (tried, chance, p, q)))  # type: ignore[arg-type]

    def tables(self) -> list[Tensor]:
        rows, size = self.draft.rows, self.draft.size
        if not self.nodes:
            return list(torch.zeros(4, rows, size, dtype=torch.float64, device=self.draft.tokens.device))
        index = torch.cat(self.nodes, 1).expand(4, -1, -1)
        values = torch.stack([torch.cat(column, 1) for column in zip(*self.values, strict=True)])
        return list(values.new_zeros(4, rows, size + 1).scatter_(2, index, values)[..., :size])


def _live_children(draft: Draft, table: Tensor, node: Tensor) -> Tensor:
    """[B, W] the children of node [B] (-1: the root) that may be tried, in order; -1 elsewhere."""
    table = table.expand(draft.rows, -1, -1)
    kids = table.gather(1, (node + 1)[:, None, None].expand(-1, 1, table.shape[2]))[:, 0]
    ready = draft.tried.gather(1, kids.clamp(min=0)) & (kids >= 0)
    return torch.where(ready, kids, -1)


def _nobody(active: Tensor) -> bool:
    """Is there no row left? Asked on a CPU only, where looking costs nothing."""
    return active.device.type == "cpu" and not bool(active.any())


def matching(draft: Draft, scores: Scores, draw: Callable[[Law, Tensor, Tensor], Tensor]) -> Verdict:
    """Draw the target's token behind each node reached, draw(law [B, S], row [B], where [B]) -> [B], and follow the child that
    is that token. Exact whatever the draft, since every emitted token is the target's own draw."""
    rows, device = draft.rows, draft.tokens.device
    node = torch.full((rows,), -1, dtype=torch.long, device=device)
    active = torch.ones(rows, dtype=torch.bool, device=device)
    token, resampled = torch.zeros_like(node), torch.zeros_like(active)
    path: list[Tensor] = []
    record = _Record(draft)
    for level in range(draft.tree.depth + 1):
        law = scores.law(node + 1)
        token = torch.where(active, draw(law, node + 1, active), token)
        if level == draft.tree.depth:
            break
        kids = _live_children(draft, draft.tree.children, node)
        ids = draft.tokens.gather(1, kids.clamp(min=0))
        there = (kids >= 0) & active[:, None]
        p = law.at(ids)
        record.add(kids, there, p, p, torch.ones_like(p))
        hits = there & (ids == token[:, None])
        hit, place = hits.max(1)
        resampled = torch.where(active, there.any(1) & ~hit, resampled)
        node = torch.where(hit, kids.gather(1, place[:, None])[:, 0], node)
        path.append(torch.where(hit, node, -1))
        active = hit
        if _nobody(active):
            break
    return _verdict(draft, path, token, resampled, record)


def _verdict(
    draft: Draft,
    path: list[Tensor],
    token: Tensor,
    resampled: Tensor,
    record: _Record,
    price: list[Tensor] | None = None,
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
        price=None if price is None else table(price, depth + 1, torch.zeros_like(price[0])),
        relaxed=None if relaxed is None else table(relaxed, depth, torch.zeros_like(resampled)),
    )


class _Guess:
    """The law one sibling was drawn from, given the siblings before it; a point mass if it was not drawn at all."""

    def __init__(self, draft: Draft, node: Tensor, token: Tensor, before: list[tuple[Tensor, Tensor]]) -> None:
        self.draft, self.token = draft, token
        self.fixed = draft.fixed.gather(1, node[:, None])  # [B, 1]
        self.law: Law | None = None
        self.source = node
        if draft.laws is not None and draft.source is not None:
            self.source = draft.source.gather(1, node[:, None])[:, 0]
            self.law = draft.laws.row(self.source.clamp(min=0))
            for earlier, source in [] if draft.replacement else before:
                self.law = self.law.without(earlier, (source == self.source) & (source >= 0))

    def spread(self, drawn: Tensor, point: Tensor) -> Tensor:
        """One value for drawn nodes, another for fixed ones, row by row; broadcasts."""
        if self.law is None:
            return point
        return torch.where(self.fixed, point, drawn) if self.draft.mixed else drawn

    def at(self, tokens: Tensor) -> Tensor:
        """q of tokens [B, K]."""
        point = (tokens == self.token[:, None]).double()
        return self.spread(self.law.at(tokens), point.to(self.law.probs.dtype)) if self.law else point

    def on(self, support: Law) -> Tensor:
        """q on the support of the target's law -> [B, S]."""
        if self.law is None or self.draft.mixed:
            ids = torch.arange(support.width, device=self.token.device) if support.tokens is None else support.tokens
            point = (ids == self.token[:, None]).to(support.probs.dtype)
            return point if self.law is None else self.spread(self.law.on(support), point)
        return self.law.on(support)


class _Level:
    """The siblings below one node a row, tried in order against what is left of the target's law."""

    def __init__(self, draft: Draft, law: Law, active: Tensor, dice: Dice, record: _Record, bend: Bend | None) -> None:
        self.draft, self.law, self.active, self.dice, self.record, self.bend = (
            draft,
            law,
            active,
            dice,
            record,
            bend,
        )
        self.left = law
        self.hit = torch.full_like(active, -1, dtype=torch.long)
        self.refused = torch.zeros_like(active)
        self.favoured = torch.zeros_like(active)  # accepted, and a strict rule would not have
        self._before: list[tuple[Tensor, Tensor]] = []
        if bend is not None:
            self.emission = torch.zeros_like(law.probs)  # of accepted siblings, averaged over what they could have been
            self.weight = torch.ones_like(law.probs[:, :1])  # that none of them is accepted

    def attempt(self, kid: Tensor) -> None:
        """One sibling a row [B]; -1 where there is none."""
        there, node = (kid >= 0) & self.active, kid.clamp(min=0)
        token = self.draft.tokens.gather(1, node[:, None])
        guess = _Guess(self.draft, node, token[:, 0], self._before)
        self._before.append((token[:, 0], torch.where(there, guess.source, -1)))
        p, q = self.left.at(token)[:, 0], guess.at(token)[:, 0]
        usual = chance = strict(p, q)
        spread = chances = None
        if self.bend is not None:
            spread = guess.on(self.left) * there[:, None]
            chances = self.bend(self.law, self.left.probs, spread)
            inside = (token >= 0) & (token < self.law.vocabulary)
            chance = (chances.gather(1, token.clamp(0, self.law.vocabulary - 1)) * inside)[:, 0]
        tried = there & (self.hit < 0)
        passed = tried & self.dice.accept(chance, node, where=tried)
        self.record.add(kid, tried, chance, p, q)
        self.hit = torch.where(passed, kid, self.hit)
        self.refused = self.refused | (tried & ~passed)
        if spread is not None and chances is not None:
            self.favoured = self.favoured | (passed & ~self.dice.strictly(usual, node))
            self.emission += self.weight * spread * chances
            self.weight = self.weight * (1 - (spread * chances).sum(1, keepdim=True))
        elif _nobody(there & (self.hit < 0)):
            return
        else:
            spread = guess.on(self.left) * there[:, None]
        self.left = residual(self.left, spread, chances)

    def price(self) -> Tensor:
        """[B] total variation of what this level emits from the target's law, guesses averaged over their laws."""
        emitted = self.emission + self.weight * self.left.probs
        return (self.law.probs - emitted).clamp(min=0).sum(1).double() * self.active


def rejection(
    draft: Draft,
    scores: Scores,
    dice: Dice,
    acceptance: Acceptance | None = None,
    children: Tensor | None = None,
) -> Verdict:
    """Try each child with chance f (strict: min(1, p/q)); after a rejection norm((p - q f)+) is left. Under a relaxed
    `acceptance` end tokens are still tried strictly, and every level has its price. `children` reorders siblings."""
    rows, device, depth = draft.rows, draft.tokens.device, draft.tree.depth
    table = draft.tree.children if children is None else children
    node = torch.full((rows,), -1, dtype=torch.long, device=device)
    active = torch.ones(rows, dtype=torch.bool, device=device)
    token, resampled = torch.zeros_like(node), torch.zeros_like(active)
    path: list[Tensor] = []
    prices: list[Tensor] = []
    relaxed: list[Tensor] = []
    record = _Record(draft)
    for level in range(depth + 1):
        law = scores.law(node + 1)
        bend = None if acceptance is None else _bend(acceptance, level, scores.sampling.end, device)
        here = _Level(draft, law if bend is None else law.dense(), active, dice, record, bend)
        if level < depth:
            for kid in _live_children(draft, table, node).unbind(1):
                here.attempt(kid)
        ended = active & (here.hit < 0)
        if not _nobody(ended):
            token = torch.where(ended, dice.pick(here.left, node + 1, Purpose.NEXT, ended), token)
            resampled = torch.where(ended, here.refused, resampled)
        if acceptance is not None:
            prices.append(here.price())
            relaxed.append(here.favoured)
        active, node = active & ~ended, torch.where(ended, node, here.hit)
        if level < depth:
            path.append(torch.where(active, node, -1))
        if _nobody(active):
            break
    if acceptance is None:
        return _verdict(draft, path, token, resampled, record)
    return _verdict(draft, path, token, resampled, record, prices, relaxed)


def _bend(acceptance: Acceptance, depth: int, end: Sequence[int], device: torch.device) -> Bend:
    """A relaxed rule's acceptance at one depth, with end tokens exempt from it."""
    ends = torch.tensor(list(end), dtype=torch.long, device=device)

    def chances(law: Law, left: Tensor, q: Tensor) -> Tensor:
        wanted = acceptance(law, left, q, depth).clamp(0, 1)
        if len(ends):
            wanted = wanted.index_copy(1, ends, strict(left[:, ends], q[:, ends]))
        return wanted

    return chances
