"""Makes drafters and rules from names and options: the part shared by all modalities.

A `Catalogue` has the methods that a modality supports, and providers for the inputs that come from its model. Members
of combined drafters are made here as well. Independent of any one method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

from torch import Tensor

from outrider.core.cost.break_even import Costs
from outrider.core.drafters.combined.guarded import Member
from outrider.core.errors import InvalidOption, unknown
from outrider.core.methods.row import Input, Method
from outrider.core.methods.tables import DRAFTERS, RULES
from outrider.core.protocol import PLAIN, Drafter, Plain, Rule

T = TypeVar("T", bound=Drafter | Rule | None)


class Default:
    """The type of DEFAULT, which a provider returns to leave an option at its default."""


DEFAULT = Default()


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A drafter or a rule, its name, and notes for the trace on how it was made."""

    made: T
    name: str
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """An input of a method, to be made by a provider."""

    catalogue: Catalogue
    method: Method
    option: str
    value: Any  # as given, else the preset or None
    options: Mapping[str, Any]  # as given
    within: Method | None  # the combination that the drafter is a member of
    notes: dict[str, str]

    @property
    def given(self) -> bool:
        return self.option in self.options

    def members(self, combination: Method | None = None) -> dict[str, Drafter]:
        """New members of a combination: of this method with its options, or of another one with its presets."""
        if combination is None:
            return self.catalogue.members(self.method, self.options)
        return self.catalogue.members(combination, {})


Provider = Callable[[Request], Any]


@dataclass(frozen=True)
class Catalogue:
    """The methods that a model supports, and the providers of their inputs."""

    drafters: Collection[str] = tuple(DRAFTERS)
    rules: Collection[str] = tuple(RULES)
    inputs: Mapping[Input, Provider] = field(default_factory=dict)
    others: Mapping[str, Method] = field(default_factory=dict)  # rows outside of the tables
    modality: str | None = None  # whose default options apply
    lossless: bool = True  # whether the rule is

    def drafter(
        self,
        drafter: str | Drafter | None,
        options: Mapping[str, Any] = {},
        *,
        draft_model: Any = None,
        head: Any = None,
        num_draft_tokens: int | None = None,
    ) -> Resolved[Drafter | None]:
        """The drafter with this name. A drafter or None (plain decoding) is returned as it is. `draft_model`,
        `head` and `num_draft_tokens` set the corresponding options of the drafter."""
        if not isinstance(drafter, str):
            return Resolved(drafter, PLAIN if drafter is None else type(drafter).__name__)
        notes: dict[str, str] = {}
        method = self.method(drafter)
        if draft_model is not None:
            options = method.with_draft_model(options, draft_model)
        if head is not None:
            options = method.with_head(options, head)
        if num_draft_tokens is not None:
            options = method.with_draft_tokens(options, num_draft_tokens)
        return Resolved(self.build(method, self._with_defaults(method, options), notes=notes), drafter, notes)

    def rule(self, rule: str | Rule, options: Mapping[str, Any] = {}) -> Resolved[Rule]:
        """The rule with this name; a rule is returned as it is."""
        if not isinstance(rule, str):
            return Resolved(rule, type(rule).__name__)
        if rule not in self.rules:
            raise unknown("rule", rule, self.rules)
        return Resolved(self.build(RULES[rule], self._with_defaults(RULES[rule], options)), rule)

    def _with_defaults(self, method: Method, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return (
            options if self.modality is None else method.with_defaults(self.modality, options, lossless=self.lossless)
        )

    def method(self, drafter: str) -> Method:
        if drafter not in self.drafters:
            raise unknown("drafter", drafter, self.drafters)
        return self.others[drafter] if drafter in self.others else DRAFTERS[drafter]

    def build(
        self,
        method: Method,
        options: Mapping[str, Any],
        within: Method | None = None,
        notes: dict[str, str] | None = None,
    ) -> Any:
        """The drafter or rule of a row, made with these options and the inputs it needs."""
        what = "drafter" if method.lossless is None else "rule"
        known, types = [*method.needs, *method.options], method.option_types
        for name in options:
            if name not in known:
                raise unknown(f"option of the {what} '{method.name}'", name, known)
        given = {name: value for name, value in options.items() if name not in method.presets}
        for option, kind in method.inputs.items():
            provide = self.inputs.get(kind) or _SHARED_PROVIDERS.get(kind)
            if provide is not None:
                value = options.get(option, method.presets.get(option))
                request = Request(self, method, option, value, options, within, {} if notes is None else notes)
                given.pop(option, None)
                if (made := provide(request)) is not DEFAULT:
                    given[option] = made
        for name, value in given.items():
            if not _fits(value, types.get(name, "")):
                words = " or ".join(_CHECKED_TYPES[part][1] for part in types[name].split(" | "))
                raise InvalidOption(f"{name} of the {what} '{method.name}' is {value!r:.60}; it must be {words}")
        for need in method.needs:
            if given.get(need) is None:
                raise InvalidOption(f"the {what} '{method.name}' needs {need}=...: {method.summary}")
        return method.make(**given)

    def members(self, combination: Method, options: Mapping[str, Any]) -> dict[str, Drafter]:
        """The members of a combined drafter by name, in order."""
        (option,) = (name for name, kind in combination.inputs.items() if kind is Input.DRAFTERS)
        names = options.get(option, combination.presets[option])
        if isinstance(names, str | Mapping) or not isinstance(names, Sequence) or not names:
            names = (None,)
        if not all(isinstance(each, str | Drafter) for each in names):
            raise InvalidOption(
                f"{option} is {options.get(option)!r:.60}; it must be a list of drafters or of their names such as "
                f"{list(combination.presets[option])}"
            )
        member_options = _options_of_members(options)
        made: dict[str, Drafter] = {}
        for each in names:
            name = each if isinstance(each, str) else type(each).__name__
            while name in made:
                name += "'"
            made[name] = self.member(each, member_options.get(each, {}), combination) if isinstance(each, str) else each
        return made

    def member(self, name: str, options: Mapping[str, Any], within: Method) -> Drafter:
        if name == PLAIN:
            return Plain()
        if name in self.others or name not in self.drafters:
            raise unknown("drafter", name, [PLAIN, *(each for each in self.drafters if each not in self.others)])
        drafter: Drafter = self.build(DRAFTERS[name], options, within)
        return drafter


def supported(method: Method, modality: str, provided: Collection[Input]) -> bool:
    """Whether a modality that provides these inputs can use this method."""
    return modality in method.modalities and all(method.inputs.get(need) in provided for need in method.needs)


def unless_given(make: Provider) -> Provider:
    """A provider that calls `make` only if the user gave no value."""
    return lambda request: request.value if request.given else make(request)


def _options_of_members(options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    by_member = options.get("options") or {}
    if not isinstance(by_member, Mapping):
        raise InvalidOption(f"options is {by_member!r:.60}; give a dictionary of each drafter's options by its name")
    return by_member


def _drafters(request: Request) -> dict[str, Drafter]:
    return request.members()


def _drafter(request: Request) -> Member:
    drafter = request.value
    if isinstance(drafter, Drafter):
        return Member(type(drafter).__name__, lambda: drafter)
    if not isinstance(drafter, str):
        raise InvalidOption(f"{request.option} is {drafter!r:.60}; it must be a drafter or a drafter's name")
    options = request.options.get("options") or {}
    return Member(drafter, partial(request.catalogue.member, drafter, options, request.method))


def _costs(request: Request) -> Any:
    given = request.value
    return Costs.parse(given) if isinstance(given, str) else DEFAULT if given is None else given


_SHARED_PROVIDERS: dict[Input, Provider] = {  # provided for all modalities
    Input.DRAFTERS: _drafters,
    Input.DRAFTER: _drafter,
    Input.PASS_COSTS: _costs,
}


def make_drafter(name: str | None, **options: Any) -> Drafter | None:
    """A drafter by name; None is plain decoding."""
    return Catalogue().drafter(name, options).made


def make_rule(name: str = "exact", **options: Any) -> Rule:
    """A rule by name."""
    return Catalogue().rule(name, options).made


# ---- types of options


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


_CHECKED_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {  # checkable types, with names for messages
    "int": (_whole, "a whole number"),
    "float": (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (lambda value: isinstance(value, str), "a string"),
    "Tensor": (lambda value: isinstance(value, Tensor), "a tensor"),
    "Sequence[int]": (lambda value: isinstance(value, list | tuple) and all(map(_whole, value)), "whole numbers"),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "options by name"),
    "None": (lambda value: value is None, "None"),
}


def _fits(value: object, kind: str) -> bool:
    """Whether a value has this type; True for types that cannot be checked."""
    parts = kind.split(" | ")
    return not _CHECKED_TYPES.keys() >= set(parts) or any(_CHECKED_TYPES[part][0](value) for part in parts)
