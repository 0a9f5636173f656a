"""How long to draft. A policy decides before each draw, from the distribution the token would be drawn from, and never
sees the token: at temperature > 0 anything else would bias the output.

Knows distributions and how many guesses were accepted, nothing of drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.core.cost.theory import best_length
from outrider.core.distribution import Distribution
from outrider.core.errors import InvalidOption, unknown


class Policy(Protocol):
    """`begin` is called per generation, `start` per step, `more` per draw, `learn` once the verdict is known."""

    max_length: int  # no draft is longer than this

    def begin(self, rows: int, device: torch.device) -> None: ...
    def start(self) -> Tensor: ...  # [B] the most tokens to draft for each row in this step
    def more(self, distribution: Distribution, depth: int) -> Tensor:
        """Draw from this distribution [B, S]? [B] bool."""

    def learn(self, drafted: Tensor, accepted: Tensor) -> None: ...  # [B], [B]


@runtime_checkable
class StatePolicy(Policy, Protocol):
    """A policy that may read a hidden state of the draft model."""

    tap: str | None  # the name of the state; None: it reads the distribution alone

    def see(self, states: Tensor) -> None:
        """The draft model's states [B, D] before the next draw; called before `more`."""


def _length(length: int) -> int:
    if length < 1:
        raise InvalidOption(f"the draft length is {length}; it must be 1 or more (drafter=None is plain decoding)")
    return length


@dataclass
class Fixed:
    """Always the same length."""

    length: int = 5

    def __post_init__(self) -> None:
        self.max_length = _length(self.length)

    def begin(self, rows: int, device: torch.device) -> None:
        self._lengths = torch.full((rows,), self.length, device=device)

    def start(self) -> Tensor:
        return self._lengths

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        return torch.ones(len(distribution.probs), dtype=torch.bool, device=distribution.probs.device)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        """A fixed length learns nothing."""


@dataclass
class Confidence(Fixed):
    """Stop where the probability of the likeliest token falls below a bound, as in Draft&Verify (arXiv 2309.08168),
    Kangaroo (arXiv 2404.18911) and BiLD (arXiv 2302.07863). The papers look at the token drawn, ours at the
    distribution before the draw."""

    length: int = 8
    threshold: float = 0.4

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        return distribution.probs.amax(-1) >= self.threshold


@dataclass
class DraftExit(Fixed):
    """The adaptive exit of Draft & Verify (arXiv 2309.08168): stop where the highest probability falls below a
    threshold, which rises by `step` while the acceptance rate is below `target_acceptance` and falls otherwise. Both
    are moving averages. Ours keeps a threshold per row, and decides before the draw."""

    length: int = 12
    threshold: float = 0.6
    target_acceptance: float = 0.85
    step: float = 0.01
    acceptance_decay: float = 0.5
    threshold_decay: float = 0.9

    def begin(self, rows: int, device: torch.device) -> None:
        super().begin(rows, device)
        self._threshold = torch.full((rows,), self.threshold, dtype=torch.float64, device=device)
        self._rate = torch.full_like(self._threshold, self.target_acceptance)

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        return distribution.probs.amax(-1) >= self._threshold

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        drafting = drafted > 0
        rate = self.acceptance_decay * self._rate + (1 - self.acceptance_decay) * accepted / drafted.clamp(min=1)
        self._rate = torch.where(drafting, rate, self._rate)
        aimed = self._threshold + torch.where(self._rate < self.target_acceptance, self.step, -self.step)
        # if nothing was drafted the bound is too high to learn from: lower it
        aimed = torch.where(drafting, aimed, self._threshold - self.step)
        self._threshold = (self.threshold_decay * self._threshold + (1 - self.threshold_decay) * aimed).clamp(0.0, 1.0)


@dataclass
class Window(Fixed):
    """Lengthen the draft after full acceptance and shorten it otherwise, by the steps of transformers' assisted
    generation (+2, -1)."""

    length: int = 5
    max_length: int = 16
    grow: int = 2
    shrink: int = 1

    def __post_init__(self) -> None:
        _length(self.length)
        _length(self.max_length)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        whole = accepted >= drafted
        lengths = torch.where(whole, self._lengths + self.grow, self._lengths - self.shrink).clamp(1, self.max_length)
        self._lengths = torch.where(drafted > 0, lengths, self._lengths)


@dataclass
class Best(Fixed):
    """The length predicted to be the fastest for the recent acceptance rate ("A Drop-in Solution for On-the-Fly
    Adaptation of Speculative Decoding in Large Language Models", ACL 2025.acl-long.482; its throughput model is the
    published formula here). Costs are options, in target passes, so that a seed reproduces its output."""

    length: int = 5  # unused: the first length follows from `initial_acceptance`
    cost: float = 0.1  # of one drafted token
    verify: Callable[[int], float] = field(default=lambda tokens: 1.0)  # cost of a pass over this many tokens
    max_length: int = 16
    acceptance_decay: float = 0.9
    initial_acceptance: float = 0.8  # the acceptance rate assumed at first

    def __post_init__(self) -> None:
        _length(self.length)
        _length(self.max_length)

    def begin(self, rows: int, device: torch.device) -> None:
        super().begin(rows, device)
        self._rate = torch.full((rows,), self.initial_acceptance, dtype=torch.float64)

    def start(self) -> Tensor:
        best = (best_length(rate, self.cost, self.verify, self.max_length)[0] for rate in self._rate.tolist())
        return torch.tensor([max(length, 1) for length in best], device=self._lengths.device)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        tried = torch.minimum(accepted + 1, drafted).clamp(min=1)
        rate = self.acceptance_decay * self._rate + (1 - self.acceptance_decay) * (accepted / tried).cpu()
        self._rate = torch.where(drafted.cpu() > 0, rate, self._rate)


class AcceptanceHead:
    """SpecDec++'s head: states [B, D] of the draft model -> probability [B] that its next token will be accepted.
    Residual layers x + SiLU(x W + b), then one output. `tensors` are named as torch's linear layers name theirs:
    "0.weight", "0.bias", ... and "out.weight", "out.bias"."""

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
    """SpecDec++'s stopping (arXiv 2405.19715): draft until the risk of a rejection in the draft, predicted by a trained
    head, exceeds a bound. The paper decides after a token is drawn, ours before, so that the draw cannot influence
    whether it happens. `tap` is the state of the draft model that the head reads; None: the `facts` of the
    distribution."""

    length: int = 16
    threshold: float = 0.7
    head: Callable[[Tensor], Tensor] | Mapping[str, Tensor] | None = None  # of the state; tensors: an AcceptanceHead's
    tap: str | None = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is None:
            raise InvalidOption("the policy 'risk' needs head=..., such as an AcceptanceHead")
        if not 0 < self.threshold < 1:
            raise InvalidOption(f"threshold is {self.threshold}; it must be between 0 and 1")
        self._head = self.head if callable(self.head) else AcceptanceHead(self.head)

    def start(self) -> Tensor:
        self._all_accepted = torch.ones(len(self._lengths), dtype=torch.float64, device=self._lengths.device)
        return super().start()

    def see(self, states: Tensor) -> None:
        self._states = states

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        features = self._states if self.tap else facts(distribution, depth)
        self._all_accepted = self._all_accepted * self._head(features).double()
        return 1 - self._all_accepted <= self.threshold


def facts(distribution: Distribution, depth: int) -> Tensor:
    """[B, 4] features of a distribution: its highest probability, the gap to the next, its entropy, and the depth."""
    best = distribution.top(2)[1]
    return torch.stack(
        [best[:, 0], best[:, 0] - best[:, 1], distribution.entropy(), torch.full_like(best[:, 0], float(depth))], 1
    )


POLICIES: dict[str, type[Fixed]] = {
    "fixed": Fixed,
    "confidence": Confidence,
    "window": Window,
    "best": Best,
    "draft-exit": DraftExit,
    "risk": Risk,
}


def make_policy(policy: Policy | str, length: int, **settings: Any) -> Policy:
    """A policy by name, with the wanted length and its other settings; or the one given."""
    if not isinstance(policy, str):
        if settings:
            raise InvalidOption(f"{', '.join(settings)}: these go with a policy's name; this one is made already")
        return policy
    if policy not in POLICIES:
        raise unknown("policy", policy, POLICIES)
    known = [each.name for each in fields(POLICIES[policy])]
    for name in settings:
        if name not in known:
            raise unknown(f"option of the policy '{policy}'", name, known)
    return POLICIES[policy](length, **settings)
