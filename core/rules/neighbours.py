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

_DENSE = 1 << 12  # tokens up to which groups are a table of all pairs
_COMPARED = 1 << 24  # pairs that are compared at a time
_MOST = 1 << 26  # similar pairs


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
    _tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = field(
        init=False, repr=False, default_factory=dict
    )

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
        near, groups = self._near(size, q)
        p_group, q_group = (near @ (one / groups).T for one in (left, q))  # [V, B] each token is in a group of its own
        return (near @ strict(p_group, q_group)).T / groups * (distribution.probs > 0)

    def _near(self, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """[V, V] 1 for tokens in each other's groups, and the number of groups [V] of each token."""
        key = size, like.device, like.dtype
        if key not in self._tables:
            angle = torch.arange(size, device=like.device) * (math.pi / size)
            vectors = torch.stack([angle.cos(), angle.sin()], 1) if self.embeddings is None else self.embeddings
            unit = torch.nn.functional.normalize(vectors.detach().to(like.device, torch.float32), dim=-1)
            pairs = _similar_pairs(unit, self.similarity)  # [2, N]
            groups = torch.bincount(pairs[0], minlength=size).to(like)
            near = torch.sparse_coo_tensor(
                pairs, like.new_ones(len(pairs[0])), (size, size), is_coalesced=True, check_invariants=True
            )
            if size <= _DENSE:
                near = near.to_dense()
            self._tables[key] = near, groups
        return self._tables[key]

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


def _similar_pairs(unit: Tensor, similarity: float) -> Tensor:
    """[2, N] the pairs of rows with at least this cosine, and each row with itself; sorted."""
    size = len(unit)
    every = torch.arange(size, device=unit.device)
    codes = every[unit.any(1)]  # a row of zeros is similar to none
    found, count = [torch.stack([every, every])], size
    for some in torch.split(torch.arange(len(codes)), max(_COMPARED // max(len(codes), 1), 1)):
        first = int(some[0])
        near = unit[codes[some]] @ unit[codes[first:]].T >= similarity
        rows, columns = near.triu(1).nonzero(as_tuple=True)  # each pair once, so that both are in or out
        one, other = codes[rows + first], codes[columns + first]
        found += [torch.stack([one, other]), torch.stack([other, one])]
        count += 2 * len(rows)
        if count > _MOST:
            raise InvalidOption(
                f"with similarity={similarity} more than {_MOST:,} pairs of {size:,} tokens are similar; give a larger "
                "similarity"
            )
    pairs = torch.cat(found, 1)
    return pairs[:, (pairs[0] * size + pairs[1]).argsort()]
