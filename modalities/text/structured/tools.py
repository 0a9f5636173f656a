"""Tool calls: functions that a model may call, shown by its chat template, and the calls in its answer.

A call's arguments obey the function's JSON schema by a grammar, whether the model may or must call. The marks around a
call are those that the chat template shows: Hermes and Qwen, Mistral, or Llama; a model whose template knows no tools
is told of Hermes' in a system message. Independent of models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import InvalidOption, unknown
from outrider.text.structured.grammar import JSON_STYLE
from outrider.text.tokenizer import Message, Tokens

AUTO = "auto"  # the model may call
CHOICES = (AUTO, "required", "none")
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class ToolCall:
    """A call of a function, in the order of the text."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class _Marks:
    """How calls are written: `first` opens them, and each is {"name": ..., `key`: ...} between `begin` and `end`."""

    first: str
    begin: str
    key: str
    end: str


_HERMES = _Marks("<tool_call>", "\n", "arguments", "\n</tool_call>")
_MISTRAL = _Marks("[TOOL_CALLS]", " [", "arguments", "]")
_LLAMA = _Marks("", "", "parameters", "")


@dataclass(frozen=True)
class Function:
    name: str
    description: str
    parameters: dict[str, Any]

    @property
    def written(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The functions, and whether the model may or must call one, or must call the one named."""

    functions: tuple[Function, ...]
    choice: str

    @classmethod
    def of(cls, tools: Any, choice: Any) -> Tools | None:
        """From the options, as serving APIs take them; None: no tools."""
        if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
            raise InvalidOption(f"tools is {tools!r:.60}; it must be a list of functions")
        functions = tuple(_function(tool, place) for place, tool in enumerate(tools))
        names = [function.name for function in functions]
        if len({*names}) < len(names):
            raise InvalidOption(f"two of the tools have the same name: {', '.join(names)}")
        if isinstance(choice, Mapping):
            named = choice.get("function", choice)
            choice = named.get("name") if isinstance(named, Mapping) else None
            if choice not in names:
                raise unknown("function of tool_choice", choice, names)
        elif choice not in CHOICES:
            raise unknown("tool_choice", choice, [*CHOICES, '{"type": "function", "function": {"name": ...}}'])
        elif choice == "required" and not functions:
            raise InvalidOption("tool_choice is 'required' and there are no tools")
        return cls(functions, choice) if functions and choice != "none" else None

    def shown(self, messages: Sequence[Message], template: str | None) -> list[Message]:
        """The conversation, with the tools in its system message if the template knows no tools."""
        if template is not None and re.search(r"\btools\b", template):
            return list(messages)
        lines = "\n".join(json.dumps(function.written) for function in self.functions)
        told = (
            "You can call these functions:\n<tools>\n"
            f"{lines}\n</tools>\nTo call one, answer with its name and arguments as JSON:\n"
            '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
        )
        before = str(messages[0]["content"]) + "\n\n" if messages and messages[0].get("role") == "system" else ""
        return [{"role": "system", "content": before + told}, *messages[bool(before) :]]

    def grammar(self, tokens: Tokens) -> str:
        """The answers allowed, as llguidance's Lark grammar."""
        marks = _marks(tokens.template)
        wanted = [function for function in self.functions if self.choice in (*CHOICES, function.name)]
        calls = [f"call_{place}" for place in range(len(wanted))]
        rules = ["%llguidance {}"]
        if self.choice == AUTO and marks.first:
            rules += [f"start: ({' | '.join(calls)})* TEXT", r"TEXT: /(.|\n)*/"]
        elif self.choice == AUTO:
            rules += [f"start: {' | '.join([*calls, 'TEXT'])}", r"TEXT: /[^{](.|\n)*/"]
        elif self.choice == "required" and marks is _HERMES:
            call = " | ".join(calls)
            rules += [f'start: ({call}) ("\\n" ({call}))*']
        else:
            rules += [f"start: {' | '.join(calls)}"]
        for call, function in zip(calls, wanted, strict=True):
            opening = _literal(marks.first, tokens)
            if self.choice == AUTO and marks.first:
                if opening.startswith("<"):  # a token of its own
                    opening = f"TEXT {opening}"
                else:
                    rules.append(f"{call}_mark[lazy]: TEXT {opening}")
                    opening = f"{call}_mark"
            body = f'{marks.begin}{{"name": {json.dumps(function.name)}, "{marks.key}": '
            schema = {"x-guidance": JSON_STYLE} | function.parameters
            closing = _literal("}" + marks.end, tokens)
            rules.append(f"{call}: {opening} {json.dumps(body)} %json {json.dumps(schema)} {closing}")
        return "\n".join(rules)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        """The complete calls in a text with its special tokens."""
        decoder, found, names = json.JSONDecoder(), list[ToolCall](), {function.name for function in self.functions}
        starts = [
            match.end() for mark in ("<tool_call>", "[TOOL_CALLS]") for match in re.finditer(re.escape(mark), text)
        ]
        for start in sorted(starts) or [0]:
            try:
                value, _ = decoder.raw_decode(text, len(text) - len(text[start:].lstrip()))
            except ValueError:
                continue
            for call in value if isinstance(value, list) else [value]:
                if isinstance(call, dict) and call.get("name") in names:
                    arguments = call.get("arguments", call.get("parameters"))
                    if isinstance(arguments, dict):
                        found.append(ToolCall(call["name"], arguments))
        return tuple(found)


def _function(tool: Any, place: int) -> Function:
    given = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidOption(
            f"tool {place} is {tool!r:.80}; it must have a name of letters, digits, _, . and -, such as "
            '{"type": "function", "function": {"name": "add", "parameters": {...}}}'
        )
    parameters = given.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise InvalidOption(f"the parameters of the tool '{name}' are {parameters!r:.60}; they must be a JSON schema")
    return Function(name, str(given.get("description", "")), dict(parameters))


def _marks(template: str | None) -> _Marks:
    text = template or ""
    if "<tool_call>" in text or "tools" not in text:
        return _HERMES
    return _MISTRAL if "[TOOL_CALLS]" in text else _LLAMA


def _literal(text: str, tokens: Tokens) -> str:
    """A text in a Lark grammar; special tokens in it are tokens of their own."""
    special = sorted(tokens.specials & {*re.findall(r"</?\w+>|\[\w+\]", text)})
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return " ".join(f"<[{tokens.id(part)}]>" if part in special else json.dumps(part) for part in parts if part)
