"""From the name and the options of a method to the drafter or the rule: the half that all modalities share.

A `Catalogue` says which methods a modality takes, and makes the inputs that come from its model. Drafters made of
other drafters get their members here. Knows no method by name.
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
    """What a provider returns to leave an option at its default."""


DEFAULT = Default()


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A drafter or a rule, its name, and what a trace should note of how it was made."""

    made: T
    name: str
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One input of one method, to be made by a provider."""

    catalogue: Catalogue
    method: Method
    option: str
    value: Any  # as it was given; else its preset, or None
    options: Mapping[str, Any]  # as they were given
    within: Method | None  # the combination that the drafter is a member of
    notes: dict[str, str]

    @property
    def given(self) -> bool:
        return self.option in self.options

    def members(self, combination: Method | None = None) -> dict[str, Drafter]:
        """The members of a combination, made afresh: of this one with its options, or of another with its presets."""
        if combination is None:
            return self.catalogue.members(self.method, self.options)
        return self.catalogue.members(combination, {})


Provider = Callable[[Request], Any]


@dataclass(frozen=True)
class Catalogue:
    """The methods that a model takes, and how it makes their inputs."""

    drafters: Collection[str] = tuple(DRAFTERS)
    rules: Collection[str] = tuple(RULES)
    inputs: Mapping[Input, Provider] = field(default_factory=dict)
    others: Mapping[str, Method] = field(default_factory=dict)  # rows that only this catalogue has
    modality: str | None = None  # whose usual options drafters and rules begin with
    lossless: bool = True  # is the rule that judges the drafts?

    def drafter(
        self,
        drafter: str | Drafter | None,
        options: Mapping[str, Any] = {},
        *,
        draft_model: Any = None,
        num_draft_tokens: int | None = None,
    ) -> Resolved[Drafter | None]:
        """The drafter of a name; a drafter as it is, and None, which is plain decoding. `draft_model` and
        `num_draft_tokens` set the options of the drafter that stand for these."""
        if not isinstance(drafter, str):
            return Resolved(drafter, PLAIN if drafter is None else type(drafter).__name__)
        notes: dict[str, str] = {}
        method = self.method(drafter)
        if draft_model is not None:
            options = method.with_draft_model(options, draft_model)
        if num_draft_tokens is not None:
            options = method.limited(options, num_draft_tokens)
        return Resolved(self.build(method, self._with_defaults(method, options), notes=notes), drafter, notes)

    def rule(self, rule: str | Rule, options: Mapping[str, Any] = {}) -> Resolved[Rule]:
        """The rule of a name; a rule as it is."""
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
        """What a row makes of these options and the inputs it needs."""
        what = "drafter" if method.lossless is None else "rule"
        known, kinds = [*method.needs, *method.options], method.kinds
        for name in options:
            if name not in known:
                raise unknown(f"option of the {what} '{method.name}'", name, known)
        given = {name: value for name, value in options.items() if name not in method.presets}
        for option, kind in method.inputs.items():
            provide = self.inputs.get(kind) or _SHARED.get(kind)
            if provide is not None:
                value = options.get(option, method.presets.get(option))
                request = Request(self, method, option, value, options, within, {} if notes is None else notes)
                given.pop(option, None)
                if (made := provide(request)) is not DEFAULT:
                    given[option] = made
        for name, value in given.items():
            if not _fits(value, kinds.get(name, "")):
                words = " or ".join(_PLAIN[part][1] for part in kinds[name].split(" | "))
                raise InvalidOption(f"{name} of the {what} '{method.name}' is {value!r:.60}; it must be {words}")
        for need in method.needs:
            if given.get(need) is None:
                raise InvalidOption(f"the {what} '{method.name}' needs {need}=...: {method.summary}")
        return method.make(**given)

    def members(self, combination: Method, options: Mapping[str, Any]) -> dict[str, Drafter]:
        """The drafters of a combination by their names, in order."""
        (option,) = (name for name, kind in combination.inputs.items() if kind is Input.DRAFTERS)
        names = options.get(option, combination.presets[option])
        if isinstance(names, str | Mapping) or not isinstance(names, Sequence) or not names:
            names = (None,)
        if not all(isinstance(each, str | Drafter) for each in names):
            raise InvalidOption(
                f"{option} is {options.get(option)!r:.60}; it must be a list of drafters or of their names such as "
                f"{list(combination.presets[option])}"
            )
        own = _options_of_members(options)
        made: dict[str, Drafter] = {}
        for each in names:
            name = each if isinstance(each, str) else type(each).__name__
            while name in made:
                name += "'"
            made[name] = self.member(each, own.get(each, {}), combination) if isinstance(each, str) else each
        return made

    def member(self, name: str, options: Mapping[str, Any], within: Method) -> Drafter:
        if name == PLAIN:
            return Plain()
        if name in self.others or name not in self.drafters:
            raise unknown("drafter", name, [PLAIN, *(each for each in self.drafters if each not in self.others)])
        drafter: Drafter = self.build(DRAFTERS[name], options, within)
        return drafter


def takes(method: Method, modality: str, provided: Collection[Input]) -> bool:
    """Can a modality use this method if it provides these inputs?"""
    return modality in method.modalities and all(method.inputs.get(need) in provided for need in method.needs)


def unless_given(make: Provider) -> Provider:
    """A provider that makes an input only if none was given."""
    return lambda request: request.value if request.given else make(request)


def _options_of_members(options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    own = options.get("options") or {}
    if not isinstance(own, Mapping):
        raise InvalidOption(f"options is {own!r:.60}; give a dictionary of each drafter's options by its name")
    return own


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


_SHARED: dict[Input, Provider] = {  # inputs that no modality has to make
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


_PLAIN: dict[str, tuple[Callable[[Any], bool], str]] = {  # kinds that can be checked, and what they are called
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
    """Does a value have this type? True where the type is not one of those that can be checked."""
    parts = kind.split(" | ")
    return not _PLAIN.keys() >= set(parts) or any(_PLAIN[part][0](value) for part in parts)
