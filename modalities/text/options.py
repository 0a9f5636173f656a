"""The options of text generation with their defaults, validated before anything runs.

Independent of models; the error for an unknown name lists the known ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch

from outrider.core.constraint import Constraint
from outrider.core.distribution import LogitsProcessor, Sampling
from outrider.core.errors import InvalidOption
from outrider.core.methods.combined import AUTO
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
    options_of,
    processor_facts,
    processors_of,
    recorded,
    seed_of,
)
from outrider.text.stopping import StoppingCriterion, criteria_of
from outrider.text.structured.response_format import Format, format_of
from outrider.text.structured.tools import AUTO as MAY_CALL
from outrider.text.structured.tools import Tools

_MOST_STOPS, _MOST_ALTERNATIVES = 64, 1000


class Given(TypedDict, total=False):
    """The options as keyword arguments; `Options` describes them."""

    drafter: str | Drafter | None
    draft_model: Any
    draft_vocabulary: int | None
    head: Any
    num_draft_tokens: int | None
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
    stop_token_ids: Sequence[int]
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor]
    stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion]
    response_format: Any
    regex: str | None
    grammar: str | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    logprobs: bool
    alternatives: int
    raw: bool
    drafter_options: Mapping[str, Any]
    rule_options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a generation."""

    drafter: str | Drafter | None = AUTO.name  # a name of `model.drafters`, or an object; None: plain decoding
    draft_model: Any = None  # a name, folder, GGUF file, TextModel or transformers model; "auto" is then "draft-model"
    draft_vocabulary: int | None = None  # it drafts its first N tokens; 0: any; None: 65,536 if it has twice as many
    head: Any = None  # a draft head: a file, a folder, or a hub id of a published one, for "auto" too
    num_draft_tokens: int | None = None  # draft tokens per target pass, at most; None: the drafter's default
    rule: str | Rule = EXACT.name  # a name of `model.rules`, or an object
    max_new_tokens: int = 256  # fewer where the model's context ends
    temperature: float = 0.0  # 0: always the likeliest token
    top_k: int = 0  # sample from this many of the likeliest tokens; 0: from all
    top_p: float = 1.0  # sample from the likeliest tokens with this total probability
    min_p: float = 0.0  # sample from tokens with at least this fraction of the highest probability
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | torch.Generator = 0
    stop: str | Sequence[str] = ()  # strings that end the text, which excludes them
    stop_token_ids: Sequence[int] = ()  # tokens that end the text, besides the model's own end tokens
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = ()  # called as transformers' LogitsProcessor is
    stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion] = ()  # called as transformers' are, scores None
    response_format: Any = None  # a JSON schema, as serving APIs take it, or a pydantic model: all of the text obeys it
    regex: str | None = None  # a regular expression that the whole text matches
    grammar: str | None = None  # a Lark grammar, as llguidance reads it, of the whole text
    tools: Sequence[Mapping[str, Any]] = ()  # functions that the model may call, as serving APIs take them
    tool_choice: str | Mapping[str, Any] = MAY_CALL  # "auto", "required", "none", or the function to call
    logprobs: bool = False  # return each token's log-probability under the model's own softmax
    alternatives: int = 0  # record this many of the likeliest tokens at each position
    raw: bool = False  # continue the prompt as it is, without the chat template
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, _TYPES)
        if self.max_new_tokens < 1:
            raise InvalidOption(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")
        if not 0 <= self.alternatives <= _MOST_ALTERNATIVES:
            raise InvalidOption(f"alternatives is {self.alternatives}; it must be from 0 to {_MOST_ALTERNATIVES:,}")
        if any(not isinstance(one, str) or not one for one in self.stops) or len(self.stops) > _MOST_STOPS:
            raise InvalidOption(
                f"stop is {self.stop!r:.80}; give up to {_MOST_STOPS} strings of at least one character each"
            )
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in self.stop_token_ids):
            raise InvalidOption(f"stop_token_ids is {self.stop_token_ids!r:.80}; it must be a list of token ids")
        if self.num_draft_tokens is not None and self.num_draft_tokens < 1:
            raise InvalidOption(f"num_draft_tokens is {self.num_draft_tokens}; it must be 1 or more")
        if self.draft_vocabulary is not None and (self.draft_vocabulary < 0 or self.draft_vocabulary % 16):
            raise InvalidOption(
                f"draft_vocabulary is {self.draft_vocabulary}; it must be a multiple of 16, or 0 for all tokens"
            )
        for name in ("draft_model", "draft_vocabulary", "head", "num_draft_tokens"):
            if getattr(self, name) is not None and not isinstance(self.drafter, str):
                raise InvalidOption(f"{name} goes with a drafter's name, not with a drafter object or None")
        if self.format is not None and (self.stops or self.stop_token_ids):
            raise InvalidOption(
                "stop and stop_token_ids would end the output before its format does; leave them out, or the format"
            )
        if self.offered is not None and self.raw:
            raise InvalidOption("tools are shown by the chat template, so they can't go with raw=True")
        _ = self.sampling(()), self.criteria  # checks the rest

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From keyword arguments."""
        return options_of(cls, given)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        return processors_of(self.logits_processor)

    @property
    def criteria(self) -> tuple[StoppingCriterion, ...]:
        return criteria_of(self.stopping_criteria)

    @property
    def cuts(self) -> bool:
        """Whether the text can end elsewhere than at an end token or the limit."""
        return bool(self.stops or self.criteria)

    @cached_property
    def format(self) -> Format | None:
        """What the whole text must be; None: anything."""
        return format_of(self.response_format, self.regex, self.grammar, self.offered)

    @cached_property
    def offered(self) -> Tools | None:
        """The tools that the model is shown."""
        return Tools.of(self.tools, self.tool_choice)

    def sampling(self, end: tuple[int, ...], constraint: Constraint | None = None) -> Sampling:
        """How tokens are drawn; `end` are the model's end tokens, `constraint` enforces the format."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            processors=self.processors,
            constraint=constraint,
            end=(*end, *self.stop_token_ids),
        )

    def drawn_seed(self) -> int:
        """The seed as a number; a generator draws one, and advances."""
        return seed_of(self.seed)

    def facts(self) -> dict[str, Fact]:
        """The options that a trace records: those that differ from their defaults."""
        found: dict[str, Fact] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in _RECORDED_OTHERWISE:
                continue
            if value != one.default or one.name in ("max_new_tokens", "temperature"):
                found[one.name] = value
        found |= recorded(self.drafter_options, self.rule_options)
        if self.stops:
            found["stop"] = " | ".join(self.stops)
        if self.stop_token_ids:
            found["stop_token_ids"] = " ".join(map(str, self.stop_token_ids))
        if self.draft_model is not None:
            found["draft_model"] = str(getattr(self.draft_model, "name", self.draft_model))[:80]
        if self.head is not None:
            named = isinstance(self.head, str | Path)
            found["head"] = str(self.head if named else type(self.head).__name__)[:80]
        if self.format is not None:
            found[self.format.kind] = self.format.fact()
        if self.criteria:
            found["stopping_criteria"] = " ".join(
                getattr(each, "__name__", type(each).__name__) for each in self.criteria
            )
        return found | processor_facts(self.processors)


_RECORDED_OTHERWISE = (
    *("drafter", "draft_model", "head", "rule", "seed", "drafter_options", "rule_options"),
    *("stop", "stop_token_ids", "logits_processor", "stopping_criteria", "response_format"),
    *("regex", "grammar", "tools", "tool_choice"),
)
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TYPES: dict[str, Kind] = {
    **dict.fromkeys(("max_new_tokens", "top_k", "alternatives"), WHOLE),
    **dict.fromkeys(_NUMBERS, NUMBER),
    **dict.fromkeys(("logprobs", "raw"), SWITCH),
    **METHODS,
    "stop": ((str, list, tuple), "a string or a list of strings"),
    "stop_token_ids": ((list, tuple), "a list of token ids"),
    **dict.fromkeys(("num_draft_tokens", "draft_vocabulary"), ((int, type(None)), "a whole number or None")),
}
