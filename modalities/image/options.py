"""The options of image generation with their defaults, validated before anything runs."""

from __future__ import annotations

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

    style: str | None
    drafter: str | Drafter | None
    rule: str | Rule
    guidance_scale: float
    negative_prompt: str | None
    temperature: float
    top_k: int
    top_p: float
    entropy_aware: bool
    entropy: bool
    logprobs: bool
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor]
    constraint: Constraint | None
    seed: int | torch.Generator
    drafter_options: Mapping[str, Any]
    rule_options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a generation."""

    style: str | None = None  # one of `model.styles`; None: chosen by the prompt
    drafter: str | Drafter | None = JACOBI.name  # a name of `model.drafters`, or an object; None: plain decoding
    rule: str | Rule = EXACT.name  # a name of `model.rules`, or an object
    guidance_scale: float = 3.0  # of classifier-free guidance; 1 turns it off, 0 ignores the prompt
    negative_prompt: str | None = None  # guidance steers away from this prompt instead of from the empty one
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    entropy_aware: bool = False  # raises the temperature where entropy is low, lowers it where it is high
    entropy: bool = False  # record the entropy of each code's distribution
    logprobs: bool = False  # record each code's log-probability under the guided softmax
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = ()  # of guided logits; ids begin with a white code
    constraint: Constraint | None = None  # of the codes in raster order; see outrider.core.constraint.Positions
    seed: int | torch.Generator = 0
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, _TYPES)
        if not 0 <= self.guidance_scale <= _GUIDANCE:
            raise InvalidOption(
                f"guidance_scale is {self.guidance_scale}; it must be from 0 to {_GUIDANCE} (1 turns guidance off)"
            )
        if self.negative_prompt is not None and self.guidance_scale == 1:
            raise InvalidOption("negative_prompt needs guidance; give a guidance_scale other than 1, or leave it out")
        check_constraint(self.constraint)
        _ = self.sampling()  # checks the rest

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From keyword arguments."""
        return options_of(cls, given)

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            entropy_aware=self.entropy_aware,
            processors=processors_of(self.logits_processor),
            constraint=self.constraint,
        )

    def drawn_seed(self) -> int:
        """The seed as a number; a generator draws one, and advances."""
        return seed_of(self.seed)

    def facts(self) -> dict[str, Fact]:
        """The options that a trace records."""
        own = ("style", "guidance_scale", "temperature", "top_k", "top_p", "entropy_aware")
        negative = {} if self.negative_prompt is None else {"negative_prompt": self.negative_prompt}
        methods = recorded(self.drafter_options, self.rule_options)
        processors = processor_facts(processors_of(self.logits_processor))
        return (
            {name: getattr(self, name) for name in own}
            | negative
            | methods
            | processors
            | constraint_facts(self.constraint)
        )


_GUIDANCE = 100  # above it, only rounding is left
_TYPES: dict[str, Kind] = {
    "style": ((str, type(None)), "the name of a style, or None"),
    "negative_prompt": ((str, type(None)), "a string or None"),
    "top_k": WHOLE,
    **dict.fromkeys(("entropy_aware", "entropy", "logprobs"), SWITCH),
    **dict.fromkeys(("guidance_scale", "temperature", "top_p"), NUMBER),
    **METHODS,
}
