"""The chance of accepting a guess, p and q being the distributions of target and drafter; shared by the references of
rejection along chains and down trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.core.device import constant
from outrider.core.distribution import Distribution
from outrider.core.draft import Draft
from outrider.core.protocol import Scores

# A relaxed rule's chance of accepting each token of the vocabulary, were it the guess, from: the target's distribution,
# what earlier siblings left of it [B, V], the distribution the guess was drawn from [B, V] (0 where there is no guess),
# and depths [B|1, 1].
Acceptance = Callable[[Distribution, Tensor, Tensor, Tensor], Tensor]

# What a relaxed rule also accepts at temperature 0, where the target's distribution is a point mass: which tokens may
# stand for the likeliest one [B, V], from the target's softmax at temperature 1 and depths [B|1, 1].
GreedyAcceptance = Callable[[Distribution, Tensor], Tensor]

# What a relaxed rule draws from after a rejection, if not from the residual of its acceptance: unnormalised, from the
# target's distribution [..., V].
Redraw = Callable[[Tensor], Tensor]


def strict(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q), and 0 where p is 0."""
    return (p / q.clamp(min=torch.finfo(q.dtype).tiny)).clamp(max=1)


def rivals(distribution: Distribution, mass: Tensor) -> Tensor:
    """[B, V] the tokens whose enlarged mass [B, V] exceeds the likeliest token's own: none if nothing is enlarged."""
    return mass > distribution.probs.amax(-1, keepdim=True)


def stand_ins(greedy: GreedyAcceptance, scores: Scores, rows: Tensor, depth: Tensor) -> Tensor:
    """[B, K, V] the tokens that may stand for the likeliest after rows [B, K]; depth [BK|1, 1]."""
    soft = scores.softmax(rows).dense()
    flat = Distribution(soft.probs.flatten(0, 1), None, soft.vocabulary)
    return (greedy(flat, depth) & (flat.probs > 0)).view_as(soft.probs)


def exempt(end: Sequence[int], chance: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """A relaxed rule's chances [..., V] with those of end tokens replaced by the strict ones."""
    ends = constant(tuple(end), q.device)
    if not len(ends):
        return chance
    return chance.index_copy(-1, ends, strict(p[..., ends], q[..., ends]))


def redrawn(redraw: Redraw, p: Tensor, rest: Tensor, end: Sequence[int]) -> Tensor:
    """The distribution [..., V] after a rejection, where `rest` is the residual, which end tokens keep their share of.
    The residual if nothing can be redrawn."""
    ends = constant(tuple(end), p.device)
    kept = torch.zeros_like(p).index_copy(-1, ends, rest[..., ends]) if len(ends) else torch.zeros_like(p)
    again = redraw(p).index_fill(-1, ends, 0) if len(ends) else redraw(p)
    total = again.sum(-1, keepdim=True)
    again = again / total.clamp(min=torch.finfo(p.dtype).tiny) * (1 - kept.sum(-1, keepdim=True)) + kept
    return torch.where(total > 0, again, rest)


def spread(support: Distribution, tokens: Tensor, drawn: Distribution | None, fixed: Tensor | None) -> Tensor:
    """q of guesses [...] on another distribution's support [..., S]. A fixed guess has all of it on its token; without
    `drawn` all guesses are fixed, without `fixed` none is."""
    if drawn is not None and fixed is None:
        return drawn.on(support)
    ids = torch.arange(support.width, device=tokens.device) if support.tokens is None else support.tokens
    point = (ids == tokens[..., None]).to(support.probs.dtype)
    return point if drawn is None or fixed is None else torch.where(fixed[..., None], point, drawn.on(support))


def origins(draft: Draft, nodes: slice) -> tuple[Distribution | None, Tensor | None]:
    """The distributions that some nodes were drawn from [B, K, S], None if all are fixed; and which nodes are fixed
    [B, K], None if none is."""
    if draft.distributions is None or draft.source is None:
        return None, None
    source = draft.source[:, nodes]
    if source.device.type == "cpu" and bool((source == torch.arange(nodes.start, nodes.stop)).all()):
        return draft.distributions.span(nodes), None  # without a copy
    return draft.distributions.rows(source.clamp(min=0)), source < 0 if draft.mixed else None
