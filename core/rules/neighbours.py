"""Relaxed rules for vocabularies with near-duplicates, such as speech and image tokens.

Like the rules in `relaxed.py` they are acceptance functions of rejection, exact at a setting of their own (the anchor).
Independent of what tokens mean; coarse groups are made from the target's embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules.acceptance import strict
from outrider.core.rules.native_walk import Formula
from outrider.core.rules.rejection import rejection

_MOST = 1 << 14  # tokens of which all pairs are compared


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Accept a guess that is among `tau` draws from the target's distribution, with 1 - (1 - p)^tau, after VADUSA
    ("Fast and High-Quality Auto-Regressive Speech Synthesis via Speculative Decoding", arXiv 2410.21951), which does
    not publish its rule in detail. The first draw is the exact test, so that a drawn guess is accepted with
    1 - (1 - min(1, p/q)) (1 - p)^(tau - 1). The draws are integrated out; each sibling is compared with new draws
    from what earlier siblings left. A single fixed guess has a total variation of 1 - p - (1 - p)^tau. tau = 1 is
    exact."""

    tau: int = 3

    def __post_init__(self) -> None:
        if self.tau < 1:
            raise InvalidOption(f"tau is {self.tau}; it must be 1 (exact) or more")

    @property
    def lossless(self) -> bool:
        return self.tau == 1

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        missed = (1 - left) ** (self.tau - 1)  # by all draws but the first
        return torch.addcmul(1 - missed, strict(left, q), missed)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        formula = Formula("tolerance", (self.tau,))
        return rejection(draft, scores, rng, self.accept, formula=formula)


@dataclass(frozen=True, kw_only=True)
class AdditiveBeta:
    """Accept with min(1, p/q + beta), as speech speculative decoding (SSD, arXiv 2505.15380). The paper's rule accepts
    even what the target excludes (p = 0); ours does not. After a rejection it draws from norm((p - q)+), which is the
    residual of any acceptance that is never below the strict one. beta = 0 is exact."""

    beta: float = 0.2

    def __post_init__(self) -> None:
        if not self.beta >= 0:
            raise InvalidOption(f"beta is {self.beta}; it must be 0 (exact) or more")

    @property
    def lossless(self) -> bool:
        return self.beta == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return torch.where(distribution.probs > 0, (strict(left, q) + self.beta).clamp(max=1), 0)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        formula = Formula("additive-beta", (self.beta,))
        return rejection(draft, scores, rng, self.accept, formula=formula)


@dataclass(frozen=True, kw_only=True)
class TopKMembership:
    """Accept the target's `k` most likely tokens, and after a rejection draw from them, as Llasa+ (arXiv 2508.06262),
    whose released code has k = 50, the paper 100 and 500 of 65,536 codes. End tokens are decided strictly, in the paper
    by a k of their own. k = 0 rejects every guess, which is exact; k = 1 is exact at temperature 0."""

    k: int = 50

    def __post_init__(self) -> None:
        if self.k < 0:
            raise InvalidOption(f"k is {self.k}; it must be 0 (exact) or more")

    @property
    def lossless(self) -> bool:
        return self.k == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return (self.greedy(distribution, depth) & (distribution.probs > 0)).to(q.dtype)

    def greedy(self, distribution: Distribution, depth: Tensor) -> Tensor:
        return self._among(distribution.probs)

    def _among(self, p: Tensor) -> Tensor:
        """[..., V] which tokens are among the k most likely."""
        inside = torch.zeros_like(p, dtype=torch.bool)
        return inside.scatter(-1, p.topk(min(self.k, p.shape[-1])).indices, True)

    def _redraw(self, p: Tensor) -> Tensor:
        return p * self._among(p)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        redraw = None if self.lossless else self._redraw
        return rejection(draft, scores, rng, self.accept, greedy=self.greedy, redraw=redraw)


@dataclass(frozen=True, kw_only=True, eq=False)
class CoarseGroups:
    """Compare groups of tokens instead of tokens (Principled Coarse-Graining, arXiv 2511.13732). A group is a token and
    those whose embeddings have at least the cosine `similarity` to it; its groups share a token's mass evenly, and a
    guess is accepted with the mean over them of min(1, p(group) / q(group)). Ours averages over the groups where the
    paper draws one, accepts nothing that the target excludes, and after a rejection draws from the residual of its
    acceptance, token by token. A similarity above 1 leaves every token alone, which is exact. Without embeddings, ids
    are steps along a half circle."""

    embeddings: Tensor | None = None  # [V, D] the target's
    similarity: float = 0.4
    _share: dict[tuple[int, torch.device], Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.embeddings is not None and self.embeddings.ndim != 2:
            raise InvalidOption(f"embeddings have shape {list(self.embeddings.shape)}; expected [vocabulary, width]")
        if not self.similarity > 0:
            raise InvalidOption(f"similarity is {self.similarity}; it must be above 0 (above 1 is exact)")

    @property
    def lossless(self) -> bool:
        return self.similarity > 1

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        size = q.shape[1]
        if self.embeddings is not None and len(self.embeddings) != size:
            raise InvalidOption(
                f"there are embeddings of {len(self.embeddings)} tokens, and the target's vocabulary is {size}"
            )
        if self.lossless:
            return strict(left, q)
        if size > _MOST:
            raise InvalidOption(
                f"coarse-groups compares all pairs of tokens, and there are {size:,}; it takes up to {_MOST:,}: use "
                "grouped or lantern, which compare a code with its nearest ones"
            )
        share = self._shares(size, q.device).to(q)
        return (strict(left @ share, q @ share) @ share.T) * (distribution.probs > 0)

    def _shares(self, size: int, device: torch.device) -> Tensor:
        """[V, G] the share of each token's mass that each group gets."""
        key = size, device
        if key not in self._share:
            angle = torch.arange(size, device=device) * (math.pi / size)
            vectors = torch.stack([angle.cos(), angle.sin()], 1) if self.embeddings is None else self.embeddings
            unit = torch.nn.functional.normalize(vectors.detach().float(), dim=-1).to(device)
            near = (unit @ unit.T >= self.similarity).fill_diagonal_(True).double()
            self._share[key] = near / near.sum(1, keepdim=True)
        return self._share[key]

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)
