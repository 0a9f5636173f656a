"""How long to draft. A policy is asked before each draw, from the distribution the token would be drawn from, and is
never shown the token: at temperature > 0 anything else would bias the output.

Knows distributions and how many guesses were accepted; nothing of who drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.cost.theory import best_length
from outrider.core.distribution import Distribution
from outrider.core.errors import InvalidOption, unknown


class Policy(Protocol):
    """`begin` per generation, `start` per step, `more` per draw, `learn` once the verdict is known. One that reads a
    state of the draft model has `tap`, its name, and `see(states)`, called ahead of `more`."""

    longest: int  # no draft is longer than this

    def begin(self, rows: int, device: torch.device) -> None: ...
    def start(self) -> Tensor: ...  # [B] how many tokens each row wants at most in this step
    def more(
        self, distribution: Distribution, depth: int
    ) -> Tensor: ...  # distribution [B, S] about to be drawn from -> [B] bool
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

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        return torch.ones(len(distribution.probs), dtype=torch.bool, device=distribution.probs.device)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        """A fixed length learns nothing."""


@dataclass
class Confidence(Fixed):
    """Stop where the drafter's likeliest token falls below a bound (as Draft&Verify, arXiv 2309.08168, and Kangaroo,
    arXiv 2404.18911, do; there the token already drawn is looked at, here the distribution before the draw)."""

    length: int = 8
    bound: float = 0.4

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        return distribution.probs.amax(-1) >= self.bound


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

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        return distribution.probs.amax(-1) >= self._bound

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
class Best(Fixed):
    """The length that is predicted to be the fastest, for the share of guesses that was accepted lately: the window
    optimised on the fly by a model of its speed. Costs are counted in target passes and given, so that a seed gives the
    same output again."""

    length: int = 5  # what is drafted before anything is known follows from `trust`, not from this
    cost: float = 0.1  # of one drafted token
    verify: Callable[[int], float] = field(default=lambda tokens: 1.0)  # of a pass over so many tokens
    most: int = 16
    memory: float = 0.9
    trust: float = 0.8  # the share taken for granted at first

    def __post_init__(self) -> None:
        _length(self.length)
        self.longest = _length(self.most)

    def begin(self, rows: int, device: torch.device) -> None:
        super().begin(rows, device)
        self._rate = torch.full((rows,), self.trust, dtype=torch.float64)

    def start(self) -> Tensor:
        wanted = [max(best_length(rate, self.cost, self.verify, self.most)[0], 1) for rate in self._rate.tolist()]
        return torch.tensor(wanted, device=self._wanted.device)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        tried = torch.minimum(accepted + 1, drafted).clamp(min=1)
        rate = self.memory * self._rate + (1 - self.memory) * (accepted / tried).cpu()
        self._rate = torch.where(drafted.cpu() > 0, rate, self._rate)


class AcceptanceHead:
    """SpecDec++'s head: states [B, D] of the draft model -> the chance [B] that its next token will be accepted.
    Residual layers x + SiLU(x W + b), then one output. `tensors` are "0.weight", "0.bias", ... and "out.weight",
    "out.bias", as torch's linear layers name theirs."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        count = sum(name.endswith(".weight") for name in tensors) - 1
        names = [*map(str, range(count)), "out"]
        try:
            self._layers = [(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in names]
        except KeyError as error:
            raise InvalidOption(
                f"an acceptance head needs the tensor {error}; it has {', '.join(sorted(tensors)) or 'none'}"
            ) from None

    def __call__(self, states: Tensor) -> Tensor:
        x = states.to(self._layers[0][0].dtype)
        for weight, bias in self._layers[:-1]:
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
        return torch.nn.functional.linear(x, *self._layers[-1])[..., 0].sigmoid()


@dataclass
class Risk(Fixed):
    """SpecDec++'s stopping (arXiv 2405.19715): draft until the risk that something in the draft will be rejected, as a
    head predicts it, passes a threshold. The paper asks behind the token drawn, ours ahead of the draw, so that what is
    drawn decides nothing about whether it is drawn. `tap` names the state of the draft model that the head reads; None:
    it reads the distribution, as [its highest probability, the gap to the next, its entropy, the depth]."""

    head: Callable[[Tensor], Tensor] = field(default=lambda facts: facts[:, 0])
    length: int = 16
    threshold: float = 0.7
    tap: str | None = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold < 1:
            raise InvalidOption(f"threshold is {self.threshold}; it must be between 0 and 1")

    def start(self) -> Tensor:
        self._sure = torch.ones(len(self._wanted), dtype=torch.float64, device=self._wanted.device)
        return super().start()

    def see(self, states: Tensor) -> None:
        """The draft model's states [B, D] behind which the next token is to be drawn."""
        self._states = states

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        read = self._states if self.tap else facts(distribution, depth)
        self._sure = self._sure * self.head(read).double()
        return 1 - self._sure <= self.threshold


def facts(distribution: Distribution, depth: int) -> Tensor:
    """[B, 4] what can be read off a distribution: its highest probability, the gap to the next, its entropy, and the
    depth."""
    best = distribution.top(2)[1]
    return torch.stack(
        [best[:, 0], best[:, 0] - best[:, 1], distribution.entropy(), torch.full_like(best[:, 0], float(depth))], 1
    )


POLICIES: dict[str, Callable[[int], Policy]] = {
    "fixed": Fixed,
    "confidence": Confidence,
    "window": Window,
    "best": Best,
    "draft-exit": DraftExit,
}


def make_policy(name: str, length: int) -> Policy:
    """A policy by name, for a wanted length."""
    if name not in POLICIES:
        raise unknown("policy", name, POLICIES)
    return POLICIES[name](length)
