"""Validation of a call's arguments before anything runs: options by name and type, seeds, a string or a batch of them.

What the modalities' options have in common. Knows nothing of what is generated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import torch

from outrider.core.errors import InvalidOption, unknown
from outrider.core.protocol import Drafter, Rule

Kind = tuple[tuple[type, ...], str]  # of a value: its types, and how messages name them
Fact = str | int | float | bool | None

WHOLE: Kind = ((int,), "a whole number")
NUMBER: Kind = ((int, float), "a number")
SWITCH: Kind = ((bool,), "True or False")
METHODS: dict[str, Kind] = {  # common to the options of every modality
    **dict.fromkeys(("drafter_options", "rule_options"), ((Mapping,), "a dictionary of options")),
    "seed": ((int, torch.Generator), "a whole number or a torch.Generator"),
}

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def options_of(kind: type[T], options: Mapping[str, Any]) -> T:
    """A dataclass of options from the names and values of a call."""
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise unknown("option", name, known)
    return kind(**options)


def shows_options(kind: type[Any]) -> Callable[[F], F]:
    """Show the fields of a dataclass of options as keyword arguments in a function's signature, as help() reads it."""

    def decorated(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default if each.default_factory is MISSING else each.default_factory(),
                annotation=each.type,
            )
            for each in fields(kind)
        ]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return decorated


def check(options: Any, kinds: Mapping[str, Kind]) -> None:
    """Refuse values of the wrong type (True and False are not numbers), and objects that are no drafter or rule."""
    for name, (wanted, words) in kinds.items():
        value = getattr(options, name)
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise InvalidOption(f"{name} is {value!r:.60}; it must be {words}")
    drafter, rule = options.drafter, options.rule
    if not isinstance(drafter, str):
        if not (drafter is None or isinstance(drafter, Drafter)):
            raise InvalidOption(f"drafter is {drafter!r:.60}; it must be a drafter's name, a drafter or None")
        if options.drafter_options:
            raise InvalidOption("drafter_options go with a drafter's name, not with a drafter object or None")
    if not isinstance(rule, str):
        if not isinstance(rule, Rule):
            raise InvalidOption(f"rule is {rule!r:.60}; it must be a rule's name or a rule")
        if options.rule_options:
            raise InvalidOption("rule_options go with a rule's name, not with a rule object")


def dtype_name(dtype: str | torch.dtype, known: Collection[str]) -> str:
    """A precision by its name or as a torch.dtype, as its name."""
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise unknown("dtype", name, known)
    return name


def seed_of(seed: int | torch.Generator) -> int:
    """A seed as a number; a generator draws one, and advances."""
    if isinstance(seed, torch.Generator):
        return int(torch.randint(2**62, (), generator=seed, device=seed.device))
    return seed


def recorded(drafter: Mapping[str, Any], rule: Mapping[str, Any]) -> dict[str, Fact]:
    """Options of methods as a trace records them."""
    facts: dict[str, Fact] = {}
    for group, options in (("drafter", drafter), ("rule", rule)):
        for name, value in options.items():
            plain = value is None or isinstance(value, str | int | float | bool)
            facts[f"{group}.{name}"] = value if plain else str(value)[:80]
    return facts


def as_list(given: object, what: str) -> list[str]:
    """One string or a batch of them, as a list."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise InvalidOption(f"the {what} is a {type(given).__name__}; give a string, or a list of strings")
    if not given:
        raise InvalidOption(f"there are no {what}s; a batch is a list of at least one")
    for place, text in enumerate(given):
        if not isinstance(text, str):
            raise InvalidOption(f"{what} {place} is a {type(text).__name__}; give a string")
    return list(given)
