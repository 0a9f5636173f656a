"""Rejection: a guess is accepted with chance f (strict: min(1, p/q)), and after a rejection norm((p - q f)+) is left.

Along a chain it is speculative sampling (arXiv 2211.17192, 2302.01318), down a tree the multi-round scheme of SpecInfer
(arXiv 2305.09781) for siblings drawn with replacement and recursive rejection (arXiv 2402.14160) for those drawn
without: q is always the distribution that a node was drawn from. A relaxed rule has an f of its own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.rules import native_walk
from outrider.core.rules.acceptance import Acceptance, GreedyAcceptance, Redraw
from outrider.core.rules.chain import along_chain, chances
from outrider.core.rules.tree_walk import down_tree
from outrider.core.rules.walk import undrafted


def rejection(
    draft: Draft,
    scores: Scores,
    rng: CounterRNG,
    acceptance: Acceptance | None = None,
    children: Tensor | None = None,
    greedy: GreedyAcceptance | None = None,
    formula: native_walk.Formula | None = None,
    redraw: Redraw | None = None,
) -> Verdict:
    """The verdict on a draft. Under a relaxed `acceptance` end tokens are still tried strictly, and every level reports
    its total variation; `children` reorders siblings. With `greedy` it decides at temperature 0, where `acceptance`
    would see a point mass. With `redraw` the token after a rejection is drawn from that, not from the residual.
    Compiled on a CPU without `redraw`; relaxed rules on trees only where `formula` says what `acceptance` computes."""
    greedy = greedy if scores.sampling.greedy else None
    if not draft.size:
        root = torch.zeros(draft.rows, dtype=torch.long, device=draft.tokens.device)
        distributions = scores.distributions()
        if acceptance is not None:  # as after a chain, so that a row without a draft draws the same token in a batch
            distributions = distributions.dense()
        token = rng.sample(distributions.column(0), root, Purpose.NEXT)
        return undrafted(draft, token, relaxed=acceptance is not None)
    chain = draft.tree.is_chain
    reference = (
        partial(along_chain, draft, scores, acceptance=acceptance, greedy=greedy, redraw=redraw)
        if chain
        else partial(down_tree, draft, scores, acceptance=acceptance, children=children, greedy=greedy, redraw=redraw)
    )
    known = chain or acceptance is None or (formula is not None and greedy is None and children is None)
    if not native_walk.usable(rng, draft.tokens.device) or not known or redraw is not None:
        return reference(rng)
    if acceptance is None or not chain:
        return native_walk.rejection(draft, scores, rng, reference, formula=None if acceptance is None else formula)

    def relaxed(distributions: Distribution, levels: slice) -> Tensor:
        return chances(draft, scores, acceptance, greedy, distributions, levels)[1]

    return native_walk.rejection(draft, scores, rng, reference, relaxed)
