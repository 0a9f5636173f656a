"""Copying from what is already there: the longest recent suffix that occurred before is taken to go on as it did.

Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) and LLMA (arXiv 2304.04487), which copies
from reference documents. Where they take the first match, ours takes the longest and of these the most recent, and it
looks at the output as well as the prompt. Knows token ids only; an index of n-grams makes a step cost the same
however long the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.per_row import IndependentRows
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree


class _Text:
    """A growing sequence, and where each of its n-grams last occurred."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]  # n-gram -> the place after it
        self._known = 0

    def add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        for place in range(self._known + 1, len(self.tokens)):  # n-grams that something follows
            for length in range(1, min(self.max_ngram, place) + 1):
                self._next[length - 1][tuple(self.tokens[place - length : place])] = place
        self._known = max(len(self.tokens) - 1, 0)

    def after(self, suffix: Sequence[int], length: int, least: int, most: int) -> tuple[int, list[int]]:
        """Length of the longest matching end of `suffix`, and up to `most` tokens that followed it here."""
        for size in range(min(self.max_ngram, len(suffix), length), least - 1, -1):
            place = self._next[size - 1].get(tuple(suffix[len(suffix) - size :]))
            if place is not None:
                return size, self.tokens[place : place + most]
        return 0, []


class PromptLookup(IndependentRows):
    """Longest match first, in the row's own text, then in the references."""

    def __init__(
        self,
        *,
        length: int = 10,
        max_ngram: int = 3,
        min_ngram: int = 1,
        references: Sequence[Sequence[int]] = (),
    ) -> None:
        if length < 1 or not 1 <= min_ngram <= max_ngram:
            raise InvalidOption(
                f"length={length}, min_ngram={min_ngram}, max_ngram={max_ngram}: "
                "length must be 1 or more, and min_ngram from 1 to max_ngram"
            )
        self.length, self.max_ngram, self.min_ngram = length, max_ngram, min_ngram
        self._references = []
        for reference in references:
            text = _Text(max_ngram)
            text.add(reference)
            self._references.append(text)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._texts: list[_Text | None] = [self._read(prompt) for prompt in prompts]  # None: a hole

    def _read(self, prompt: Sequence[int]) -> _Text:
        text = _Text(self.max_ngram)
        text.add(list(prompt))
        return text

    # ---- rows that come and go

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._texts = [self._texts[row] if row >= 0 else None for row in order]

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        self._texts[row] = self._read(prompt)

    def leave(self, row: int) -> None:
        self._texts[row] = None

    def observe_committed(self, row: int, tokens: Sequence[int]) -> None:
        text = self._texts[row]
        assert text is not None
        text.add(tokens)

    # ----

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        found = [
            self._find(text, min(self.length, left)) for text, left in zip(self._texts, room.tolist(), strict=True)
        ]
        return guesses(found, rng.device)

    def _find(self, text: _Text | None, most: int) -> list[int]:
        if most < 1 or text is None:
            return []
        best: tuple[int, list[int]] = (0, [])
        for source in (text, *self._references):
            size, tokens = source.after(text.tokens, self.max_ngram, max(self.min_ngram, best[0] + 1), most)
            if size > best[0]:
                best = size, tokens
        return best[1]

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for text, tokens in zip(self._texts, verdict.rows(draft), strict=True):
            if text is not None:
                text.add(tokens)

    def end(self) -> None:
        self._texts = []


def guesses(rows: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """One chain of fixed guesses a row, of any lengths."""
    size = max(map(len, rows), default=0)
    padded = [[*row, *[0] * (size - len(row)), len(row)] for row in rows]
    table = upload(padded, device, torch.long)  # [B, size + 1], the lengths last
    live = torch.arange(size, device=device) < table[:, -1:]
    return Draft.guess(table[:, :-1], Tree.chain(size, device), live)
