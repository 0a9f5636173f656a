"""What the page's panels ask of a modality, and what they may offer: methods that go together, their options as knobs.

Reads the rows of methods; knows no method, nothing of what a token means, and nothing of pages.
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

_RANGES: Mapping[str, tuple[float, float, float]] = {  # lowest, highest, step; rows may have their own
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
    "least": (0, 0.5, 0.01),
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
_FEW = 4  # knobs of one method
M = TypeVar("M")


@dataclass(frozen=True)
class Knob:
    """A number that may be turned."""

    name: str
    low: float
    high: float
    step: float
    value: float
    exact: float | None = None  # where a relaxed rule loses nothing

    @property
    def label(self) -> str:
        return self.name.replace("_", " ") + (f" (exact at {self.exact:g})" if self.exact is not None else "")

    def read(self, value: object) -> float:
        found = validate.number(value, self.name, self.low, self.high)
        return int(found) if self.step == int(self.step) and found == int(found) else found


@dataclass(frozen=True)
class Choice:
    """A name out of several."""

    name: str
    choices: tuple[str, ...]
    value: str

    @property
    def label(self) -> str:
        return self.name

    def read(self, value: object) -> str:
        return validate.one_of(value, self.name, self.choices)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One run as it was asked for, checked."""

    prompt: str
    drafter: str = PLAIN
    rule: str = EXACT.name
    temperature: float = 0.0
    seed: int = 0
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # the modality's own
    judged: bool = False  # how likely is what came to the target itself?

    @property
    def lossless(self) -> bool:
        return bool(RULES[self.rule].lossless)

    def options(self) -> dict[str, Any]:
        """As the modalities' models take them."""
        plain = self.drafter == PLAIN
        return {
            "drafter": None if plain else self.drafter,
            "rule": self.rule,
            "temperature": self.temperature,
            "seed": self.seed,
            "drafter_options": {} if plain else dict(self.drafter_options),
            "rule_options": dict(self.rule_options),
            "logprobs": self.judged,
        }


class Live(Protocol):
    """A generation under way."""

    def __next__(self) -> Step: ...
    def __iter__(self) -> Iterator[Step]: ...
    def close(self) -> None: ...
    def seen(self) -> str: ...  # what there is so far, as HTML, made quickly
    def recording(self) -> Recording: ...


class Backend(Protocol):
    """One modality, its model loaded when somebody wants it."""

    name: Modality
    title: str
    what: str  # of the prompt
    examples: tuple[str, ...]
    heat: float  # the usual temperature
    usual: str  # the drafter to begin with
    extras: tuple[Knob | Choice, ...]
    defaults: Modality | None  # whose usual options methods begin with
    fixed: bool  # a server's: its drafter, and the options of that, were chosen where it was started

    @property
    def about(self) -> str: ...  # the model, in a few words
    @property
    def loaded(self) -> bool: ...
    def load(self) -> Any: ...
    def drafters(self) -> list[str]: ...  # those that can run here
    def rules(self) -> list[str]: ...
    def begin(self, asked: Asked) -> Live: ...


class Held(Generic[M]):
    """A model that is loaded once, when it is first wanted, whoever wants it."""

    def __init__(self, load: Callable[[], M]) -> None:
        self._load, self._lock = load, Lock()
        self._model: M | None = None

    @property
    def there(self) -> bool:
        return self._model is not None

    def get(self) -> M:
        with self._lock:
            if self._model is None:
                self._model = self._load()
            return self._model


@dataclass(frozen=True, kw_only=True)
class Named:
    """A published model that a panel shows in place of ours, perhaps with a smaller one of its family that drafts, and
    with options of its class."""

    model: str
    draft_model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def opened(self, load: Callable[..., M], device: str, dtype: str) -> M:
        return load(self.model, device=device, dtype=dtype, draft_model=self.draft_model, **self.options)


def together(drafter: str, rule: str) -> bool:
    """Can this rule judge what this drafter drafts?"""
    return drafter not in METHODS or RULES[rule].judges(METHODS[drafter])  # plain decoding, and a server's drafter


def offered(subject: Backend) -> list[str]:
    """Drafters to choose from, and plain decoding, unless a server has chosen."""
    return subject.drafters() if subject.fixed else [PLAIN, *subject.drafters()]


def drafting(subject: Backend, drafter: str) -> list[Knob]:
    """What may be turned of a drafter."""
    return [] if subject.fixed else knobs(drafter, METHODS, subject.defaults)


def wording(subject: Backend, drafter: str) -> list[Choice]:
    """What may be chosen of a drafter."""
    if subject.fixed or drafter not in METHODS:
        return []
    found = []
    method = METHODS[drafter]
    for option, value in initial(method, subject.defaults).items():
        if words := method.choices.get(option):
            kept = words if subject.name == "image" else tuple(one for one in words if one not in SPATIAL)
            found.append(Choice(option, kept, value))
    return found


def judging(subject: Backend, rule: str) -> list[Knob]:
    """And of a rule."""
    return knobs(rule, RULES, subject.defaults)


def rules_for(subject: Backend, drafter: str) -> list[str]:
    return [rule for rule in subject.rules() if together(drafter, rule)]


def initial(method: Method, defaults: Modality | None) -> dict[str, Any]:
    """A method's options, as it begins with them."""
    return method.options if defaults is None else {**method.options, **method.begun(defaults)}


def knobs(name: str, table: Mapping[str, Method], defaults: Modality | None = None) -> list[Knob]:
    """The numbers among a method's options, the first few."""
    if name not in table:
        return []
    method, found = table[name], []
    for option, value in initial(method, defaults).items():
        bounds = method.ranges.get(option, _RANGES.get(option))
        if bounds is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        anchor = (method.anchor or {}).get(option)
        exact = float(anchor) if anchor is not None and math.isfinite(anchor) else None
        found.append(Knob(option, *bounds, min(max(value, bounds[0]), bounds[1]), exact))
    return found[:_FEW]


def summary(name: str, table: Mapping[str, Method]) -> str:
    """What a method does, in a line."""
    if name == PLAIN:
        return "nobody guesses: one call of the target for each token"
    return table[name].summary if name in table else "what the server was started with"


def checked(subject: Backend, given: Mapping[str, Any]) -> Asked:
    """What somebody asked for, read from plain values; names that are none and numbers out of bounds are refused."""
    drafter = validate.one_of(given.get("drafter", subject.usual), "drafter", offered(subject))
    rule = validate.one_of(given.get("rule", EXACT.name), "rule", subject.rules())
    if not together(drafter, rule):
        raise InvalidOption(
            f"the rule '{rule}' can't judge what '{drafter}' drafts; take {rules_for(subject, drafter)[0]}"
        )
    extra = {one.name: one.read(given.get(one.name, one.value)) for one in subject.extras}
    return Asked(
        prompt=validate.words(given.get("prompt"), subject.what),
        drafter=drafter,
        rule=rule,
        temperature=validate.number(given.get("temperature", subject.heat), "temperature", 0, validate.HEAT),
        seed=validate.whole(given.get("seed", 0), "seed", 0, validate.SEED),
        drafter_options=_options(
            given.get("drafter_options"), [*drafting(subject, drafter), *wording(subject, drafter)]
        ),
        rule_options=_options(given.get("rule_options"), judging(subject, rule)),
        extra=extra,
    )


def _options(given: object, known: Sequence[Knob | Choice]) -> dict[str, float | str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidOption("options are names with numbers or words")
    table = {one.name: one for one in known}
    return {validate.one_of(name, "option", table): table[name].read(value) for name, value in given.items()}
