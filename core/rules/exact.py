"""The exact rules: whatever was drafted, the output has the target's distribution.

Pure functions of draft, scores and random generator. `exact` chooses what is best for the draft at hand; the others can
be asked for by name. Greedy decoding falls out of distributions one entry wide."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.errors import Incompatible
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.rules.block import block
from outrider.core.rules.matching import matching
from outrider.core.rules.rejection import rejection


@dataclass(frozen=True)
class Token:
    """Token-by-token rejection down a chain or tree; siblings as they were drawn, fixed guesses as point masses.

    Speculative sampling (arXiv 2211.17192, 2302.01318); with several siblings SpecInfer's multi-step rule (arXiv
    2305.09781) if they were drawn with replacement, recursive rejection (arXiv 2402.14160) if without. One walk
    serves them all because `q` is always the distribution a node was really drawn from.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng)


@dataclass(frozen=True)
class SampleMatch:
    """The target draws its own token behind every node; the draft is followed while it agrees. Needs no q.

    For fixed guesses this is the one-hot tree rule in a single draw a level: a child is met with the chance p gives it,
    and a miss is already distributed like p without the children.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return matching(
            draft, scores, rng, lambda distribution, row, where: rng.sample(distribution, row, Purpose.MATCH, where)
        )


@dataclass(frozen=True)
class GumbelMatch:
    """Like `sample-match`, with noise that belongs to the position in the sequence: emit argmax(log p + g).

    Plain and speculative output are then the same tokens at any temperature and seed, not only the same distribution.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return matching(
            draft,
            scores,
            rng,
            lambda distribution, row, where: rng.gumbel_argmax(distribution, scores.position(row), where),
        )


@dataclass(frozen=True)
class Block:
    """Block verification (Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444):
    the chain is judged as a whole, which accepts at least as many tokens as token-by-token rejection.

    Only for chains drawn whole in this step; with drafts that survive from an earlier step it would be biased.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        if draft.size and (draft.fresh is None or not draft.tree.is_chain):
            raise Incompatible(
                "the rule 'block' needs a chain drawn whole in the same step, which this drafter does not make; "
                "take rule='exact', which uses block verification where it is sound"
            )
        return block(draft, scores, rng)


@dataclass(frozen=True)
class Exact:
    """The lossless default: block verification for rows that are a chain drawn whole in this step, rejection for
    other drawn nodes, one draw a level where all guesses are fixed. For greedy distributions all of these accept the
    same tokens, so that the cheapest serves."""

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        if draft.distributions is None or scores.sampling.greedy:
            # by the numbers that rejection uses where nothing was drafted: a row may have batch mates for whom it was
            return matching(
                draft, scores, rng, lambda distribution, row, where: rng.sample(distribution, row, Purpose.NEXT, where)
            )
        if draft.fresh is None:
            return rejection(draft, scores, rng)
        if not draft.mixed:
            return block(draft, scores, rng)
        return _merge(draft.fresh, block(draft, scores, rng), rejection(draft, scores, rng))


def _merge(first: Tensor, one: Verdict, other: Verdict) -> Verdict:
    """Row by row, one verdict or the other."""

    def pick(yes: Tensor, no: Tensor) -> Tensor:
        return torch.where(first.view(-1, *[1] * (yes.dim() - 1)), yes, no)

    return Verdict(
        path=pick(one.path, other.path),
        accepted=pick(one.accepted, other.accepted),
        token=pick(one.token, other.token),
        resampled=pick(one.resampled, other.resampled),
        tried=pick(one.tried, other.tried),
        chance=pick(one.chance, other.chance),
        p=pick(one.p, other.p),
        q=pick(one.q, other.q),
    )
