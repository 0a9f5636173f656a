"""Relaxed rules that need only p and q: faster, not lossless, and their total variation is computed.

Each is an acceptance function f over the vocabulary for `rejection`: a guess is accepted with probability f, after a
rejection the token is drawn from norm((p - q f)+), end tokens are tried strictly, and every level records the total
variation of what it emits from the target's distribution. Each rule has a setting, its anchor, at which it is exact.

At temperature 0 the target's distribution is a point mass, so a rule that measures probabilities reads the target's
softmax at temperature 1 instead (`greedy`): a guess is accepted or not, never by chance, the target's own token always
is, and after a rejection that token follows. The total variation is then 1 for another token and 0 for the same one.
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
from outrider.core.rules.acceptance import rivals, strict
from outrider.core.rules.native_walk import Formula
from outrider.core.rules.rejection import rejection


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Accept if p/q reaches a threshold; at temperature 0, if p exceeds that share of the likeliest token's p. At 1 or
    more it is exact, since [p >= q] does not exceed min(1, p/q) and the residual is that of its own acceptance."""

    threshold: float = 0.8

    def __post_init__(self) -> None:
        if self.threshold <= 0:
            raise InvalidOption(f"threshold is {self.threshold}; it must be above 0 (1 is exact)")

    @property
    def lossless(self) -> bool:
        return self.threshold >= 1

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return ((left >= self.threshold * q) & (left > 0)).to(q.dtype)

    def greedy(self, distribution: Distribution, depth: Tensor) -> Tensor:
        return rivals(distribution, distribution.probs / self.threshold)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        formula = Formula("threshold", (self.threshold,))
        return rejection(draft, scores, rng, self.accept, greedy=self.greedy, formula=formula)


@dataclass(frozen=True, kw_only=True)
class Lenience:
    """Accept with min(1, p / (l q)), l in (0, 1]: the lenience of speculative decoding (arXiv 2211.17192,
    appendix; generalised in DistillSpec, arXiv 2310.08461). At temperature 0 accept if p exceeds l times the likeliest
    token's p. l = 1 is exact."""

    lenience: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise InvalidOption(f"lenience is {self.lenience}; it must be above 0 and at most 1 (1 is exact)")

    @property
    def lossless(self) -> bool:
        return self.lenience == 1

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return strict(left, self.lenience * q)

    def greedy(self, distribution: Distribution, depth: Tensor) -> Tensor:
        return rivals(distribution, distribution.probs / self.lenience)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        formula = Formula("lenience", (self.lenience,))
        return rejection(draft, scores, rng, self.accept, greedy=self.greedy, formula=formula)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Accept everything down to a depth, then verify strictly: refinement without verification in the survey of
    generation-refinement frameworks (arXiv 2502.19732). depth = 0 is exact."""

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
        formula = Formula("trust", (self.depth,))
        return rejection(draft, scores, rng, self.accept, formula=formula)


@dataclass(frozen=True, kw_only=True)
class VerifyEvery:
    """Verify every `every`-th level strictly and accept everything at the others: the partial verification of the same
    survey (arXiv 2502.19732). every = 1 is exact."""

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
        formula = Formula("verify-every", (self.every,))
        return rejection(draft, scores, rng, self.accept, formula=formula)


@dataclass(frozen=True, kw_only=True)
class TopBeta:
    """SpecDec's rule (Xia et al., "Speculative decoding: exploiting speculative execution for accelerating seq2seq
    generation", arXiv 2203.16487): accept the target's `beta` most likely tokens that are at most `gap` below the most
    likely one in log-probability. The paper decodes greedily; above temperature 0 ours uses the distribution that is
    sampled. beta = 0 rejects every guess, which is exact."""

    beta: int = 3
    gap: float = 1.0

    def __post_init__(self) -> None:
        if self.beta < 0 or not self.gap >= 0:
            raise InvalidOption(f"beta={self.beta}, gap={self.gap}: both must be 0 or more")

    @property
    def lossless(self) -> bool:
        return self.beta == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return (self.greedy(distribution, depth) & (distribution.probs > 0)).to(q.dtype)

    def greedy(self, distribution: Distribution, depth: Tensor) -> Tensor:
        if self.beta == 0:
            return torch.zeros_like(distribution.probs, dtype=torch.bool)
        best = distribution.probs.topk(min(self.beta, distribution.width)).values
        return (distribution.probs >= best[:, -1:]) & (distribution.probs >= best[:, :1] * math.exp(-self.gap))

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept, greedy=self.greedy)


@dataclass(frozen=True, kw_only=True)
class Distance:
    """BiLD's rollback as a rule (Kim et al., "Speculative decoding with big little decoder", arXiv 2302.07863): accept
    a guess whose cross-entropy with the target's distribution, -log p, is at most `distance`. The paper decodes
    greedily, as ours does at temperature 0; above it ours draws from the residual after a rejection. distance = 0
    accepts only certainties, which is exact."""

    distance: float = 3.0

    def __post_init__(self) -> None:
        if not self.distance >= 0:
            raise InvalidOption(f"distance is {self.distance}; it must be 0 (exact) or more")

    @property
    def lossless(self) -> bool:
        return self.distance == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return (self.greedy(distribution, depth) & (distribution.probs > 0)).to(q.dtype)

    def greedy(self, distribution: Distribution, depth: Tensor) -> Tensor:
        return distribution.probs >= math.exp(-self.distance)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept, greedy=self.greedy)


@dataclass(frozen=True, kw_only=True)
class Typical:
    """Medusa's typical acceptance (arXiv 2401.10774): accept if p >= min(epsilon, delta exp(-entropy of p)).

    Of fixed siblings the one with the longest typical continuation is tried first, as Medusa takes the longest
    candidate. After a rejection Medusa draws from p, ours from the residual, which costs the least total variation (for
    fixed guesses they are the same). At temperature 0 Medusa's code verifies strictly, ours accepts what is typical at
    temperature 1. epsilon = 1 and delta = inf accept only certainties, which is exact."""

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
        """The smallest typical probability [..., 1]."""
        return (self.delta * torch.exp(-distribution.entropy())).clamp(max=self.epsilon)[..., None]

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return self.greedy(distribution, depth).to(q.dtype)

    def greedy(self, distribution: Distribution, depth: Tensor) -> Tensor:
        return distribution.probs >= self.bound(distribution)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        children = None
        if draft.distributions is None and not draft.tree.is_chain:
            children = draft.tree.children_by(self._longest_first(draft, scores))
        return rejection(draft, scores, rng, self.accept, children, self.greedy)

    def _longest_first(self, draft: Draft, scores: Scores) -> Tensor:
        """[B, N] the order of siblings, those with the longest typical path through them first."""
        tree = draft.tree
        parents = tree.parents.expand(draft.rows, -1)
        read = scores.softmax if scores.sampling.greedy else scores.distributions
        distribution = read(parents + 1)  # what each node would be emitted from
        typical = (distribution.at(draft.tokens[..., None])[..., 0] >= self.bound(distribution)[..., 0]) & draft.tried
        rooted = (typical[:, None, :] | ~tree.ancestors).all(-1)  # every node of the path is typical
        length = torch.where(rooted, tree.depths + 1, 0)  # [B, N] of the path
        longest = (tree.ancestors.transpose(1, 2) * length[:, None, :]).amax(-1)  # through each node
        order = longest * (tree.size + 1) - tree.ranks  # ties in the draft's order
        siblings = parents[:, :, None] == parents[:, None, :]
        return (siblings & (order[:, None, :] > order[:, :, None])).sum(-1)
