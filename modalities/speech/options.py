"""The options of speech with their defaults, validated before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from outrider.core.constraint import Constraint
from outrider.core.distribution import LogitsProcessor, Sampling
from outrider.core.errors import InvalidOption
from outrider.core.methods.parallel_decoding import JACOBI
from outrider.core.methods.rules import EXACT
from outrider.core.protocol import Drafter, Rule
from outrider.core.validation import (
    METHODS,
    NUMBER,
    SWITCH,
    WHOLE,
    Fact,
    Kind,
    check,
    check_constraint,
    constraint_facts,
    options_of,
    processor_facts,
    processors_of,
    recorded,
    seed_of,
)


class Given(TypedDict, total=False):
    """The options as keyword arguments; `Options` describes them."""

    drafter: str | Drafter | None
    rule: str | Rule
    speed: float
    temperature: float
    top_k: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: bool
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor]
    constraint: Constraint | None
    seed: int | torch.Generator
    drafter_options: Mapping[str, Any]
    rule_options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a generation."""

    drafter: str | Drafter | None = JACOBI.name  # a name of `model.drafters`, or an object; None: plain decoding
    rule: str | Rule = EXACT.name  # a name of `model.rules`, or an object
    speed: float = 1.0  # speaking rate, from 0.5 to 2
    temperature: float = 0.6
    top_k: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0  # on every token generated before; see outrider.core.distribution
    frequency_penalty: float = 0.0  # the same, for each time it was generated
    logprobs: bool = False  # record each token's log-probability under the voice's own softmax
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = ()  # per utterance; ids begin with the end token
    constraint: Constraint | None = None  # of each utterance's tokens; see outrider.core.constraint.Positions
    seed: int | torch.Generator = 0
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, _TYPES)
        if not (math.isfinite(self.speed) and 0.5 <= self.speed <= 2):
            raise InvalidOption(f"speed is {self.speed}; it must be from 0.5 to 2 (1 is normal)")
        check_constraint(self.constraint)
        _ = self.sampling(0)  # checks the rest

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From keyword arguments."""
        return options_of(cls, given)

    def sampling(self, end: int) -> Sampling:
        own = {name: getattr(self, name) for name in _SAMPLING}
        processors = processors_of(self.logits_processor)
        return Sampling(**own, processors=processors, constraint=self.constraint, end=(end,))

    def drawn_seed(self) -> int:
        """The seed as a number; a generator draws one, and advances."""
        return seed_of(self.seed)

    def facts(self) -> dict[str, Fact]:
        """The options that a trace records."""
        own = {name: getattr(self, name) for name in ("speed", *_SAMPLING)}
        processors = processor_facts(processors_of(self.logits_processor))
        return own | recorded(self.drafter_options, self.rule_options) | processors | constraint_facts(self.constraint)


# No repetition penalty: it would count the prompt, which is the end token.
_SAMPLING = ("temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty")
_TYPES: dict[str, Kind] = {
    "top_k": WHOLE,
    "logprobs": SWITCH,
    **dict.fromkeys(("speed", *(name for name in _SAMPLING if name != "top_k")), NUMBER),
    **METHODS,
}
