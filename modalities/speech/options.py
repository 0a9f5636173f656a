"""What can be asked of speech: every option with its default, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import torch

from outrider.core.decode import Drafter, Rule
from outrider.core.errors import InvalidOption, unknown
from outrider.core.laws import Sampling


class Given(TypedDict, total=False):
    """The options as they are written in a call; `Options` says what they mean."""

    drafter: str | Drafter | None
    rule: str | Rule
    speed: float
    temperature: float
    top_k: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: bool
    seed: int | torch.Generator
    drafter_options: Mapping[str, Any]
    rule_options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """One generation's options."""

    drafter: str | Drafter | None = None  # a name of `model.drafters`, or an object; None: plain decoding
    rule: str | Rule = "exact"  # a name of `model.rules`, or an object
    speed: float = 1.0  # how fast it is said
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0  # on what was said already: once each, see outrider.core.laws
    frequency_penalty: float = 0.0  # as often as it was said
    logprobs: bool = False  # of each token under the voice's own softmax, into the trace
    seed: int | torch.Generator = 0
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (wanted, words) in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, wanted) or (isinstance(value, bool) and wanted != (bool,)):
                raise InvalidOption(f"{name} is {value!r:.60}; it must be {words}")
        if not (math.isfinite(self.speed) and 0.5 <= self.speed <= 2):
            raise InvalidOption(f"speed is {self.speed}; it must be from 0.5 to 2 (1 is usual)")
        _ = self.sampling(0)  # checks the rest

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From the names and values of a call."""
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise unknown("option", name, known)
        return cls(**given)

    def sampling(self, end: int) -> Sampling:
        return Sampling(**{name: getattr(self, name) for name in _LAW}, end=(end,))

    def drawn_seed(self) -> int:
        """The seed as a number; a generator gives its next one, so that it moves on."""
        if isinstance(self.seed, torch.Generator):
            return int(torch.randint(2**62, (), generator=self.seed, device=self.seed.device))
        return self.seed

    def facts(self) -> dict[str, str | int | float | bool | None]:
        """What a trace notes down."""
        found: dict[str, str | int | float | bool | None] = {name: getattr(self, name) for name in ("speed", *_LAW)}
        for group, options in (("drafter", self.drafter_options), ("rule", self.rule_options)):
            for name, value in options.items():
                plain = value is None or isinstance(value, str | int | float | bool)
                found[f"{group}.{name}"] = value if plain else str(value)[:80]
        return found


# Penalties count what was said alone: an utterance also begins with its end, which must not be penalised.
_LAW = ("temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "top_k": ((int,), "a whole number"),
    "logprobs": ((bool,), "True or False"),
    **dict.fromkeys(("speed", *(name for name in _LAW if name != "top_k")), ((int, float), "a number")),
    **dict.fromkeys(("drafter_options", "rule_options"), ((Mapping,), "a dictionary of options")),
    "seed": ((int, torch.Generator), "a whole number or a torch.Generator"),
}
