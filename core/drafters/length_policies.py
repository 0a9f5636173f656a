"""Policies that decide how many tokens to draft. A policy decides before each draw, from the drafter's distribution of
the next token: a decision that depended on the drawn token would bias the output at temperature > 0.

That distribution is the softmax at temperature 1 (`Scores.softmax`), whatever tokens are drawn from: at temperature 0
they are drawn from a point mass, whose highest probability says nothing. Independent of drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.core.cost.theory import speedup
from outrider.core.device import upload
from outrider.core.distribution import Distribution
from outrider.core.errors import InvalidOption, unknown


class Policy(Protocol):
    """`begin` is called per generation, `start` per round, `more` per draw, `learn` after the verdict."""

    max_length: int  # of any draft

    @property
    def reads_distribution(self) -> bool: ...  # whether `more` does; if not, any distribution of B rows may be given
    def begin(self, rows: int, device: torch.device) -> None: ...
    def start(self) -> Tensor: ...  # [B] maximum number of tokens to draft in this round, per row
    def more(self, distribution: Distribution, depth: int) -> Tensor:
        """Whether to draw another token [B] bool, by the drafter's softmax at temperature 1 [B, S]."""

    def learn(self, drafted: Tensor, accepted: Tensor) -> None: ...  # [B], [B]


@runtime_checkable
class StatePolicy(Policy, Protocol):
    """A policy that can read a hidden state of the draft model."""

    tap: str | None  # name of the hidden state; None: the policy uses the distribution only

    def see(self, states: Tensor) -> None:
        """Receive the draft model's states [B, D] before the next draw; called before `more`."""


def _length(length: int) -> int:
    if length < 1:
        raise InvalidOption(f"the draft length is {length}; it must be 1 or more (drafter=None is plain decoding)")
    return length


@dataclass
class Fixed:
    """A fixed draft length."""

    length: int = 5

    def __post_init__(self) -> None:
        self.max_length = _length(self.length)

    @property
    def reads_distribution(self) -> bool:
        return False

    def begin(self, rows: int, device: torch.device) -> None:
        self._lengths = torch.full((rows,), self.length, device=device)

    def start(self) -> Tensor:
        return self._lengths

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        return torch.ones(len(distribution.probs), dtype=torch.bool, device=distribution.probs.device)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        """Nothing to learn."""


@dataclass
class Confidence(Fixed):
    """Stop where the highest probability falls below a threshold, as in Draft & Verify (arXiv 2309.08168), Kangaroo
    (arXiv 2404.18911) and BiLD (arXiv 2302.07863). The papers use the drawn token's probability; ours decides before
    the draw. `last`: the token of that distribution is still drafted, as in Kangaroo, so that a draft has one or more;
    the next is not, whichever was drawn. `joint`: the highest probabilities of the draft so far are multiplied, which
    estimates whether all of it is accepted, and with that whether another token is worth a pass."""

    length: int = 8
    threshold: float = 0.4
    last: bool = False
    joint: bool = False

    @property
    def reads_distribution(self) -> bool:
        return True

    def begin(self, rows: int, device: torch.device) -> None:
        super().begin(rows, device)
        self._sure = torch.ones(rows, dtype=torch.bool, device=device)
        self._chance = torch.ones(rows, device=device)

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        chance = distribution.probs.amax(-1)
        if self.joint:
            self._chance = chance = chance * self._chance if depth else chance
        sure = chance >= self.threshold
        if not self.last:
            return sure
        before = self._sure if depth else torch.ones_like(sure)
        self._sure = sure
        return before


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

    @property
    def reads_distribution(self) -> bool:
        return True

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
        moved = self._threshold + torch.where(self._rate < self.target_acceptance, self.step, -self.step)
        # a row that drafted nothing measured no acceptance: lower its threshold so that it drafts again
        moved = torch.where(drafting, moved, self._threshold - self.step)
        self._threshold = (self.threshold_decay * self._threshold + (1 - self.threshold_decay) * moved).clamp(0.0, 1.0)


@dataclass
class Window(Fixed):
    """Lengthen the draft after full acceptance and shorten it otherwise; default: by +2 and -1, as transformers'
    assisted generation does."""

    length: int = 5
    max_length: int = 16
    grow: int = 2
    shrink: int = 1

    def __post_init__(self) -> None:
        _length(self.length)
        _length(self.max_length)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        full = accepted >= drafted
        lengths = torch.where(full, self._lengths + self.grow, self._lengths - self.shrink).clamp(1, self.max_length)
        self._lengths = torch.where(drafted > 0, lengths, self._lengths)


@dataclass
class Best(Fixed):
    """The length predicted to be fastest for the recent acceptance rate ("A Drop-in Solution for On-the-Fly Adaptation
    of Speculative Decoding in Large Language Models", ACL 2025.acl-long.482, whose throughput formula this uses). Costs
    are options, in target passes, not measurements, so that a seed reproduces the output."""

    length: int = 5  # unused: the first length follows from `initial_acceptance`
    cost: float = 0.1  # of one drafted token
    verify: Sequence[float] = (1.0,)  # costs of target passes over 1, 2, ... tokens; of more as the last
    max_length: int = 16
    acceptance_decay: float = 0.9
    initial_acceptance: float = 0.8  # acceptance rate before any was measured

    def __post_init__(self) -> None:
        _length(self.length)
        _length(self.max_length)

    def begin(self, rows: int, device: torch.device) -> None:
        super().begin(rows, device)
        self._rate = torch.full((rows,), self.initial_acceptance, dtype=torch.float64, device=device)
        passes = [
            self.verify[min(length, len(self.verify) - 1)] / self.verify[0] for length in range(self.max_length + 1)
        ]
        gains = [speedup(0.0, length, self.cost, each) for length, each in enumerate(passes)]
        self._gains = upload(gains, device, torch.float64)  # of each length [K + 1], a token

    def start(self) -> Tensor:
        reached = self._rate[:, None].expand(-1, self.max_length).cumprod(1).cumsum(1)
        tokens = torch.nn.functional.pad(reached + 1, (1, 0), value=1.0)  # [B, K + 1]
        return (tokens * self._gains).argmax(1).clamp(min=1)

    def learn(self, drafted: Tensor, accepted: Tensor) -> None:
        tried = torch.minimum(accepted + 1, drafted).clamp(min=1)
        rate = self.acceptance_decay * self._rate + (1 - self.acceptance_decay) * (accepted / tried)
        self._rate = torch.where(drafted > 0, rate, self._rate)


class AcceptanceHead:
    """SpecDec++'s head: states [B, D] of the draft model -> probability [B] that its next token will be accepted.
    Residual layers x + SiLU(x W + b), then one output. `tensors` has "0.weight", "0.bias", ..., "out.weight" and
    "out.bias"."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        count = sum(name.endswith(".weight") for name in tensors) - 1
        names = [*map(str, range(count)), "out"]
        try:
            self._layers = [(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in names]
        except KeyError as error:
            raise InvalidOption(
                f"an acceptance head needs the tensor {error}; given were {', '.join(sorted(tensors)) or 'none'}"
            ) from None

    def __call__(self, states: Tensor) -> Tensor:
        if self._layers[0][0].device != states.device:
            self._layers = [(weight.to(states.device), bias.to(states.device)) for weight, bias in self._layers]
        x = states.to(self._layers[0][0].dtype)
        for weight, bias in self._layers[:-1]:
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
        return torch.nn.functional.linear(x, *self._layers[-1])[..., 0].sigmoid()


@dataclass
class Risk(Fixed):
    """SpecDec++ (arXiv 2405.19715): stop when the predicted probability that some drafted token will be rejected
    exceeds a threshold. A trained head predicts the acceptance of each token, from the draft model's hidden state `tap`
    (None: from the distribution's `features`). The paper decides after the draw; ours decides before it."""

    length: int = 16
    threshold: float = 0.7
    head: Callable[[Tensor], Tensor] | Mapping[str, Tensor] | None = None  # a function, or an AcceptanceHead's tensors
    tap: str | None = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is None:
            raise InvalidOption("the policy 'risk' needs head=..., such as an AcceptanceHead")
        if not 0 < self.threshold < 1:
            raise InvalidOption(f"threshold is {self.threshold}; it must be between 0 and 1")
        self._head = self.head if callable(self.head) else AcceptanceHead(self.head)

    @property
    def reads_distribution(self) -> bool:
        return not self.tap

    def start(self) -> Tensor:
        self._all_accepted = torch.ones(len(self._lengths), dtype=torch.float64, device=self._lengths.device)
        return super().start()

    def see(self, states: Tensor) -> None:
        self._states = states

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        inputs = self._states if self.tap else features(distribution, depth)
        self._all_accepted = self._all_accepted * self._head(inputs).double()
        return 1 - self._all_accepted <= self.threshold


@dataclass
class Budget(Fixed):
    """Adaptive verification, as in DSpark (arXiv 2607.05147) and DFly (arXiv 2607.25852): stop where another token no
    longer raises the expected number of tokens per cost. With E expected tokens from n drafted ones, of which all are
    accepted with probability a, and a target pass that costs 1 + n * price, that is where a (1 + n price) <= price E.
    A token's acceptance probability is estimated by `head` from the draft model's hidden state `tap`, or by the highest
    probability. Every row decides alone, before the draw."""

    length: int = 16
    price: float = 0.05  # of one more token in a target pass, in passes over one token
    head: Callable[[Tensor], Tensor] | None = None
    tap: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.price >= 0:
            raise InvalidOption(f"price is {self.price}; it must be 0 (verify all tokens) or more")

    @property
    def reads_distribution(self) -> bool:
        return not self.tap

    def start(self) -> Tensor:
        self._all_accepted = torch.ones(len(self._lengths), dtype=torch.float64, device=self._lengths.device)
        self._expected = torch.ones_like(self._all_accepted)
        return super().start()

    def see(self, states: Tensor) -> None:
        self._states = states

    def more(self, distribution: Distribution, depth: int) -> Tensor:
        chance = self.head(self._states) if self.head and self.tap else distribution.probs.amax(-1)
        self._all_accepted = self._all_accepted * chance.double()
        pays = self._all_accepted * (1 + depth * self.price) > self.price * self._expected
        self._expected = self._expected + self._all_accepted
        return pays


def features(distribution: Distribution, depth: int) -> Tensor:
    """[B, 4] the highest probability, its difference to the second highest, the entropy, and the depth."""
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
    "budget": Budget,
}


def make_policy(policy: Policy | str, length: int, **settings: Any) -> Policy:
    """The policy of a name with this length and settings; a policy object is returned as it is."""
    if not isinstance(policy, str):
        if settings:
            raise InvalidOption(
                f"{', '.join(settings)}: settings go with a policy's name, and `policy` is an object; set them on it"
            )
        return policy
    if policy not in POLICIES:
        raise unknown("policy", policy, POLICIES)
    known = [option.name for option in fields(POLICIES[policy])]
    for name in settings:
        if name not in known:
            raise unknown(f"option of the policy '{policy}'", name, known)
    return POLICIES[policy](length, **settings)
