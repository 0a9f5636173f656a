"""Rules, compiled rules and drafters with the usual mistakes. Each claims to be lossless; none is.

Tests, and readers, see by them that the conformance suite tells right from wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from outrider.core.distribution import Sampling, to_distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.protocol import Scores, Target
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.rules import native_walk
from outrider.core.rules.acceptance import strict
from outrider.core.rules.rejection import rejection

# in the order of `Fault` in walks.cpp
NATIVE_FAULTS = (
    "token after a rejection drawn from p",
    "residual not normalised",
    "earlier sibling left in q",
    "ratio flipped",
    "bonus from the row before",
    "uniform used twice",
    "rejected sibling forgotten",
    "block residual without its weight",
    "block stops at the first failure",
    "coupling draws from the new distribution",
    "greedy token from the row before",
    "support of q ignored",
)


@contextmanager
def native_fault(name: str) -> Iterator[None]:
    """Compiled rules have this fault meanwhile; what is not compiled is right."""
    code = native_walk.compiled("-DOUTRIDER_FAULTS")
    assert code is not None, "there is no compiler"
    code.set_fault(1 + NATIVE_FAULTS.index(name))
    with patch.object(native_walk, "library", lambda: code):
        yield


class ResampleFromP:
    """Draws the token after a rejection from p, not from the residual."""

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        verdict = rejection(draft, scores, rng)
        from_p = rng.sample(scores.distribution(verdict.accepted), 0, Purpose.MATCH, verdict.resampled)
        return replace(verdict, token=torch.where(verdict.resampled, from_p, verdict.token))


class BonusFromTheRowBefore:
    """Off by one: draws the bonus token from the distribution of the token before it."""

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        verdict = rejection(draft, scores, rng)
        before = rng.sample(scores.distribution((verdict.accepted - 1).clamp(min=0)), 0, Purpose.MATCH)
        return replace(verdict, token=torch.where(verdict.resampled, verdict.token, before))


class RatioFlipped:
    """Accepts with min(1, q/p)."""

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, lambda distribution, left, q, depth: strict(q, left))


class Misreport(DraftModel):
    """Draws from one distribution and reports another: q as it was before top-k, or at another temperature."""

    def __init__(self, model: Target, drawn: Sampling, reported: Sampling, *, length: int = 2) -> None:
        super().__init__(model, length=length, sampling=drawn)
        self.reported = reported

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        draft = super().propose(room, rng)
        distributions = to_distribution(self.model.score(draft).logits()[:, :-1], self.reported)
        return replace(draft, distributions=distributions if draft.size else None, fresh=None)


class Hindsight(DraftModel):
    """Drops tokens after they were drawn, by their probability."""

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        draft = super().propose(room, rng)
        if not draft.size or draft.distributions is None:
            return draft
        likely = draft.distributions.at(draft.tokens[..., None])[..., 0] > 0.4
        return replace(draft, live=draft.live & likely.cumprod(1).bool(), fresh=None)


class Survivors(Jacobi):
    """Declares guesses retained from an earlier round to be drawn in this one, so that they are verified as a block."""

    def __init__(self, *, window: int = 2) -> None:
        super().__init__(window=window, renew="couple")

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        draft = super().propose(room, rng)
        whole = (~draft.fixed | ~draft.live).all(1)
        return draft if draft.distributions is None else replace(draft, fresh=whole)
