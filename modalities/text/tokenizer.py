"""Encodes and decodes text with a model's tokenizer.json and chat template, without importing transformers.

If a folder has no tokenizer.json, transformers converts the files that are there. Files of strangers are judged in a
child process with bounded time and memory, where chat templates run in a sandbox too. Independent of models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.assets.files import read_json
from outrider.core.errors import InvalidOption, OutriderError
from outrider.text.untrusted.process import UntrustedError, check_tokenizer, converted_tokenizer, shared

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerError(OutriderError):
    """A tokenizer or chat template that is missing or unusable."""


class Tokens:
    """A tokenizer with a chat model's Jinja `template`, or None for a model that only continues text."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, special: Mapping[str, str] | None = None):
        self._tokenizer = tokenizer
        self.template = template
        self.special = dict(special or {})

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """Load tokenizer.json, tokenizer_config.json and chat_template.jinja of a folder."""
        from tokenizers import Tokenizer

        if not (folder / "tokenizer.json").is_file():
            return cls._converted(folder)
        path = folder / "tokenizer.json"
        try:
            check_tokenizer(path)
        except UntrustedError as error:
            raise TokenizerError(f"{path} is not a tokenizer: {str(error)[:200]}") from None
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # settings left from its training; prompts are read whole
        tokenizer.no_padding()
        settings = read_json(path) if (path := folder / "tokenizer_config.json").is_file() else {}
        template = settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            named = (each for each in template if isinstance(each, dict) and each.get("name") == "default")
            template = next(named, {}).get("template")
        if (path := folder / "chat_template.jinja").is_file():
            try:
                template = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                raise TokenizerError(f"{path} is not a chat template: it is not UTF-8 text") from None
        if template is not None and not isinstance(template, str):
            raise TokenizerError(f"the chat template of {folder} is a {type(template).__name__}; it must be a string")
        special = {}
        for name in _SPECIAL:
            value = settings.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                special[name] = value
        return cls(tokenizer, template, special)

    @classmethod
    def _converted(cls, folder: Path) -> Tokens:
        """Load other tokenizer files, which transformers converts in a child process."""
        from tokenizers import Tokenizer

        try:
            whole = converted_tokenizer(folder)
        except (UntrustedError, OSError) as error:
            raise TokenizerError(f"{folder} has no tokenizer: {str(error)[:200]}") from None
        return cls(Tokenizer.from_str(whole["tokenizer"]), whole["template"], whole["special"])

    @classmethod
    def of_transformers(cls, source: Any) -> Tokens:
        """Convert a transformers tokenizer that is loaded."""
        backend = getattr(source, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"a {type(source).__name__} has no fast version; give a tokenizer that has a tokenizer.json"
            )
        special = {name: text for name in _SPECIAL if (text := getattr(source, name, None))}
        return cls(backend, getattr(source, "chat_template", None), special)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return token ids; with `special`, including tokens that the tokenizer adds, such as a start token."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except TypeError:  # for a string that UTF-8 cannot encode
            raise InvalidOption(
                "the text contains an unpaired surrogate, which is not a character; decode the file as UTF-8"
            ) from None
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return text; with `special`, including tokens like <|im_end|>. Negative ids are skipped."""
        known = [token for token in ids if token >= 0]
        text: str = self._tokenizer.decode(known, skip_special_tokens=not special)
        return text

    def piece(self, token: int) -> str:
        """Return one token as text for display; an incomplete character appears as the replacement character."""
        return self.decode([token], special=True)

    def serialized(self) -> str:
        """Return the contents of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def id(self, token: str) -> int | None:
        result: int | None = self._tokenizer.token_to_id(token)
        return result

    @cached_property
    def specials(self) -> frozenset[str]:
        """The tokens that mark something and are no text."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary, equal for tokenizers with the same tokens and ids."""
        named = sorted(self._tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        return hashlib.sha256(repr(named).encode()).hexdigest()[:16]

    @cached_property
    def names(self) -> dict[str, int]:
        """Map token strings, as in the tokenizer's file, to ids."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    @property
    def size(self) -> int:
        count: int = self._tokenizer.get_vocab_size()
        return count

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render a conversation with the chat template, up to the start of the answer."""
        if self.template is None:
            raise TokenizerError("the model has no chat template; give a string and raw=True to continue it")
        check_messages(messages, self.template)
        try:
            text: str = shared().ask(
                "render", self.template, [dict(message) for message in messages], self.special, list(tools)
            )
        except UntrustedError as error:
            raise TokenizerError(_complaint(str(error))) from None
        return text


def _complaint(why: str) -> str:
    return why if why.startswith("the model's chat template") else f"the model's chat template can't be rendered: {why}"


_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model")


def check_messages(messages: Sequence[Message], template: str | None = None) -> None:
    """Raise InvalidOption unless messages are {"role": ..., "content": ...} with roles that are usual or named in the
    chat template, and the last one has text. Most templates render any role, and a misspelt one is not noticed."""
    if not messages:
        raise InvalidOption("the conversation is empty; give at least one message")
    for number, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("tool_calls") and message.get("content") is None:
            continue
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise InvalidOption(f'message {number} is {message!r:.80}; expected {{"role": "user", "content": "..."}}')
        for part in ("role", "content"):
            if not isinstance(message[part], str):
                kind = type(message[part]).__name__
                raise InvalidOption(f"the {part} of message {number} is a {kind}; a text model needs a string")
        if message["role"] not in _ROLES and message["role"] not in (template or ""):
            raise InvalidOption(
                f"the role of message {number} is {message['role']!r:.40}; the model's chat template doesn't name it. "
                f"Usual are {', '.join(_ROLES[:5])}"
            )
    if not messages[-1]["content"].strip():
        raise InvalidOption("the last message is empty; give it some text")
