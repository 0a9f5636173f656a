"""The interface of the page's modality backends, their options as knobs and choices, and the check of run settings.

Reads the rows of methods; independent of single methods, of what a token means and of pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from outrider.app.page import validate
from outrider.app.page.recordings import Modality, Recording
from outrider.core.bench.runner import PLAIN
from outrider.core.drafters.parallel_decoding.jacobi import SPATIAL
from outrider.core.errors import InvalidOption
from outrider.core.methods import AUTO, DRAFTERS, RULES, Method
from outrider.core.methods.rules import EXACT
from outrider.core.trace import Step

_RANGES: Mapping[str, tuple[float, float, float]] = {  # minimum, maximum, step; rows of methods may override them
    "batch": (1, 32, 1),
    "beta": (0, 1, 0.05),
    "delta": (0, 0.5, 0.01),
    "depth": (1, 16, 1),
    "distance": (0, 10, 0.1),
    "drafts": (1, 8, 1),
    "epsilon": (0.01, 1, 0.01),
    "every": (1, 8, 1),
    "gap": (0, 5, 0.05),
    "guesses": (1, 16, 1),
    "inner_length": (1, 8, 1),
    "k": (1, 200, 1),
    "length": (1, 16, 1),
    "lenience": (0.05, 1, 0.05),
    "max_length": (1, 32, 1),
    "max_ngram": (1, 8, 1),
    "min_ngram": (1, 4, 1),
    "min_probability": (0, 0.5, 0.01),
    "min_speedup": (0.5, 2, 0.05),
    "most": (1, 16, 1),
    "ngram": (2, 8, 1),
    "nodes": (1, 64, 1),
    "nu": (0, 1, 0.05),
    "ratio": (0, 10, 0.1),
    "reach": (0.1, 3, 0.1),
    "samples": (1, 4, 1),
    "similarity": (-1, 1.5, 0.05),
    "sinks": (0, 16, 1),
    "skip_ratio": (0.1, 0.8, 0.05),
    "span": (0, 32, 1),
    "successors": (1, 16, 1),
    "tau": (1, 60, 1),
    "threshold": (0.05, 1, 0.05),
    "weight": (1, 5, 0.1),
    "width": (1, 8, 1),
    "window": (1, 32, 1),
}
METHODS = {AUTO.name: AUTO, **DRAFTERS}
_MAX_KNOBS = 4  # of one method
M = TypeVar("M")


@dataclass(frozen=True)
class Knob:
    """A numeric option: a slider on the page."""

    name: str
    low: float
    high: float
    step: float
    value: float
    exact: float | None = None  # the value at which a relaxed rule is exact

    @property
    def label(self) -> str:
        exact = f" (exact at {self.exact:g})" if self.exact is not None else ""
        return self.name.replace("_", " ").capitalize() + exact

    def read(self, value: object) -> float:
        number = validate.number(value, self.name, self.low, self.high)
        return int(number) if self.step == int(self.step) and number == int(number) else number


@dataclass(frozen=True)
class Choice:
    """An option with a fixed set of values: a dropdown on the page."""

    name: str
    choices: tuple[str, ...]
    value: str

    @property
    def label(self) -> str:
        return self.name.replace("_", " ").capitalize()

    def read(self, value: object) -> str:
        return validate.one_of(value, self.name, self.choices)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The checked settings of one run."""

    prompt: str
    drafter: str = PLAIN
    rule: str = EXACT.name
    temperature: float = 0.0
    seed: int = 0
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # options of the modality
    logprobs: bool = False  # record the target's log-probabilities of the output

    @property
    def lossless(self) -> bool:
        return bool(RULES[self.rule].lossless)

    def options(self) -> dict[str, Any]:
        """The settings as arguments of a model's `stream`."""
        plain = self.drafter == PLAIN
        return {
            "drafter": None if plain else self.drafter,
            "rule": self.rule,
            "temperature": self.temperature,
            "seed": self.seed,
            "drafter_options": {} if plain else dict(self.drafter_options),
            "rule_options": dict(self.rule_options),
            "logprobs": self.logprobs,
        }


class Generation(Protocol):
    """A generation in progress; iterates over its steps."""

    def __next__(self) -> Step: ...
    def __iter__(self) -> Iterator[Step]: ...
    def close(self) -> None: ...
    def preview(self) -> str: ...  # the output so far as HTML, cheap to make
    def recording(self) -> Recording: ...


class Backend(Protocol):
    """One modality of the page. Its model is loaded on first use."""

    name: Modality
    title: str
    prompt_label: str
    examples: tuple[str, ...]
    lessons: Mapping[str, str]  # examples by what they teach; none: the examples speak for themselves
    default_temperature: float
    default_drafter: str
    extra_options: tuple[Knob | Choice, ...]
    defaults: Modality | None  # the modality whose defaults methods use; None: the methods' own
    is_server: bool  # an external server, which fixes the drafter and its options
    device: str  # on which its model runs; empty for a server

    @property
    def description(self) -> str: ...  # the model in a few words
    @property
    def loaded(self) -> bool: ...
    def load(self) -> Any: ...
    def drafters(self) -> list[str]: ...  # the drafters whose weights are available
    def rules(self) -> list[str]: ...
    def begin(self, settings: RunSettings) -> Generation: ...


class LazyModel(Generic[M]):
    """A model that is loaded once, on first use, by whichever thread comes first; `placeholder` describes it before."""

    def __init__(self, load: Callable[[], M], placeholder: str) -> None:
        self._load, self._placeholder, self._lock = load, placeholder, Lock()
        self._model: M | None = None

    @property
    def description(self) -> str:
        return self._placeholder if self._model is None else repr(self._model).strip("<>")

    @property
    def loaded(self) -> bool:
        return self._model is not None

    def get(self) -> M:
        with self._lock:
            if self._model is None:
                self._model = self._load()
            return self._model


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A published model that a tab uses instead of ours, with an optional draft model and the options of its class."""

    model: str
    draft_model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self, load: Callable[..., M], device: str, dtype: str) -> M:
        return load(self.model, device=device, dtype=dtype, draft_model=self.draft_model, **self.options)


def compatible(drafter: str, rule: str) -> bool:
    """Whether the rule can verify the drafter's drafts; true for plain decoding and a server's drafter."""
    return drafter not in METHODS or RULES[rule].can_verify(METHODS[drafter])


def selectable_drafters(backend: Backend) -> list[str]:
    """The choices of the drafter dropdown: plain decoding and the available drafters, or a server's only drafter."""
    return backend.drafters() if backend.is_server else [PLAIN, *backend.drafters()]


def drafter_knobs(backend: Backend, drafter: str) -> list[Knob]:
    """The numeric options of a drafter."""
    return [] if backend.is_server else knobs(drafter, METHODS, backend.defaults)


def drafter_choices(backend: Backend, drafter: str) -> list[Choice]:
    """The options of a drafter with a fixed set of values."""
    if backend.is_server or drafter not in METHODS:
        return []
    choices = []
    method = METHODS[drafter]
    for option, value in default_options(method, backend.defaults).items():
        if values := method.choices.get(option):
            if backend.name != "image":
                values = tuple(name for name in values if name not in SPATIAL)
            choices.append(Choice(option, values, value))
    return choices


def rule_knobs(backend: Backend, rule: str) -> list[Knob]:
    """The numeric options of a rule."""
    return knobs(rule, RULES, backend.defaults)


def rules_for(backend: Backend, drafter: str) -> list[str]:
    return [rule for rule in backend.rules() if compatible(drafter, rule)]


def default_options(method: Method, defaults: Modality | None) -> dict[str, Any]:
    """The default options of a method for a modality."""
    return method.options if defaults is None else {**method.options, **method.with_defaults(defaults)}


def knobs(name: str, table: Mapping[str, Method], defaults: Modality | None = None) -> list[Knob]:
    """The first numeric options of a method."""
    if name not in table:
        return []
    method, result = table[name], []
    for option, value in default_options(method, defaults).items():
        bounds = method.ranges.get(option, _RANGES.get(option))
        if bounds is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        anchor = (method.exact_at or {}).get(option)
        exact = float(anchor) if anchor is not None and math.isfinite(anchor) else None
        result.append(Knob(option, *bounds, min(max(value, bounds[0]), bounds[1]), exact))
    return result[:_MAX_KNOBS]


def summary(name: str, table: Mapping[str, Method]) -> str:
    """What a method does, in one line."""
    if name == PLAIN:
        return "no drafting: one target pass for each token"
    return table[name].summary if name in table else "the drafter that the server was started with"


def checked(backend: Backend, given: Mapping[str, Any]) -> RunSettings:
    """The settings of a run from plain values; raises InvalidOption for unknown names and values out of range."""
    drafter = validate.one_of(given.get("drafter", backend.default_drafter), "drafter", selectable_drafters(backend))
    rule = validate.one_of(given.get("rule", EXACT.name), "rule", backend.rules())
    if not compatible(drafter, rule):
        raise InvalidOption(
            f"the rule '{rule}' cannot verify the drafts of '{drafter}'; use {rules_for(backend, drafter)[0]}"
        )
    extra = {option.name: option.read(given.get(option.name, option.value)) for option in backend.extra_options}
    return RunSettings(
        prompt=validate.text(given.get("prompt"), backend.prompt_label),
        drafter=drafter,
        rule=rule,
        temperature=validate.number(
            given.get("temperature", backend.default_temperature), "temperature", 0, validate.TEMPERATURE
        ),
        seed=validate.whole_number(given.get("seed", 0), "seed", 0, validate.SEED),
        drafter_options=_options(
            given.get("drafter_options"), [*drafter_knobs(backend, drafter), *drafter_choices(backend, drafter)]
        ),
        rule_options=_options(given.get("rule_options"), rule_knobs(backend, rule)),
        extra=extra,
    )


def salvaged(backend: Backend, given: Mapping[str, Any]) -> tuple[RunSettings, list[str]]:
    """The settings of a run from all valid values, and what is wrong with the others."""
    kept: dict[str, Any] = {"prompt": backend.examples[0]}
    notes = []
    for key, value in given.items():
        for name, part in value.items() if isinstance(value, Mapping) else [(None, value)]:
            trial = {**kept, key: part if name is None else {**kept.get(key, {}), name: part}}
            try:
                checked(backend, trial)
                kept = trial
            except InvalidOption as error:
                notes.append(str(error)[:300])
    return checked(backend, kept), notes


def _options(given: object, known: Sequence[Knob | Choice]) -> dict[str, float | str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidOption("options must be an object of option names and values")
    table = {option.name: option for option in known}
    return {validate.one_of(name, "option", table): table[name].read(value) for name, value in given.items()}
