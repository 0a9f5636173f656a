"""What Llasa and Orpheus share: a language model whose tokens after a text are codes of a codec, in one stream.

It runs on our own decoder. The distribution is the model's own over its whole vocabulary; generated tokens that are not
codes are left out of the sound. Independent of how codes are named and laid out.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.core.engine.adapters.model_parts import SharingTarget
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption
from outrider.speech.hub.model import HeadStage, Stage
from outrider.speech.hub.similar_tokens import SimilarTokens, unit


class CodeStream(ABC):
    """A function that makes targets, with their context length, and their tokenizer. `codec` is a codec or the name of
    one; `draft` makes targets of a smaller model with the same vocabulary."""

    sample_rate: ClassVar[int]
    temperature: ClassVar[float]  # at which it is published
    longest: ClassVar[int]  # tokens, by default
    code: ClassVar[str]  # the pattern of codes among the tokens, with their number
    ends: ClassVar[tuple[str, ...]]  # tokens
    books: ClassVar[int] = 1  # codebooks, one after another among the numbers

    def __init__(
        self,
        make: Callable[[], SharingTarget],
        context: int,
        tokenizer: Any,
        *,
        codec: Any = None,
        draft: Callable[[], SharingTarget] | None = None,
    ) -> None:
        self.target, self.tokenizer, self.context, self._draft = make, tokenizer, context, draft
        first = make()
        self.codec = self.open_codec(codec, first.device) if isinstance(codec, str | Path) else codec
        self.codes = self.numbered(tokenizer)  # token -> the code's number
        self.end = [tokenizer.convert_tokens_to_ids(word) for word in self.ends]
        if None in self.end or tokenizer.unk_token_id in self.end:
            raise InvalidOption(f"the tokenizer lacks {' or '.join(self.ends)}; is this a {type(self).__name__} model?")
        ids = sorted(self.codes, key=self.codes.__getitem__)
        self.per_book = len(ids) // self.books
        ids = ids[: self.books * self.per_book]
        self.similar = SimilarTokens(first.vocabulary, self.vectors(ids, first), ids=ids, books=self.books)
        views = isinstance(first, Decoder)
        self.head_stages = {"": HeadStage(make, [*ids, *self.end], context, views)}

    @classmethod
    def numbered(cls, tokenizer: Any) -> dict[int, int]:
        """The tokens that are codes, with their numbers; none if the tokenizer is another model's."""
        matches = {word: re.fullmatch(cls.code, word) for word in tokenizer.get_vocab()}
        return {tokenizer.convert_tokens_to_ids(word): int(match[1]) for word, match in matches.items() if match}

    def vectors(self, ids: Sequence[int], target: SharingTarget) -> Callable[[], Tensor]:
        """The vectors by which codes are compared: their embeddings."""
        return unit(lambda: target.network.embedding[ids])

    def stages(self, prompt: Any, limit: int | None) -> Generator[Stage, list[int], list[Any]]:
        """One stage, whose outcome is codes. It ends at the latest where the context does."""
        root = tuple(self.read(prompt))
        tokens = yield Stage(
            self.target,
            max(min(limit or self.longest, self.context - len(root)), 1),
            root=root,
            end=tuple(self.end),
            draft=self._draft,
            similar=self.similar,
            heads="",
        )
        return self.outcome([self.codes[token] for token in tokens if token in self.codes])

    def read(self, prompt: str | Sequence[int]) -> list[int]:
        """The prompt ids of a text; ids are returned as they are."""
        return self.ids(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]

    def outcome(self, numbers: list[int]) -> list[Any]:
        """What the codec reads of codes."""
        return numbers

    @torch.no_grad()
    def sound(self, outcome: Sequence[Any]) -> Tensor:
        """The outcome -> samples."""
        if self.codec is None:
            raise InvalidOption(f"there is no codec; load the model with codec=, {self.needed_codec}")
        return self.decoded(outcome)

    needed_codec: ClassVar[str]

    @abstractmethod
    def ids(self, text: str) -> list[int]: ...
    @abstractmethod
    def open_codec(self, name: str | Path, device: torch.device) -> Any: ...
    @abstractmethod
    def decoded(self, outcome: Sequence[Any]) -> Tensor: ...
