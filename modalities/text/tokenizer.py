"""Text to token ids and back: a model's tokenizer.json and chat template, without importing transformers.

Where a folder has no tokenizer.json, transformers makes one of what there is. Chat templates are programs of others:
they run in a sandbox that can reach nothing. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.assets.store import read_json
from outrider.core.errors import InvalidOption, OutriderError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

Message = Mapping[str, str]
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerError(OutriderError):
    """A tokenizer or a chat template that is missing or can't be used."""


class Tokens:
    """A tokenizer. `template` is a chat model's Jinja template, None for a model that only continues text."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, special: Mapping[str, str] | None = None):
        self._tokenizer = tokenizer
        self.template = template
        self.special = dict(special or {})

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja."""
        from tokenizers import Tokenizer

        if not (folder / "tokenizer.json").is_file():
            return cls.of_transformers(folder)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library has no exception of its own
            raise TokenizerError(f"{folder / 'tokenizer.json'} is not a tokenizer: {str(error)[:200]}") from None
        settings = read_json(path) if (path := folder / "tokenizer_config.json").is_file() else {}
        template = settings.get("chat_template")
        if isinstance(template, list):  # several by name
            named = {one["name"]: one["template"] for one in template}
            template = named.get("default")
        if (path := folder / "chat_template.jinja").is_file():
            template = path.read_text(encoding="utf-8")
        special = {}
        for name in _SPECIAL:
            value = settings.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                special[name] = value
        return cls(tokenizer, template, special)

    @classmethod
    def of_transformers(cls, source: Any) -> Tokens:
        """From a tokenizer object of transformers, or a folder it can read one from."""
        if isinstance(source, Path):
            from transformers import AutoTokenizer

            try:
                source = AutoTokenizer.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
            except (OSError, ValueError, ImportError) as error:
                raise TokenizerError(f"{source} has no tokenizer: {str(error).splitlines()[0][:200]}") from None
        backend = getattr(source, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(f"a {type(source).__name__} has no fast form; give one that has a tokenizer.json")
        special = {name: text for name in _SPECIAL if (text := getattr(source, name, None))}
        return cls(backend, getattr(source, "chat_template", None), special)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """`special`: add what the tokenizer puts around a text by itself, such as a token for its beginning."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except TypeError:  # of a string that has no UTF-8
            raise InvalidOption(
                "the text holds half of a surrogate pair, which is no character: is it UTF-8, read as such?"
            ) from None
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """`special`: show tokens like <|im_end|> too."""
        known = [one for one in ids if one >= 0]
        text: str = self._tokenizer.decode(known, skip_special_tokens=not special)
        return text

    def piece(self, one: int) -> str:
        """A single token for showing; what is no whole character by itself appears as the replacement character."""
        return self.decode([one], special=True)

    def id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """The same for tokenizers that give the same tokens the same ids."""
        named = sorted(self._tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        return hashlib.sha256(repr(named).encode()).hexdigest()[:16]

    @cached_property
    def names(self) -> dict[str, int]:
        """The id of every token, by the string that the tokenizer's file has for it."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    @property
    def size(self) -> int:
        count: int = self._tokenizer.get_vocab_size()
        return count

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation as the text the model was trained on, up to where its answer begins."""
        if self.template is None:
            raise TokenizerError("the model has no chat template; give a string with raw=True, which it continues")
        check_messages(messages)
        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self.special
            )
        except TokenizerError:
            raise
        except Exception as error:  # a template of others may raise anything
            why = " ".join(str(error).split())[:200]
            raise TokenizerError(f"the model's chat template refuses this conversation: {why}") from None

    @cached_property
    def _compiled(self) -> Template:
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateSyntaxError(message, 0)

        def to_json(value: Any, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)

        room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        room.filters["tojson"] = to_json
        room.globals["raise_exception"] = refuse
        room.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        assert self.template is not None
        text = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", self.template)  # marks for training
        try:
            return room.from_string(text)
        except TemplateSyntaxError as error:
            raise TokenizerError(f"the model's chat template can't be read: {error}") from None


def check_messages(messages: Sequence[Message]) -> None:
    """A conversation is a list of {"role": ..., "content": ...}, and has something to answer."""
    if not messages:
        raise InvalidOption("the conversation is empty; give at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise InvalidOption(f'message {number} is {message!r:.80}; expected {{"role": "user", "content": "..."}}')
        for part in ("role", "content"):
            if not isinstance(message[part], str):
                kind = type(message[part]).__name__
                raise InvalidOption(
                    f"the {part} of message {number} is a {kind}; this is a text model, so give a string"
                )
    if not messages[-1]["content"].strip():
        raise InvalidOption("the last message is empty; there is nothing to answer")
