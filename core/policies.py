"""How long to draft. A policy is asked before each draw, from the law the token would be drawn from, and is never
shown the token: at temperature > 0 anything else would bias the output.

Knows laws and how many guesses were accepted; nothing of who drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.errors import InvalidOption, unknown
from outrider.core.laws import Law
from outrider.core.speed import speedup


class Policy(Protocol):
    """`begin` per generation, `start` per step, `more` per draw, `learn` once the verdict is known."""

    longest: int  # no draft is longer than this

    def begin(self, rows: int, device: torch.device) -> None: ...
    def start(self) -> Tensor: ...  # [B] how many tokens each row wants at most in this step
    def more(self, law: Law, depth: int) -> Tensor: ...  # law [B, S] about to be drawn from -> [B] bool
    def learn(self, drafted: Tensor, accepted: Tensor) -> None: ...  # [B], [B]


def _length(length: int) -> int:
    if length < 1:
        raise InvalidOption(f"the draft length is {length}; it must be 1 or more (drafter=None is plain decoding)")
    return length


@dataclass
class Fixed:
    """Always the same length."""

    length: int = 5

    def __post_init__(self) -> None:
        self.longest = _length(self.length)

    def begin(self, rows: int, device: torch.device) -> None:
        self._wanted = torch.full((rows,), self.length, device=device)

    def start(self) -> Tensor:
        return self._wanted

    def more(self, law: Law, depth: int) -> Tensor:
        return torch.ones(len(law.probs), dtype=torch.bool, device=law.probs.device)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        """A fixed length learns nothing."""


@dataclass
class Confidence(Fixed):
    """Stop where the drafter's likeliest token falls below a bound (as Draft&Verify, arXiv 2309.08168, and Kangaroo,
    arXiv 2404.18911, do; there the token already drawn is looked at, here the law before the draw)."""

    length: int = 8
    bound: float = 0.4

    def more(self, law: Law, depth: int) -> Tensor:
        return law.probs.amax(-1) >= self.bound


@dataclass
class DraftExit(Fixed):
    """The adaptive exit of Draft & Verify (arXiv 2309.08168): stop where the likeliest token falls below a bound, which
    rises while less is accepted than wanted and falls while more is. The paper's two moving averages, of acceptance and
    of the bound; ours has a bound for each row, and looks before the draw."""

    length: int = 12
    bound: float = 0.6
    wanted: float = 0.85
    step: float = 0.01
    memory: float = 0.5
    slowness: float = 0.9

    def begin(self, rows: int, device: torch.device) -> None:
        super().begin(rows, device)
        self._bound = torch.full((rows,), self.bound, dtype=torch.float64, device=device)
        self._rate = torch.full_like(self._bound, self.wanted)

    def more(self, law: Law, depth: int) -> Tensor:
        return law.probs.amax(-1) >= self._bound

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        some = drafted > 0
        rate = self.memory * self._rate + (1 - self.memory) * accepted / drafted.clamp(min=1)
        self._rate = torch.where(some, rate, self._rate)
        aimed = self._bound + torch.where(self._rate < self.wanted, self.step, -self.step)
        # where nothing was drafted the bound was too high to learn anything more: it comes down
        aimed = torch.where(some, aimed, self._bound - self.step)
        self._bound = (self.slowness * self._bound + (1 - self.slowness) * aimed).clamp(0.0, 1.0)


@dataclass
class Window(Fixed):
    """Grow where all was accepted, shrink where not: the window optimised on the fly, with the steps that transformers'
    assisted generation takes (+2, -1)."""

    length: int = 5
    most: int = 16
    grow: int = 2
    shrink: int = 1

    def __post_init__(self) -> None:
        _length(self.length)
        self.longest = _length(self.most)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        whole = accepted >= drafted
        wanted = torch.where(whole, self._wanted + self.grow, self._wanted - self.shrink).clamp(1, self.most)
        self._wanted = torch.where(drafted > 0, wanted, self._wanted)


@dataclass
class BreakEven:
    """Draft only while it is predicted to pay, with the length another policy wants.

    The prediction is the published formula on a moving estimate of acceptance and on costs measured beforehand, so
    that a seed gives the same output on a busy machine as on an idle one. While switched off, every `probe`-th step
    drafts anyway, so that it can be switched on again.
    """

    cost: float  # of one drafted token, in target passes
    verify: Callable[[int], float] = field(default=lambda tokens: 1.0)  # cost of scoring so many tokens, likewise
    inner: Policy = field(default_factory=Fixed)
    least: float = 1.0  # the speedup below which drafting is off
    memory: float = 0.9
    probe: int = 16

    def __post_init__(self) -> None:
        self.longest = self.inner.longest

    def begin(self, rows: int, device: torch.device) -> None:
        self.inner.begin(rows, device)
        self._rate = torch.ones(rows, device=device, dtype=torch.float64)  # trusting at first
        self._step = 0

    def start(self) -> Tensor:
        wanted = self.inner.start()
        self._step += 1
        if self._step % self.probe == 0:
            return wanted
        pays = [
            speedup(rate, int(length), self.cost, self.verify(int(length) + 1)) >= self.least
            for rate, length in zip(self._rate.tolist(), wanted.tolist(), strict=True)
        ]
        return wanted * torch.tensor(pays, device=wanted.device)

    def more(self, law: Law, depth: int) -> Tensor:
        return self.inner.more(law, depth)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        """Accepted over tried: a chain tries one token more than it accepts, unless all pass."""
        self.inner.learn(drafted, accepted)
        tried = torch.minimum(accepted + 1, drafted).clamp(min=1)
        rate = self.memory * self._rate + (1 - self.memory) * accepted / tried
        self._rate = torch.where(drafted > 0, rate, self._rate)


POLICIES: dict[str, Callable[[int], Policy]] = {
    "fixed": Fixed,
    "confidence": Confidence,
    "window": Window,
}


def make_policy(name: str, length: int) -> Policy:
    """A policy by name, for a wanted length."""
    if name not in POLICIES:
        raise unknown("policy", name, POLICIES)
    return POLICIES[name](length)
