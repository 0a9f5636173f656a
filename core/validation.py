"""Validates arguments before anything runs: options by name and type, seeds, strings and batches of strings.

Shared by the modalities' options. Independent of what is generated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import torch

from outrider.core.constraint import Constraint
from outrider.core.distribution import LogitsProcessor
from outrider.core.errors import InvalidOption, unknown
from outrider.core.protocol import Drafter, Rule

Kind = tuple[tuple[type, ...], str]  # allowed types, and their name in messages
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
    known = [option.name for option in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise unknown("option", name, known)
    return kind(**options)


def shows_options(kind: type[Any]) -> Callable[[F], F]:
    """Show the fields of a dataclass of options as keyword arguments in a function's signature, as help() reads it."""

    def decorated(function: F) -> F:
        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.default if option.default_factory is MISSING else option.default_factory(),
                annotation=option.type,
            )
            for option in fields(kind)
        ]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return decorated


def check(options: Any, kinds: Mapping[str, Kind]) -> None:
    """Refuse values of the wrong type (True and False are not numbers), and objects that are not drafters or rules."""
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
    """The name of a precision given by name or as a torch.dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise unknown("dtype", name, known)
    return name


def seed_of(seed: int | torch.Generator) -> int:
    """The seed as a number; drawn from a generator, which advances."""
    if isinstance(seed, torch.Generator):
        return int(torch.randint(2**62, (), generator=seed, device=seed.device))
    return seed


def copies_of(given: int | None, name: str) -> int:
    """The number of samples per prompt, given as the option `name`; 1 if it is None."""
    copies = 1 if given is None else given
    if not isinstance(copies, int) or isinstance(copies, bool) or copies < 1:
        raise InvalidOption(f"{name} is {given!r:.40}; it must be a whole number, 1 or more")
    return copies


def processors_of(given: LogitsProcessor | Sequence[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """The option logits_processor, a function or a list of functions, as a tuple."""
    processors = tuple(given) if isinstance(given, Sequence) else (given,)
    if not all(map(callable, processors)):
        raise InvalidOption(
            f"logits_processor is {given!r:.80}; it must be a function of token ids [1, L] and logits [1, V] that "
            "returns logits, or a list of such functions"
        )
    return processors


def processor_facts(processors: Sequence[LogitsProcessor]) -> dict[str, Fact]:
    """The names of logits processors as traces record them."""
    names = " ".join(getattr(processor, "__name__", type(processor).__name__) for processor in processors)
    return {"logits_processor": names} if names else {}


def check_constraint(given: object) -> None:
    """Refuse what is no constraint."""
    if given is not None and not callable(getattr(given, "start", None)):
        raise InvalidOption(
            f"constraint is {given!r:.60}; it must be None or a constraint, such as outrider.core.constraint.Positions"
        )


def constraint_facts(constraint: Constraint | None) -> dict[str, Fact]:
    """The kind of a constraint as traces record it."""
    return {} if constraint is None else {"constraint": type(constraint).__name__}


def recorded(drafter: Mapping[str, Any], rule: Mapping[str, Any]) -> dict[str, Fact]:
    """The options of a drafter and a rule as traces record them."""
    facts: dict[str, Fact] = {}
    for group, options in (("drafter", drafter), ("rule", rule)):
        for name, value in options.items():
            plain = value is None or isinstance(value, str | int | float | bool)
            facts[f"{group}.{name}"] = value if plain else str(value)[:80]
    return facts


def as_list(given: object, what: str) -> list[str]:
    """A string or a batch of strings as a list."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise InvalidOption(f"the {what} is a {type(given).__name__}; give a string, or a list of strings")
    if not given:
        raise InvalidOption(f"there are no {what}s; a batch is a list of at least one")
    for index, text in enumerate(given):
        if not isinstance(text, str):
            raise InvalidOption(f"{what} {index} is a {type(text).__name__}; give a string")
    return list(given)
