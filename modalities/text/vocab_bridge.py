"""Between two tokenizers: the text that the target's tokens make, in the draft model's, and back.

Text is settled up to the last single space or line break between two words, where tokenizers begin anew; what follows
is tokenised again at each step. Knows tokenizers, nothing of models.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self

from outrider.text.tokenizer import Tokens

_SEAM = re.compile(r"(?<=\S)[ \n](?=\S)")
_LONGEST = 64  # characters of a tail; a longer one is settled whole
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # bytes that are no whole character yet


class Bridge:
    """`target` and `drafter` are tokenizers; `size` is the target model's vocabulary."""

    def __init__(self, target: Tokens, drafter: Tokens, size: int, drafter_size: int) -> None:
        self.target, self.drafter = target, drafter
        self.size, self._drafter_size = size, drafter_size

    @cached_property
    def shared(self) -> Mapping[int, int]:
        """The tokens that both know by the same string, ids in the target's -> in the draft model's."""
        theirs = self.drafter.names
        found = {one: theirs[name] for name, one in self.target.names.items() if name in theirs}
        return {one: other for one, other in found.items() if one < self.size and other < self._drafter_size}

    def open(self, prompt: Sequence[int]) -> Passage:
        return Passage(self, prompt)


class Passage:
    """One row's text."""

    def __init__(self, bridge: Bridge, prompt: Sequence[int]) -> None:
        self._target, self._drafter = bridge.target, bridge.drafter
        self._ids: list[int] = []  # the target's latest tokens, that are no whole characters yet
        self._text = ""  # behind what is settled
        self._new: list[int] = []
        self.tail: list[int] = []
        self.add(prompt)
        if not self._new:
            self._settle(len(self._text))
        if not self._new:  # not a single character: anything will do
            self._new = [0]

    def add(self, tokens: Sequence[int]) -> None:
        self._ids += tokens
        text = self._target.decode(self._ids, special=True)
        if text.endswith(_BROKEN) and len(self._ids) < 8:
            return
        self._text, self._ids = self._text + text, []
        seams = list(_SEAM.finditer(self._text))
        cut = seams[-1].start() if seams else 0
        self._settle(len(self._text) if len(self._text) - cut > _LONGEST else cut)

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
        """The guesses in the target's tokens; none while its own last token is half a character."""
        wrote = self._drafter.decode(drafted, special=True).rstrip(_BROKEN)
        if not wrote or self._ids:
            return []
        before = self._target.encode(self._text, special=False) if self._text else []
        both = self._target.encode(self._text + wrote, special=False)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._target.encode(wrote, special=False)
