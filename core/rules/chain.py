"""Rejection along a chain, the reference: speculative sampling (arXiv 2211.17192, 2302.01318), all levels side by side.

The walk down a tree (tree_walk.py) decides the same level by level; on a GPU its launches take ten times as long."""

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
    origins,
    redrawn,
    spread,
    stand_ins,
    strict,
)


def chances(
    draft: Draft,
    scores: Scores,
    acceptance: Acceptance,
    greedy: GreedyAcceptance | None,
    distributions: Distribution,
    levels: slice,
) -> tuple[Tensor, Tensor]:
    """q [B, L, V] of the guesses at some levels, and a relaxed rule's chances of accepting each token there, where the
    target's distributions are [B, L, V]."""
    q, p = spread(distributions, draft.tokens[:, levels], *origins(draft, levels)), distributions.probs
    depth = constant(tuple(range(levels.start, levels.stop)) * len(q), q.device)[:, None]
    if greedy is None:
        flat = Distribution(p.flatten(0, 1), None, distributions.vocabulary)
        chance = acceptance(flat, flat.probs, q.flatten(0, 1), depth).clamp(0, 1).view_as(q)
    else:
        rows = constant(tuple(range(levels.start, levels.stop)), q.device).expand(len(q), -1)
        chance = torch.maximum(p, stand_ins(greedy, scores, rows, depth).to(p.dtype))
    return q, exempt(scores.sampling.end, chance, p, q)


def along_chain(
    draft: Draft,
    scores: Scores,
    rng: CounterRNG,
    acceptance: Acceptance | None,
    greedy: GreedyAcceptance | None = None,
    redraw: Redraw | None = None,
) -> Verdict:
    """The verdict on chains: strict, or with a relaxed rule's acceptance (`greedy` if given) and `redraw`."""
    distributions, levels = scores.distributions(), slice(0, draft.size)  # [B, N + 1, S]
    distributions = distributions if acceptance is None else distributions.dense()
    here, ids = distributions.span(levels), draft.tokens[..., None]
    drawn, fixed = origins(draft, levels)
    p = here.at(ids)[..., 0]
    q = torch.ones_like(p) if drawn is None else drawn.at(ids)[..., 0]
    q = q if fixed is None else torch.where(fixed, 1.0, q)
    usual = chance = strict(p, q)
    every = total_variation = relaxed = None
    if acceptance is not None:
        guess, every = chances(draft, scores, acceptance, greedy, here, levels)
        chance = Distribution(every, None, distributions.vocabulary).at(ids)[..., 0]
    passed = rng.descend(chance, draft.tried)
    tried = draft.tried & torch.nn.functional.pad(passed[:, :-1], (1, 0), value=True)
    accepted, rejected = passed.sum(1), (tried & ~passed).any(1)
    nodes = torch.arange(draft.size, device=p.device)
    if every is not None:
        taken = guess * every
        excess = (here.probs - taken).clamp(min=0).sum(-1) + taken.sum(-1) - 1
        if redraw is not None:
            again = redrawn(redraw, here.probs, residual(here, guess, every).probs, scores.sampling.end)
            emitted = taken + (1 - taken.sum(-1, keepdim=True)) * again
            excess = (here.probs - emitted).clamp(min=0).sum(-1)
        total_variation = torch.nn.functional.pad(excess.clamp(min=0).double() * tried, (0, 1))
        relaxed = passed & ~rng.strictly(usual, nodes.expand_as(passed))
    after, last = distributions.row(accepted), accepted.clamp(max=draft.size - 1)
    refused = spread(  # q of the guess that was rejected
        after,
        draft.tokens.gather(1, last[:, None])[:, 0],
        None if drawn is None else drawn.row(last),
        None if fixed is None else fixed.gather(1, last[:, None])[:, 0],
    )
    chance_there = None if every is None else Distribution(every, None, distributions.vocabulary).row(last).probs
    left = residual(after, refused, chance_there).probs
    if redraw is not None:
        left = redrawn(redraw, after.probs, left, scores.sampling.end)
    follows = Distribution(torch.where(rejected[:, None], left, after.probs), after.tokens, distributions.vocabulary)
    return Verdict(
        path=torch.where(nodes < accepted[:, None], nodes, -1),
        accepted=accepted,
        token=rng.sample(follows, accepted, Purpose.NEXT),
        resampled=rejected,
        tried=tried,
        chance=chance * tried,
        p=p * tried,
        q=q * tried,
        total_variation=total_variation,
        relaxed=relaxed,
    )
