"""Tokenizers and chat templates without transformers give the results of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.core.assets.store import AssetError
from outrider.core.errors import InvalidOption
from outrider.text.tokenizer import TokenizerError, Tokens

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "é 😀"}]


def test_a_folder_gives_tokenizer_template_and_special_tokens(folder: Path) -> None:
    tokens = Tokens.load(folder)
    assert tokens.size == 300
    assert tokens.special == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    text = "the cat é 😀 <|im_end|>"
    assert tokens.decode(tokens.encode(text, special=False), special=True) == text
    assert tokens.decode(tokens.encode(text, special=False)) == text.removesuffix("<|im_end|>")
    assert tokens.piece(2) == "<|im_end|>"


def test_a_conversation_is_rendered_up_to_its_answer(folder: Path) -> None:
    assert Tokens.load(folder).render(TALK) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
        "<|im_start|>user\né 😀<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_renders_the_same(tiny: SimpleNamespace, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = (
        "{%- for m in messages if m.role != 'system' %}\n    {{- loop.index }}{% generation %}{{ m | tojson }}"
        "{% endgeneration %}\n    {%- if loop.index > 2 %}{% break %}{% endif %}\n{%- endfor %}{{ eos_token }}"
    )
    folder = tiny.write(tmp_path / "m", template=template)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert Tokens.load(folder).render(TALK) == theirs.apply_chat_template(TALK, tokenize=False)
    assert Tokens.of_transformers(theirs).render(TALK) == Tokens.load(folder).render(TALK)


def test_a_separate_template_file_is_used(tiny: SimpleNamespace, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", template=None)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokens.load(folder).render(TALK) == "Hi!"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses|unsafe"),
        ("{% for x in %}", "can't be read"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe|refuses"),
        ("{{ messages.append(1) }}", "unsafe|refuses"),
    ],
)
def test_a_template_is_sandboxed_and_its_error_is_reported(
    template: str, message: str, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    tokens = Tokens.load(tiny.write(tmp_path / "m", template=template))
    with pytest.raises(TokenizerError, match=message):
        tokens.render(TALK)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the conversation is empty"),
        ([{"role": "user"}], "message 0 is"),
        (["hello"], "message 0 is 'hello'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of message 0 is a list"),
        ([{"role": "user", "content": "  "}], "last message is empty"),
        ([{"role": "wizard", "content": "x"}], "role of message 0 is 'wizard'"),
    ],
)
def test_invalid_conversations_raise(messages: list[object], message: str, folder: Path) -> None:
    with pytest.raises(InvalidOption, match=message):
        Tokens.load(folder).render(messages)  # type: ignore[arg-type]


def test_a_missing_template_raises(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="raw=True"):
        Tokens.load(tiny.write(tmp_path / "m", template=None)).render(TALK)


def test_a_broken_tokenizer_raises(tiny: SimpleNamespace, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m")
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        Tokens.load(folder)
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "tokenizer_config.json").write_text(json.dumps([1]))
    with pytest.raises((TokenizerError, AssetError)):
        Tokens.load(folder)


@pytest.mark.slow
def test_importing_text_loads_nothing_heavy() -> None:
    child = subprocess.run(
        [sys.executable, "-P", "-c", "import sys, outrider.text\nprint(*sys.modules, sep='\\n')"],
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"transformers", "huggingface_hub", "gguf", "tokenizers", "jinja2", "safetensors"}
    assert not heavy & set(child.stdout.split())
