"""The options `response_format`, `regex` and `grammar`: what an output must be, and its value once it is.

Formats are written as for serving APIs, or are pydantic models. Independent of how a format is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import InvalidOption, unknown
from outrider.text.structured.grammar import Grammar, Grammars
from outrider.text.structured.tools import Tools

_TYPES = ("text", "json_object", "json_schema")


@dataclass(frozen=True)
class Format:
    """What the whole output must be: a text of the language `kind`, and how its value is read."""

    kind: str  # "json_schema", "regex", "grammar" or "tools"
    source: Any
    read: Callable[[str], Any]

    def constraint(self, grammars: Grammars, vocabulary: int) -> Grammar:
        if self.kind == "json_schema":
            return grammars.json_schema(self.source, vocabulary)
        if self.kind == "tools":
            return grammars.lark(self.source.grammar(grammars.tokens), vocabulary, "schema of a tool")
        return (grammars.regex if self.kind == "regex" else grammars.lark)(self.source, vocabulary)

    def fact(self) -> str:
        """The source as traces record it."""
        if isinstance(self.source, Tools):
            return " ".join(function.name for function in self.source.functions)
        return self.source if isinstance(self.source, str) else json.dumps(self.source)


def format_of(
    response_format: Any, regex: str | None, grammar: str | None, tools: Tools | None = None
) -> Format | None:
    """The format of these options, of which at most one is given; None: any text."""
    given = {
        name: value
        for name, value in (
            ("response_format", response_format),
            ("regex", regex),
            ("grammar", grammar),
            ("tools", tools),
        )
        if value is not None
    }
    if len(given) > 1:
        raise InvalidOption(f"{' and '.join(given)} are both given; an output has one format")
    for name in ("regex", "grammar"):
        if name in given:
            if not isinstance(given[name], str) or not given[name]:
                raise InvalidOption(f"{name} is {given[name]!r:.60}; it must be a string of at least one character")
            return Format(name, given[name], str)
    if tools is not None:
        return Format("tools", tools, str)
    return None if response_format is None else _json_format(response_format)


def _json_format(given: Any) -> Format | None:
    if isinstance(given, type) and callable(getattr(given, "model_json_schema", None)):  # a pydantic model
        return Format("json_schema", _closed(given.model_json_schema()), given.model_validate_json)  # type: ignore[attr-defined]
    if isinstance(given, str):
        given = {"type": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        raise InvalidOption(
            f"response_format is {given!r:.60}; give a pydantic model, or a dictionary such as "
            '{"type": "json_schema", "json_schema": {"schema": {...}}}'
        )
    if given["type"] not in _TYPES:
        raise unknown("type of response_format", given["type"], _TYPES)
    if given["type"] == "text":
        return None
    if given["type"] == "json_object":
        return Format("json_schema", {"type": "object"}, json.loads)
    within = given.get("json_schema", given)
    schema = within.get("schema") if isinstance(within, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidOption(
            f"the schema of response_format is {schema!r:.60}; it must be a dictionary: "
            '{"type": "json_schema", "json_schema": {"schema": {...}}}'
        )
    return Format("json_schema", dict(schema), json.loads)


def _closed(schema: Any) -> Any:
    """A pydantic model's schema without further properties, which the model would ignore, unless it asks for them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(part) for key, part in schema.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed
