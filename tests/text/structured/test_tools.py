"""Tool calls: shown to the model by its template, written in its marks, valid by a grammar, parsed into the result."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import text
from outrider.core.constraint import Walker
from outrider.core.errors import InvalidOption
from outrider.text import TextModel
from outrider.text.structured.grammar import Grammars
from outrider.text.structured.tools import ToolCall, Tools
from outrider.text.tokenizer import Tokens

pytest.importorskip("llguidance")

ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
PET = {"type": "function", "function": {"name": "pet", "parameters": {"type": "object", "additionalProperties": False}}}
TOOLS = [ADD, PET]
TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{{ messages[-1]['content'] }}",
    "mistral": "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}{{ messages[-1]['content'] }}",
    "llama": "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1]['content'] }}",
}
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 2}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 7, "b": 2}}]',
    "llama": '{"name": "add", "parameters": {"a": 7, "b": 2}}',
}


@pytest.fixture(scope="module")
def lm(tiny: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """The tiny model with room for the tools, which it reads byte by byte."""
    folder = tiny.write(tmp_path_factory.mktemp("models") / "roomy", max_position_embeddings=2048)
    return text.load(folder, dtype="float32")


def tokens(tiny: SimpleNamespace, template: str) -> Tokens:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    return Tokens(tokenizer, template)


@pytest.mark.parametrize("choice", ["auto", "required", {"name": "add"}], ids=["auto", "required", "named"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_are_written_in_the_marks_of_the_template(tiny: SimpleNamespace, family: str, choice: Any) -> None:
    known, offered = tokens(tiny, TEMPLATES[family]), Tools.of(TOOLS, choice)
    assert offered is not None
    grammar = Grammars(known, [2]).lark(offered.grammar(known), 320)

    def fits(answer: str) -> bool:
        walker = Walker(grammar)
        return walker.reach([*known.encode(answer, special=False), 2]) and walker.cursor.complete

    answer = ANSWERS[family]
    assert fits(answer) and offered.calls(answer) == (ToolCall("add", {"a": 7, "b": 2}),)
    assert fits("hello") == (choice == "auto")
    assert fits(answer.replace("add", "pet").replace('"a": 7, "b": 2', "")) == (choice != {"name": "add"})
    for wrong in ('"a": 100', '"a": "7"', '"c": 7'):
        assert not fits(answer.replace('"a": 7', wrong))
    assert not fits(answer.replace("add", "sub")) and not fits(answer[:-2])


def test_the_template_shows_the_tools(tiny: SimpleNamespace, lm: TextModel) -> None:
    offered = Tools.of(TOOLS, "auto")
    assert offered is not None
    shown = tokens(tiny, TEMPLATES["hermes"]).render(
        offered.shown([{"role": "user", "content": "Hi"}], TEMPLATES["hermes"]),
        [one.written for one in offered.functions],
    )
    assert json.loads(shown[len("<tool_call>") : -2])[0]["function"]["description"] == "Adds." and shown.endswith("Hi")
    told = lm.tokens.decode(
        lm.encode([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], tools=offered)
    )
    assert (
        told.count("system") == 1 and "Be brief.\n\nYou can call these functions:" in told and '"name": "pet"' in told
    )


@pytest.mark.parametrize("drafter", [None, "prompt-lookup", "auto"])
def test_a_required_call_is_in_the_result(lm: TextModel, drafter: str | None) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "function", "function": ADD}}
    result = lm.generate("Add 3 and 2", drafter=drafter, max_new_tokens=150, **options)
    assert result.complete and result.finish_reason == "stop"
    (call,) = result.tool_calls
    assert call.name == "add" and 0 <= call.arguments["a"] <= 99 and call.arguments["b"] in (1, 2)
    assert result.trace.options["tools"] == "add pet"
    assert result.tokens == lm.generate("Add 3 and 2", drafter=None, max_new_tokens=150, **options).tokens
    history = [
        {"role": "user", "content": "Add 3 and 2"},
        {"role": "assistant", "content": result.text, "tool_calls": [ADD]},
        {"role": "tool", "content": "5"},
    ]
    assert lm.generate(history, drafter=drafter, max_new_tokens=3, tools=TOOLS).tool_calls == ()


def test_a_cut_call_is_no_call(lm: TextModel) -> None:
    result = lm.generate("Add", tools=TOOLS, tool_choice="required", max_new_tokens=20)
    assert result.finish_reason == "length" and result.complete is False and result.tool_calls == ()


def test_no_choice_shows_no_tools(lm: TextModel) -> None:
    options = {"max_new_tokens": 4}
    assert lm.generate("Add", tools=TOOLS, tool_choice="none", **options).prompt == lm.generate("Add", **options).prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "add"}, "must be a list of functions"),
        ({"tools": [{"name": "a b"}]}, "tool 0 is"),
        ({"tools": [3]}, "tool 0 is 3"),
        ({"tools": [ADD, ADD]}, "the same name: add, add"),
        ({"tools": [{"name": "f", "parameters": 3}]}, "must be a JSON schema"),
        ({"tools": [{"name": "f", "parameters": {"type": "strin"}}]}, "the schema of a tool can't be used"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice 'always'"),
        ({"tools": TOOLS, "tool_choice": {"name": "sub"}}, "function of tool_choice 'sub'"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "regex": "a"}, "regex and tools are both given"),
        ({"tools": TOOLS, "raw": True}, "can't go with raw=True"),
    ],
)
def test_bad_tools_are_refused(lm: TextModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        lm.generate("a cat", max_new_tokens=2, **options)


def test_calls_that_are_not_offered_are_not_parsed() -> None:
    offered = Tools.of(TOOLS, "auto")
    assert offered is not None
    texts = ['<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "<tool_call>{", "[TOOL_CALLS] [3]", "add(1, 2)"]
    assert [offered.calls(text) for text in texts] == [()] * 4
    two = '<tool_call>\n{"name": "pet", "arguments": {}}\n</tool_call>\n' * 2
    assert offered.calls(f"Of course. {two}") == (ToolCall("pet", {}),) * 2
