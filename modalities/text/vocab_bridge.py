"""Translates tokens between the target's tokenizer and a draft model's, through their text.

Text is settled up to the last single space or line break between two words, where tokenizers start a new token; the
tail after it is tokenised again in each round. Independent of models.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self

from outrider.text.tokenizer import Tokens

_BOUNDARY = re.compile(r"(?<=\S)[ \n](?=\S)")
_MAX_TAIL = 64  # characters; a longer tail is settled whole
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the decoding of an incomplete character


class Bridge:
    """Two tokenizers; `size` and `drafter_size` are the vocabulary sizes of the two models."""

    def __init__(self, target: Tokens, drafter: Tokens, size: int, drafter_size: int) -> None:
        self.target, self.drafter = target, drafter
        self.size, self._drafter_size = size, drafter_size

    @cached_property
    def shared(self) -> Mapping[int, int]:
        """Map ids of the target to ids of the draft model, for the tokens with the same string in both."""
        drafter_ids = self.drafter.names
        by_name = {token: drafter_ids[name] for name, token in self.target.names.items() if name in drafter_ids}
        return {
            token: drafter_token
            for token, drafter_token in by_name.items()
            if token < self.size and drafter_token < self._drafter_size
        }

    def open(self, prompt: Sequence[int]) -> Passage:
        return Passage(self, prompt)


class Passage:
    """The text of one row."""

    def __init__(self, bridge: Bridge, prompt: Sequence[int]) -> None:
        self._target, self._drafter = bridge.target, bridge.drafter
        self._ids: list[int] = []  # the target's latest tokens, which end within a character
        self._text = ""  # after the settled part
        self._new: list[int] = []
        self.tail: list[int] = []
        self.add(prompt)
        if not self._new:
            self._settle(len(self._text))
        if not self._new:  # an empty text: any token will do
            self._new = [0]

    def add(self, tokens: Sequence[int]) -> None:
        self._ids += tokens
        text = self._target.decode(self._ids, special=True)
        if text.endswith(_INCOMPLETE) and len(self._ids) < 8:
            return
        self._text, self._ids = self._text + text, []
        boundaries = list(_BOUNDARY.finditer(self._text))
        cut = boundaries[-1].start() if boundaries else 0
        self._settle(len(self._text) if len(self._text) - cut > _MAX_TAIL else cut)

    def _settle(self, cut: int) -> None:
        if cut:
            self._new += self._drafter.encode(self._text[:cut], special=False)
            self._text = self._text[cut:]
        self.tail = self._drafter.encode(self._text, special=False) if self._text else []

    def settled(self) -> list[int]:
        new, self._new = self._new, []
        return new

    def copy(self) -> Self:
        other = copy.copy(self)
        other._ids, other._new = [*self._ids], [*self._new]
        return other

    def back(self, drafted: Sequence[int]) -> list[int]:
        """Translate guesses to the target's tokens; returns none while its last token ends within a character."""
        text = self._drafter.decode(drafted, special=True).rstrip(_INCOMPLETE)
        if not text or self._ids:
            return []
        before = self._target.encode(self._text, special=False) if self._text else []
        tokens = self._target.encode(self._text + text, special=False)
        if tokens[: len(before)] == before:
            return tokens[len(before) :]
        return self._target.encode(text, special=False)
