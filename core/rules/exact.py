"""The exact rules: the output has the target's distribution, whatever the draft.

Pure functions of draft, scores and random generator. `exact` chooses among the others by the kind of draft. Greedy
decoding is the case of distributions of width 1."""

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
    """Rejection token by token down a chain or tree; a fixed guess's q is a point mass.

    Speculative sampling (arXiv 2211.17192, 2302.01318); for siblings SpecInfer's multi-step rule (arXiv 2305.09781) if
    they were drawn with replacement, recursive rejection (arXiv 2402.14160) if without.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng)


@dataclass(frozen=True)
class SampleMatch:
    """The target draws its own token after every node reached, and the draft is followed while it agrees; needs no q.

    For fixed guesses it equals rejection with one draw a level: a child is accepted with its probability p, and a miss
    has the distribution p without the children.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return matching(
            draft, scores, rng, lambda distribution, row, where: rng.sample(distribution, row, Purpose.MATCH, where)
        )


@dataclass(frozen=True)
class GumbelMatch:
    """`sample-match` with noise that depends on the position in the sequence: emit argmax(log p + g).

    Plain and speculative decoding then emit the same tokens at any temperature, not only the same distribution.
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
    a chain is verified as a whole, which accepts at least as many tokens as rejection token by token.

    Only for chains drawn whole in this round; it would be biased for guesses retained from an earlier one.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        if draft.size and (draft.fresh is None or not draft.tree.is_chain):
            raise Incompatible(
                "the rule 'block' needs a chain drawn whole in the same round, which this drafter does not make; "
                "take rule='exact', which uses block verification where it is sound"
            )
        return block(draft, scores, rng)


@dataclass(frozen=True)
class Exact:
    """The lossless default: block verification for chains drawn whole in this round, rejection for other drawn nodes,
    matching if all guesses are fixed. At temperature 0 all accept the same tokens, and matching is the cheapest."""

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        if draft.distributions is None or scores.sampling.greedy:
            # Purpose.NEXT, as in rejection, so that a row without a draft does not depend on the rest of its batch
            return matching(
                draft, scores, rng, lambda distribution, row, where: rng.sample(distribution, row, Purpose.NEXT, where)
            )
        if draft.fresh is None:
            return rejection(draft, scores, rng)
        if not draft.mixed:
            return block(draft, scores, rng)
        return _merge(draft.fresh, block(draft, scores, rng), rejection(draft, scores, rng))


def _merge(first: Tensor, one: Verdict, other: Verdict) -> Verdict:
    """Row by row, the first verdict where `first` [B] says so, else the other."""

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
