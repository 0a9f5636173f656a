"""Relaxed rules for codes of a codebook, some of which are similar: a guess may stand for its neighbours.

Like the rules in `relaxed.py` they are acceptance functions of rejection, exact at a setting of their own (the anchor);
they accept nothing that the target excludes. After a rejection they draw from the residual of their own acceptance,
which costs the least total variation (COOL-SD, proposition 1). Which codes are similar is an argument; without it, ids
are steps of a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption
from outrider.core.kernels.neighbour_mass import Alike, grouped, pooled
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules.acceptance import rivals, strict
from outrider.core.rules.native_walk import Formula
from outrider.core.rules.rejection import rejection

_LARGE = 8192  # codes above which no table of all pairs is made
_ROUNDING = 1e-6


def _scale(size: int, count: int) -> Tensor:
    """[V, count] the nearest ids of each id, the smaller of two equally near ones first."""
    steps = torch.arange(1, count + 1)
    ids = torch.arange(size)[:, None] + torch.stack([-steps, steps], 1).flatten()  # [V, 2 count], nearest first
    outside = (ids < 0) | (ids >= size)
    return ids.gather(1, outside.to(torch.int8).argsort(dim=1, stable=True)[:, :count])


class _Neighbours:
    """Tables of neighbours by length and device, cached."""

    def __init__(self, given: Tensor | None) -> None:
        self.given, self._tables = given, dict[tuple[int, int, torch.device], Tensor]()

    def __call__(self, size: int, count: int, device: torch.device) -> Tensor:
        count = min(count, size - 1)
        key = size, count, device
        if key not in self._tables:
            if self.given is not None and (len(self.given) != size or self.given.shape[1] < count):
                shape = list(self.given.shape)
                raise InvalidOption(f"neighbours is a table {shape}; expected [{size}, {count} or more]")
            table = _scale(size, count) if self.given is None else self.given[:, :count].long()
            self._tables[key] = table.to(device)
        return self._tables[key]


def _missing(p: Tensor, enough: Tensor) -> Tensor:
    """[B, V] what each code's neighbours have to add to reach `enough`, rounded upwards."""
    return (enough - p) * (1 + _ROUNDING)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lantern:
    """LANTERN ("Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding", arXiv 2410.03355): accept
    a guess x with min(1, (p(x) + s) / q(x)), where s is the mass of its nearest neighbours: as many, up to `k`, as hold
    at most `delta` together. delta does not bound the total variation, here or in the paper; it is computed. After a
    rejection the paper's code excludes the whole neighbourhood, ours what was accepted. At temperature 0, as in the
    paper's code, accept x if p(x) + s exceeds the likeliest code's p. delta = 0 is exact."""

    neighbours: Tensor | None = None  # [V, K] the nearest codes of each, nearest first
    k: int = 100
    delta: float = 0.05
    _near: _Neighbours = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InvalidOption(f"k is {self.k}; it must be 1 or more")
        if not self.delta >= 0:
            raise InvalidOption(f"delta is {self.delta}; it must be 0 (exact) or more")
        object.__setattr__(self, "_near", _Neighbours(self.neighbours))

    @property
    def lossless(self) -> bool:
        return self.delta == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        if self.lossless:
            return strict(left, q)
        return strict(self._mass(left, q), q) * (distribution.probs > 0)

    def _mass(self, p: Tensor, enough: Tensor) -> Tensor:
        """[B, V] of each code with its neighbours, or some mass above what is enough."""
        near = self._near(p.shape[1], self.k, p.device)
        return p + pooled(p, near, torch.full_like(p, self.delta), _missing(p, enough))

    def greedy(self, distribution: Distribution, depth: Tensor) -> Tensor:
        probs = distribution.probs
        return rivals(distribution, self._mass(probs, probs.amax(-1, keepdim=True)))

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept, greedy=self.greedy)


@dataclass(frozen=True, kw_only=True, eq=False)
class LanternPlus:
    """LANTERN++ ("Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual Auto-regressive Models",
    arXiv 2502.06352): neighbours add at most `ratio` times the guess's own mass, a bound that adapts to how flat the
    distribution is; at temperature 0 as LANTERN. The paper's static trees belong to the drafter. ratio = 0 is
    exact."""

    neighbours: Tensor | None = None
    k: int = 100
    ratio: float = 2.0
    _near: _Neighbours = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InvalidOption(f"k is {self.k}; it must be 1 or more")
        if not self.ratio >= 0:
            raise InvalidOption(f"ratio is {self.ratio}; it must be 0 (exact) or more")
        object.__setattr__(self, "_near", _Neighbours(self.neighbours))

    @property
    def lossless(self) -> bool:
        return self.ratio == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        if self.lossless:
            return strict(left, q)
        return strict(self._mass(left, q), q) * (distribution.probs > 0)

    def _mass(self, p: Tensor, enough: Tensor) -> Tensor:
        """[B, V] of each code with its neighbours, or some mass above what is enough."""
        return p + pooled(p, self._near(p.shape[1], self.k, p.device), self.ratio * p, _missing(p, enough))

    def greedy(self, distribution: Distribution, depth: Tensor) -> Tensor:
        probs = distribution.probs
        return rivals(distribution, self._mass(probs, probs.amax(-1, keepdim=True)))

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept, greedy=self.greedy)


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """GSD ("Grouped Speculative Decoding for Autoregressive Image Generation", arXiv 2508.07747): accept a guess with
    min(1, p(group) / q(group)). Each distribution has its own groups: of the `span` codes ranked next above and below
    the guess, those whose probability is within `gap` of its own and whose vectors are within `reach`. After a
    rejection ours draws from the residual of its acceptance, token by token; a fixed guess's q is a point mass, as in
    the paper. span = 0 is exact."""

    codes: Tensor | None = None  # [V, D] the vector of each code
    span: int = 7
    gap: float = 0.15
    reach: float = 0.5
    _similar_codes: dict[tuple[int, torch.device], Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.span < 0:
            raise InvalidOption(f"span is {self.span}; it must be 0 (exact) or more")
        if not self.gap >= 0 or not self.reach >= 0:
            raise InvalidOption(f"gap={self.gap}, reach={self.reach}: both must be 0 or more")

    @property
    def lossless(self) -> bool:
        return self.span == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        if self.lossless:
            return strict(left, q)
        size = left.shape[1]
        if self.codes is not None and len(self.codes) != size:
            raise InvalidOption(
                f"codes has {len(self.codes)} rows, and the target's vocabulary is {size}; give one row a code"
            )
        if size > _LARGE:
            alike: Tensor | Alike = Alike(self._vectors(size, left.device), self.reach)
        else:
            alike = self._similar(size, left.device)
        p_group, q_group = grouped(left, q, alike, self.span, self.gap)
        return strict(p_group, q_group) * (distribution.probs > 0)

    def _vectors(self, size: int, device: torch.device) -> Tensor:
        """[V, D]"""
        return (torch.arange(size)[:, None] if self.codes is None else self.codes).to(device, torch.float32)

    def _similar(self, size: int, device: torch.device) -> Tensor:
        """[V, V] which codes are similar."""
        if (size, device) not in self._similar_codes:
            codes = self._vectors(size, device)
            self._similar_codes[size, device] = torch.cdist(codes, codes) < self.reach
        return self._similar_codes[size, device]

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


@dataclass(frozen=True, kw_only=True)
class Annealed:
    """COOL-SD (arXiv 2601.09212): accept with min(1, w p/q), where w decreases with depth, since early acceptances
    change the distribution of the sequence less. As in the paper, w is proportional to exp(-nu depth) and its mean over
    a draft of `length` tokens is `weight`; positions where w is at most 1 are decided exactly. For drafts of any
    length, such as windows, `length` 0 is a schedule of our own, never stricter than the strict rule: w decreases from
    `weight` to 1 as 1 + (weight - 1) exp(-nu depth). At temperature 0, which the paper leaves out, accept if w p
    exceeds the likeliest token's p. weight = 1 without a decay (nu = 0) is exact."""

    weight: float = 1.1
    nu: float = 0.7
    length: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.weight < math.inf:
            raise InvalidOption(f"weight is {self.weight}; it must be 1 (exact if nu is 0) or more")
        if not self.nu >= 0:
            raise InvalidOption(f"nu is {self.nu}; it must be 0 (the same at every depth) or more")
        if self.length < 0:
            raise InvalidOption(f"length is {self.length}; it must be 0 (w decreases to 1) or more")

    @property
    def lossless(self) -> bool:
        return self.weight == 1 and (self.nu == 0 or self.length <= 1)

    @property
    def _schedule(self) -> tuple[float, float]:
        """a and b of w = a + b exp(-nu depth)."""
        if not self.length:
            return 1.0, self.weight - 1
        return 0.0, self.weight * self.length / sum(math.exp(-self.nu * depth) for depth in range(self.length))

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return strict(left * self._scale(depth).to(left.dtype), q)

    def _scale(self, depth: Tensor) -> Tensor:
        least, excess = self._schedule
        return least + excess * torch.exp(-self.nu * depth.double())

    def greedy(self, distribution: Distribution, depth: Tensor) -> Tensor:
        return rivals(distribution, distribution.probs * self._scale(depth))

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        formula = Formula("annealed", (*self._schedule, self.nu))
        return rejection(draft, scores, rng, self.accept, greedy=self.greedy, formula=formula)
