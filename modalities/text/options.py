"""What can be asked of a generation: every option with its default, checked before anything runs.

Knows nothing of models; unknown names are refused with the known ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import torch

from outrider.core.decode import Drafter, Rule
from outrider.core.errors import InvalidOption, unknown
from outrider.core.laws import Sampling

_MOST_STOPS = 64


class Given(TypedDict, total=False):
    """The options as they are written in a call; `Options` says what they mean."""

    drafter: str | Drafter | None
    rule: str | Rule
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | torch.Generator
    stop: str | Sequence[str]
    logprobs: bool
    alternatives: int
    raw: bool
    drafter_options: Mapping[str, Any]
    rule_options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """One generation's options."""

    drafter: str | Drafter | None = "auto"  # a name of `model.drafters`, or an object; None: plain decoding
    rule: str | Rule = "exact"  # a name of `model.rules`, or an object
    max_new_tokens: int = 256  # fewer where the model's context ends
    temperature: float = 0.0  # 0: always the likeliest token
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | torch.Generator = 0
    stop: str | Sequence[str] = ()  # strings that end the text; they are left out of it
    logprobs: bool = False  # of each token, under the model's own softmax
    alternatives: int = 0  # the likeliest tokens behind each one, into the trace
    raw: bool = False  # continue the prompt as it stands, instead of answering it
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (wanted, words) in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
                raise InvalidOption(f"{name} is {value!r:.60}; it must be {words}")
        for name, least in (("max_new_tokens", 1), ("alternatives", 0)):
            if getattr(self, name) < least:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if any(not isinstance(one, str) or not one for one in self.stops) or len(self.stops) > _MOST_STOPS:
            raise InvalidOption(
                f"stop is {self.stop!r:.80}; give up to {_MOST_STOPS} strings of at least one character each"
            )
        _ = self.sampling(())  # checks the rest

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From the names and values of a call."""
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise unknown("option", name, known)
        return cls(**given)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, end: tuple[int, ...]) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            end=end,
        )

    def drawn_seed(self) -> int:
        """The seed as a number; a generator gives its next one, so that it moves on."""
        if isinstance(self.seed, torch.Generator):
            return int(torch.randint(2**62, (), generator=self.seed, device=self.seed.device))
        return self.seed

    def facts(self) -> dict[str, str | int | float | bool | None]:
        """What a trace notes down: all that is not a default."""
        found: dict[str, str | int | float | bool | None] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("drafter", "rule", "seed", "drafter_options", "rule_options", "stop"):
                continue
            if value != one.default or one.name in ("max_new_tokens", "temperature"):
                found[one.name] = value
        for group, options in (("drafter", self.drafter_options), ("rule", self.rule_options)):
            for name, value in options.items():
                plain = value is None or isinstance(value, str | int | float | bool)
                found[f"{group}.{name}"] = value if plain else str(value)[:80]
        if self.stops:
            found["stop"] = " | ".join(self.stops)
        return found


_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("max_new_tokens", "top_k", "alternatives"), ((int,), "a whole number")),
    **dict.fromkeys(_NUMBERS, ((int, float), "a number")),
    **dict.fromkeys(("logprobs", "raw"), ((bool,), "True or False")),
    **dict.fromkeys(("drafter_options", "rule_options"), ((Mapping,), "a dictionary of options")),
    "seed": ((int, torch.Generator), "a whole number or a torch.Generator"),
    "stop": ((str, list, tuple), "a string or a list of strings"),
}
