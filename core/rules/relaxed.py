"""Relaxed rules that need nothing but p and q: faster, not lossless, and priced.

Each is an acceptance function f over the vocabulary for the walk in `rejection.py`: the guess is accepted with chance
f, a rejection draws from norm((p - q f)+), end tokens are tried strictly, and every level records the total variation
between what it emits and the target's distribution. Each has a setting, its anchor, at which it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules.acceptance import strict
from outrider.core.rules.rejection import rejection


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Accept where p/q reaches a threshold: 1 is the deterministic verification of practical guides, 0.5 the
    conservative one. At 1 or more it is exact, since [p >= q] never exceeds min(1, p/q) and the residual matches."""

    threshold: float = 0.8

    def __post_init__(self) -> None:
        if self.threshold <= 0:
            raise InvalidOption(f"threshold is {self.threshold}; it must be above 0 (1 is exact)")

    @property
    def lossless(self) -> bool:
        return self.threshold >= 1

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return ((left >= self.threshold * q) & (left > 0)).to(q.dtype)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


@dataclass(frozen=True, kw_only=True)
class Lenience:
    """Accept with chance min(1, p / (l q)), l in (0, 1]: the lenience of speculative decoding (arXiv 2211.17192,
    appendix; generalised in DistillSpec, arXiv 2310.08461). l = 1 is exact."""

    lenience: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise InvalidOption(f"lenience is {self.lenience}; it must be above 0 and at most 1 (1 is exact)")

    @property
    def lossless(self) -> bool:
        return self.lenience == 1

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return strict(left, self.lenience * q)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Accept outright down to a depth, then verify strictly: refinement without verification, as the survey of
    generation-refinement frameworks (arXiv 2502.19732) has it. depth = 0 is exact."""

    depth: int = 2

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise InvalidOption(f"depth is {self.depth}; it must be 0 (exact) or more")

    @property
    def lossless(self) -> bool:
        return self.depth == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return torch.where(depth < self.depth, 1, strict(left, q))

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


@dataclass(frozen=True, kw_only=True)
class VerifyEvery:
    """Verify strictly one guess in `every` on the way down, and accept those between outright: the partial
    verification of the same survey (arXiv 2502.19732). every = 1 is exact."""

    every: int = 2

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InvalidOption(f"every is {self.every}; it must be 1 (exact) or more")

    @property
    def lossless(self) -> bool:
        return self.every == 1

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return torch.where((depth + 1) % self.every == 0, strict(left, q), 1)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


@dataclass(frozen=True, kw_only=True)
class TopBeta:
    """SpecDec's rule (Xia et al., "Speculative decoding: exploiting speculative execution for accelerating seq2seq
    generation", arXiv 2203.16487): accept what is among the target's `beta` likeliest tokens and at most `gap` below
    the likeliest in log-probability. The paper looks past a greedy choice; ours looks at the distribution that is
    sampled, so that temperature 0 leaves it nothing to relax. beta = 0 refuses every guess, which is exact."""

    beta: int = 3
    gap: float = 1.0

    def __post_init__(self) -> None:
        if self.beta < 0 or not self.gap >= 0:
            raise InvalidOption(f"beta={self.beta}, gap={self.gap}: both must be 0 or more")

    @property
    def lossless(self) -> bool:
        return self.beta == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        if self.beta == 0:
            return torch.zeros_like(q)
        best = distribution.probs.topk(min(self.beta, distribution.width)).values
        near = best[:, :1] * math.exp(-self.gap)
        return ((distribution.probs >= best[:, -1:]) & (distribution.probs >= near) & (distribution.probs > 0)).to(
            q.dtype
        )

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


@dataclass(frozen=True, kw_only=True)
class Distance:
    """BiLD's rollback as a rule (Kim et al., "Speculative decoding with big little decoder", arXiv 2302.07863): a guess
    stays while the cross-entropy between it and the target's distribution, -log p, is at most `distance`; at the first
    beyond it the target takes over. The paper does so with its greedy choice, ours with a draw from what is left of its
    distribution. distance = 0 lets only certainties pass, which is exact."""

    distance: float = 3.0

    def __post_init__(self) -> None:
        if not self.distance >= 0:
            raise InvalidOption(f"distance is {self.distance}; it must be 0 (exact) or more")

    @property
    def lossless(self) -> bool:
        return self.distance == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return ((distribution.probs >= math.exp(-self.distance)) & (distribution.probs > 0)).to(q.dtype)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


@dataclass(frozen=True, kw_only=True)
class Typical:
    """Medusa's typical acceptance (arXiv 2401.10774): accept where p >= min(epsilon, delta exp(-entropy of p)).

    Among fixed siblings the one with the longest accepted continuation is tried first, as Medusa takes the longest
    candidate. Ours differs where a guess was refused: the residual that costs the distribution least, instead of p
    itself (they are the same for fixed guesses). With epsilon = 1 and delta = inf only certainties pass, which is
    exact."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise InvalidOption(f"epsilon is {self.epsilon}; it must be above 0 and at most 1")
        if not self.delta > 0:
            raise InvalidOption(f"delta is {self.delta}; it must be above 0 (inf, with epsilon=1, is exact)")

    @property
    def lossless(self) -> bool:
        return self.epsilon == 1 and math.isinf(self.delta)

    def bound(self, distribution: Distribution) -> Tensor:
        """[..., 1] the least probability that counts as typical."""
        return (self.delta * torch.exp(-distribution.entropy())).clamp(max=self.epsilon)[..., None]

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return (distribution.probs >= self.bound(distribution)).to(q.dtype)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        children = None
        if draft.distributions is None and not draft.tree.is_chain:
            children = draft.tree.children_by(self._longest_first(draft, scores))
        return rejection(draft, scores, rng, self.accept, children)

    def _longest_first(self, draft: Draft, scores: Scores) -> Tensor:
        """[B, N] places among siblings, those with the longest typical path through them first."""
        tree = draft.tree
        parents = tree.parents.expand(draft.rows, -1)
        distribution = scores.distributions(parents + 1)  # the distribution each node would be emitted from
        typical = (distribution.at(draft.tokens[..., None])[..., 0] >= self.bound(distribution)[..., 0]) & draft.tried
        rooted = (typical[:, None, :] | ~tree.ancestors).all(-1)  # all the way down to this node
        reach = torch.where(rooted, tree.depths + 1, 0)  # [B, N]
        below = (tree.ancestors.transpose(1, 2) * reach[:, None, :]).amax(-1)  # the deepest of each node's subtree
        order = below * (tree.size + 1) - tree.ranks  # ties in the draft's own order
        siblings = parents[:, :, None] == parents[:, None, :]
        return (siblings & (order[:, None, :] > order[:, :, None])).sum(-1)
