"""Prompt lookup: drafts the tokens that followed the last occurrence of the text's longest matching suffix.

Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) and LLMA (arXiv 2304.04487), which copies
from reference documents. They take the first match; ours takes the longest match, and of equally long ones the latest,
in prompt and output. An n-gram index makes the cost independent of the text's length. Works on token ids alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.device import upload_all
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, OnHost, Verdict
from outrider.core.drafters.lookup.trie import bucket
from outrider.core.drafters.per_row import IndependentRows
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree


class _Text:
    """A growing sequence, with the last occurrence of each of its n-grams."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        # n-gram -> position after its last occurrence, by n - 1
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]
        self._indexed = 0  # n-grams that end here or before are in the index

    def add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        for end in range(self._indexed + 1, len(self.tokens)):  # not the last token: nothing follows it yet
            for length in range(1, min(self.max_ngram, end) + 1):
                self._next[length - 1][tuple(self.tokens[end - length : end])] = end
        self._indexed = max(len(self.tokens) - 1, 0)

    def after(self, text: Sequence[int], min_ngram: int, max_tokens: int) -> tuple[int, list[int]]:
        """The length of the longest suffix of `text` that occurs here, 0 if it is below `min_ngram`, and up to
        `max_tokens` tokens that followed it."""
        for length in range(min(self.max_ngram, len(text)), min_ngram - 1, -1):
            end = self._next[length - 1].get(tuple(text[len(text) - length :]))
            if end is not None:
                return length, self.tokens[end : end + max_tokens]
        return 0, []


class PromptLookup(IndependentRows):
    """Drafts up to `length` tokens after the longest match of `min_ngram` to `max_ngram` tokens, in the row's text or
    in the `references`; the text wins ties."""

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
        self._texts: list[_Text | None] = [self._indexed(prompt) for prompt in prompts]  # None: an empty row

    def _indexed(self, prompt: Sequence[int]) -> _Text:
        text = _Text(self.max_ngram)
        text.add(list(prompt))
        return text

    # ---- continuous batching

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._texts = [self._texts[row] if row >= 0 else None for row in order]

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        self._texts[row] = self._indexed(prompt)

    def leave(self, row: int) -> None:
        self._texts[row] = None

    def observe_committed(self, row: int, tokens: Sequence[int]) -> None:
        text = self._texts[row]
        assert text is not None
        text.add(tokens)

    # ----

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        rows = zip(self._texts, room.tolist(), strict=True)
        return chain_draft([self._match(text, min(self.length, left)) for text, left in rows], rng.device)

    def _match(self, text: _Text | None, max_tokens: int) -> list[int]:
        if max_tokens < 1 or text is None:
            return []
        longest, draft = 0, list[int]()
        for source in (text, *self._references):
            length, tokens = source.after(text.tokens, max(self.min_ngram, longest + 1), max_tokens)
            if length > longest:
                longest, draft = length, tokens
        return draft

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for text, tokens in zip(self._texts, verdict.rows(draft), strict=True):
            if text is not None:
                text.add(tokens)

    def end(self) -> None:
        self._texts = []


def chain_draft(rows: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """A draft of one chain of fixed guesses per row, of any lengths."""
    size = max(map(len, rows), default=0)
    if device.type != "cpu" and size:  # so that few shapes are recorded
        size = bucket(size)
    padded = [[*row, *[0] * (size - len(row))] for row in rows]
    chains, there = (
        [list(range(-1, size - 1))] * len(rows),
        [[place < len(row) for place in range(size)] for row in rows],
    )
    shape = len(rows), size
    parts = torch.tensor(padded, dtype=torch.long).view(shape), torch.tensor(there, dtype=torch.bool).view(shape)
    tokens, live = upload_all(parts, device)
    host = OnHost.guesses(padded, chains, there, tokens)
    return Draft.guess(tokens, Tree.chain(size, device), live, host=host)
