"""Chat templates and tokenizer files of strangers end in one plain error, whatever they do to the process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from outrider.text.tokenizer import TokenizerError, Tokens
from outrider.text.untrusted import process
from outrider.text.untrusted.process import BoundedProcess, UntrustedError, check_tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def bounded() -> Iterator[BoundedProcess]:
    child = BoundedProcess(seconds=5, megabytes=500)
    yield child
    child.close()


def described(**changes: Any) -> dict[str, Any]:
    vocabulary = {"[UNK]": 0, "hello": 1, "world": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    whole: dict[str, Any] = json.loads(tokenizer.to_str())
    return whole | {"pre_tokenizer": {"type": "Whitespace"}} | changes


def folder(place: Path, whole: dict[str, Any]) -> Path:
    place.mkdir(exist_ok=True)
    (place / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    return place


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took more than"),
        ("{{ 'a' * 3000000000 }}", "memory"),
        ("{% set x = namespace(s='ab') %}{% for a in range(40) %}{% set x.s = x.s ~ x.s %}{% endfor %}", "memory"),
        ("{{ 'a'.center(5000000) }}", "characters"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "can't be read"),
        ("{{ raise_exception('no system role') }}", "refuses this conversation: no system role"),
    ],
)
def test_a_template_is_bounded(bounded: BoundedProcess, template: str, expected: str) -> None:
    with pytest.raises(UntrustedError, match=expected):
        bounded.ask("render", template, MESSAGES, {})
    assert bounded.ask("render", "{{ messages[0].content }}!", MESSAGES, {}) == "Hello!", "the next request is served"


def test_a_refusal_reaches_the_user() -> None:
    tokens = Tokens(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "{{ raise_exception('alternate roles') }}")
    with pytest.raises(TokenizerError, match="refuses this conversation: alternate roles"):
        tokens.render(MESSAGES)


def test_saved_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]"}
    padding["pad_to_multiple_of"] = None  # type: ignore[assignment]
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    tokens = Tokens.load(folder(tmp_path, described(padding=padding, truncation=truncation)))
    assert tokens.encode("hello world hello", special=True) == [1, 2, 1]
    padding["strategy"] = {"Fixed": 2**31}
    tokens = Tokens.load(folder(tmp_path / "large", described(padding=padding)))
    assert tokens.encode("hello", special=False) == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?<"}, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "*"}, "content": ""}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 9}},
        {"version": "9.9"},
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_or_works(tmp_path: Path, changes: dict[str, Any]) -> None:
    if "truncation" in changes:
        assert Tokens.load(folder(tmp_path, described(**changes))).encode("hello", special=True) == [1]
        return
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        Tokens.load(folder(tmp_path, described(**changes)))


def test_an_abort_is_an_error_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text("import os\ninput()\nos.abort()\n")
    monkeypatch.setattr(process, "__file__", str(tmp_path / "process.py"))
    child = BoundedProcess()
    with pytest.raises(UntrustedError, match="its process ended with -6"):
        child.ask("try_tokenizer", "anything")


def test_a_file_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    asked: list[str] = []
    monkeypatch.setattr(BoundedProcess, "ask", lambda self, action, *arguments: asked.append(action))
    path = folder(tmp_path, described()) / "tokenizer.json"
    check_tokenizer(path)
    check_tokenizer(path)
    path.write_text(json.dumps(described(version="2")))
    check_tokenizer(path)
    assert asked == ["try_tokenizer"] * 2


def test_other_files_are_converted_in_a_child_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that transformers itself reads: in a child, whose limit of memory leaves room for transformers alone."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "m"
    place.mkdir()
    (place / "vocab.json").write_text(json.dumps({"l": 0, "o": 1, "w": 2, "lo": 3, "low": 4, "<|endoftext|>": 5}))
    (place / "merges.txt").write_text("#version: 0.2\nl o\nlo w\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = Tokens.load(place)
    assert tokens.encode("lowlo", special=False) == [4, 3] and tokens.decode([4, 3]) == "lowlo"
    assert tokens.template == "{{ messages }}" and tokens.special["eos_token"] == "<|endoftext|>"
    (place / "vocab.json").write_text("[1")
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        Tokens.load(place)
    monkeypatch.setattr(process, "BoundedProcess", None)  # what was converted is kept
    (place / "vocab.json").write_text(json.dumps({"l": 0, "o": 1, "w": 2, "lo": 3, "low": 4, "<|endoftext|>": 5}))
    assert Tokens.load(place).encode("lowlo", special=False) == [4, 3]


@pytest.mark.parametrize("template", [["odd"], 5, [{"name": "default", "template": 3}], {"a": "b"}])
def test_a_template_of_another_type_is_refused_or_passed_over(tmp_path: Path, template: Any) -> None:
    place = folder(tmp_path, described())
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if template == ["odd"]:
        assert Tokens.load(place).template is None
    else:
        with pytest.raises(TokenizerError, match="must be a string"):
            Tokens.load(place)


def test_a_template_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    place = folder(tmp_path, described())
    (place / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenizerError, match="not UTF-8"):
        Tokens.load(place)
