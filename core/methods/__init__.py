"""Every drafter and rule by name: the explicit tables that the code, the command line and the tests all read.

A new method is one function or class in a file of core/drafters or core/rules, and one row in the file of this folder
that has its family's name. The conformance suite then tests it. The tables keep the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from outrider.core.errors import InvalidOption, unknown
from outrider.core.methods import combined, draft_model, lookup, parallel_decoding, rules, self_speculative, trained
from outrider.core.methods.row import Method
from outrider.core.protocol import Drafter, Rule

__all__ = ["DRAFTERS", "OF_TEXT", "RULES", "Method", "make_drafter", "make_rule"]


def _table(*rows: Iterable[Method]) -> dict[str, Method]:
    return {method.name: method for family in rows for method in family}


DRAFTERS = _table(
    lookup.ROWS,
    parallel_decoding.ROWS,
    draft_model.ROWS,
    self_speculative.ROWS,
    trained.ROWS,
    combined.ROWS,
)

RULES = _table(rules.ROWS)

# these read words, or see their target through less of it: not for targets of two streams, or on code of others
OF_TEXT = (
    *("input-guided", "rest", "n-grammys", "cross-vocabulary"),
    *("sparse-cache", "triforce", "qspec", "swift", "draft-on-the-fly"),
)


def make_drafter(name: str | None, **options: Any) -> Drafter | None:
    """A drafter by name; None is plain decoding."""
    if name is None:
        return None
    drafter: Drafter = _make("drafter", DRAFTERS, name, options)
    return drafter


def make_rule(name: str = "exact", **options: Any) -> Rule:
    """A rule by name."""
    rule: Rule = _make("rule", RULES, name, options)
    return rule


def _make(what: str, table: dict[str, Method], name: str, options: dict[str, Any]) -> Any:
    if name not in table:
        raise unknown(what, name, table)
    method, kinds = table[name], table[name].kinds
    for given, value in options.items():
        if given not in method.options and given not in method.needs:
            raise unknown(f"option of the {what} '{name}'", given, [*method.needs, *method.options])
        if not _fits(value, kinds.get(given, "")):
            words = " or ".join(_PLAIN[part][1] for part in kinds[given].split(" | "))
            raise InvalidOption(f"{given} of the {what} '{name}' is {value!r:.60}; it must be {words}")
    for need in method.needs:
        if options.get(need) is None:
            raise InvalidOption(f"the {what} '{name}' needs {need}=...: {method.summary}")
    return method.make(**options)


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


_PLAIN: dict[str, tuple[Callable[[Any], bool], str]] = {  # kinds that can be told, and what they are called
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
    """Is a value of its kind? Where that can't be told, whoever takes it says so."""
    parts = kind.split(" | ")
    return not _PLAIN.keys() >= set(parts) or any(_PLAIN[one][0](value) for one in parts)
