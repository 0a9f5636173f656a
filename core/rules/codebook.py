"""Relaxed rules for codes of a codebook, of which some look alike: a guess may stand for its neighbours.

All walk as the rules in `relaxed.py` do: end tokens strictly, every level priced, nothing that the target excludes, and
each with an anchor at which it is exact. Where a guess was refused they draw from what their own acceptance left of the
distribution, which is the best that any acceptance allows (COOL-SD, proposition 1). Which codes look alike is told by
whoever makes the rule; where nobody does, ids are taken for steps of a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption
from outrider.core.kernels.neighbour_mass import grouped, pooled
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules.acceptance import strict
from outrider.core.rules.rejection import rejection


def _scale(size: int, count: int) -> Tensor:
    """[V, count] the nearest ids of each, the smaller one first."""
    ids = torch.arange(size)
    far = (ids - ids[:, None]).abs() * 2 + (ids > ids[:, None])
    return far.argsort(dim=1, stable=True)[:, 1 : count + 1]


class _Near:
    """A table of neighbours as long as wanted, on the device where it is asked for."""

    def __init__(self, given: Tensor | None) -> None:
        self.given, self._kept = given, dict[tuple[int, int, torch.device], Tensor]()

    def __call__(self, size: int, count: int, device: torch.device) -> Tensor:
        count = min(count, size - 1)
        key = size, count, device
        if key not in self._kept:
            if self.given is not None and (len(self.given) != size or self.given.shape[1] < count):
                shape = list(self.given.shape)
                raise InvalidOption(f"neighbours is a table {shape}; expected [{size}, {count} or more]")
            table = _scale(size, count) if self.given is None else self.given[:, :count].long()
            self._kept[key] = table.to(device)
        return self._kept[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lantern:
    """LANTERN ("Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding", arXiv 2410.03355): a
    guess x counts with its own mass and that of its nearest neighbours, of which it takes as many, up to `k`, as have
    together at most `delta` of the distribution: chance min(1, (p(x) + s) / q(x)). delta bounds neither this rule's
    price nor the paper's; the price is computed. The paper's code, after a refusal, strikes out the whole neighbourhood
    instead of what was accepted. delta = 0 is exact."""

    neighbours: Tensor | None = None  # [V, K] the nearest codes of each, nearest first
    k: int = 100
    delta: float = 0.05
    _near: _Near = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InvalidOption(f"k is {self.k}; it must be 1 or more")
        if not self.delta >= 0:
            raise InvalidOption(f"delta is {self.delta}; it must be 0 (exact) or more")
        object.__setattr__(self, "_near", _Near(self.neighbours))

    @property
    def lossless(self) -> bool:
        return self.delta == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        if self.lossless:
            return strict(left, q)
        near = self._near(left.shape[1], self.k, left.device)
        return strict(left + pooled(left, near, torch.full_like(left, self.delta)), q) * (distribution.probs > 0)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


@dataclass(frozen=True, kw_only=True, eq=False)
class LanternPlus:
    """LANTERN++ ("Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual Auto-regressive Models",
    arXiv 2502.06352): neighbours may add at most `ratio` times the guess's own mass, so that the bound goes with how
    flat the distribution is. Its static trees are drafters' affair. ratio = 0 is exact."""

    neighbours: Tensor | None = None
    k: int = 100
    ratio: float = 2.0
    _near: _Near = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InvalidOption(f"k is {self.k}; it must be 1 or more")
        if not self.ratio >= 0:
            raise InvalidOption(f"ratio is {self.ratio}; it must be 0 (exact) or more")
        object.__setattr__(self, "_near", _Near(self.neighbours))

    @property
    def lossless(self) -> bool:
        return self.ratio == 0

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        if self.lossless:
            return strict(left, q)
        near = self._near(left.shape[1], self.k, left.device)
        return strict(left + pooled(left, near, self.ratio * left), q) * (distribution.probs > 0)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """GSD ("Grouped Speculative Decoding for Autoregressive Image Generation", arXiv 2508.07747): a guess is judged
    with its group, accepted with min(1, p(group) / q(group)). A group is found anew in every distribution: of the
    `span` codes ranked next above and below the guess those whose probability is within `gap` of its own and which look
    like it, no further than `reach` apart. Ours refuses in favour of what the acceptance left of the distribution,
    token by token; a fixed guess's q is a point, as in the paper. span = 0 is exact."""

    codes: Tensor | None = None  # [V, D] where each code stands
    span: int = 7
    gap: float = 0.15
    reach: float = 0.5
    _kept: dict[tuple[int, torch.device], Tensor] = field(init=False, repr=False, default_factory=dict)

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
            raise InvalidOption(f"codes says where {len(self.codes)} codes stand, and the target has {size}")
        mass, guessed = grouped(left, q, self._alike(size, left.device), self.span, self.gap)
        return strict(mass, guessed) * (distribution.probs > 0)

    def _alike(self, size: int, device: torch.device) -> Tensor:
        """[V, V] which codes look alike."""
        if (size, device) not in self._kept:
            codes = torch.arange(size)[:, None] if self.codes is None else self.codes
            codes = codes.to(device, torch.float32)
            self._kept[size, device] = torch.cdist(codes, codes) < self.reach
        return self._kept[size, device]

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)


@dataclass(frozen=True, kw_only=True)
class Annealed:
    """COOL-SD (arXiv 2601.09212): accept with min(1, w p/q), w falling with depth, since what is accepted early on
    weighs less on the distribution of the whole. The paper's w is proportional to exp(-nu depth); ours falls from
    `weight` to 1 as 1 + (weight - 1) exp(-nu depth), so that it is never stricter than the strict rule. weight = 1 is
    exact."""

    weight: float = 2.0
    nu: float = 0.7

    def __post_init__(self) -> None:
        if not 1 <= self.weight < math.inf:
            raise InvalidOption(f"weight is {self.weight}; it must be 1 (exact) or more")
        if not self.nu >= 0:
            raise InvalidOption(f"nu is {self.nu}; it must be 0 (the same at every depth) or more")

    @property
    def lossless(self) -> bool:
        return self.weight == 1

    def accept(self, distribution: Distribution, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        return strict(left * (1 + (self.weight - 1) * torch.exp(-self.nu * depth)), q)

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng, self.accept)
