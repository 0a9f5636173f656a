"""What a call is given, checked before anything runs: options by name and kind, seeds, a string or a batch of them.

Each modality has options of its own; what they have in common is here. Knows nothing of what is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch

from outrider.core.errors import InvalidOption, unknown

Kind = tuple[tuple[type, ...], str]  # of a value: its types, and what they are called
Fact = str | int | float | bool | None

WHOLE: Kind = ((int,), "a whole number")
NUMBER: Kind = ((int, float), "a number")
SWITCH: Kind = ((bool,), "True or False")
METHODS: dict[str, Kind] = {  # what every modality's options have
    **dict.fromkeys(("drafter_options", "rule_options"), ((Mapping,), "a dictionary of options")),
    "seed": ((int, torch.Generator), "a whole number or a torch.Generator"),
}

T = TypeVar("T")


def options_of(kind: type[T], given: Mapping[str, Any]) -> T:
    """A dataclass of options from the names and values of a call."""
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise unknown("option", name, known)
    return kind(**given)


def check(options: Any, kinds: Mapping[str, Kind]) -> None:
    """Every value is of its kind, and True and False are no numbers; a drafter and a rule are named or made."""
    for name, (wanted, words) in kinds.items():
        value = getattr(options, name)
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise InvalidOption(f"{name} is {value!r:.60}; it must be {words}")
    drafter, rule = options.drafter, options.rule
    if not isinstance(drafter, str):
        if not (drafter is None or hasattr(drafter, "propose")):
            raise InvalidOption(f"drafter is {drafter!r:.60}; it must be a drafter's name, a drafter or None")
        if options.drafter_options:
            raise InvalidOption("drafter_options go with a drafter's name; this one is made already, or there is none")
    if not isinstance(rule, str):
        if not (callable(rule) and hasattr(rule, "lossless")):
            raise InvalidOption(f"rule is {rule!r:.60}; it must be a rule's name or a rule")
        if options.rule_options:
            raise InvalidOption("rule_options go with a rule's name; this one is made already")


def drawn(seed: int | torch.Generator) -> int:
    """A seed as a number; a generator gives its next one, so that it moves on."""
    if isinstance(seed, torch.Generator):
        return int(torch.randint(2**62, (), generator=seed, device=seed.device))
    return seed


def noted(drafter: Mapping[str, Any], rule: Mapping[str, Any]) -> dict[str, Fact]:
    """Options of methods as a trace notes them down."""
    found: dict[str, Fact] = {}
    for group, options in (("drafter", drafter), ("rule", rule)):
        for name, value in options.items():
            plain = value is None or isinstance(value, str | int | float | bool)
            found[f"{group}.{name}"] = value if plain else str(value)[:80]
    return found


def several(given: object, what: str) -> list[str]:
    """One string or a batch of them, as a list."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise InvalidOption(f"the {what} is a {type(given).__name__}; give a string, or a list of strings")
    if not given:
        raise InvalidOption(f"there are no {what}s; a batch is a list of at least one")
    for place, one in enumerate(given):
        if not isinstance(one, str):
            raise InvalidOption(f"{what} {place} is a {type(one).__name__}; give a string")
    return list(given)
