"""Lookahead decoding: a two-dimensional Jacobi window generates n-grams, and matching ones are verified, in one pass.

Fu et al., "Break the sequential dependency of LLM inference using lookahead decoding" (arXiv 2402.02057). The window is
a comb of probes, nodes that no rule tries: a spine at the next `window` positions, and below each of its tokens a tooth
with the later steps of the same Jacobi trajectory, `ngram` - 2 tokens. The target's token at each tooth's tip completes
an n-gram for the pool and becomes the new tip. The draft proper is up to `guesses` n-grams of the pool that start with
the last token. Ours keeps the window aligned with the text if several tokens are accepted, merges n-grams with common
prefixes, and has a pool per row. Works on token ids alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Trie, to_draft
from outrider.core.errors import InvalidOption
from outrider.core.kernels.topk import argmax
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG, mix


class _Row:
    """One row's window, levels [N - 1][W], and its pool: first token -> the rest of its n-grams, the latest last."""

    def __init__(self, prompt: Sequence[int], window: int, ngram: int, pool: int, seed: int) -> None:
        self.prompt, self.pool_size, self.ngram = list(prompt), pool, ngram
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}
        self.text = list(prompt)[-ngram:]
        self._random = seed
        self.levels = [[self._filler() for _ in range(window)] for _ in range(ngram - 1)]
        for start in range(max(len(prompt) - ngram + 1, 0)):
            self.note(list(prompt)[start : start + ngram])

    def _filler(self) -> int:
        """A random token of the prompt, for new slots."""
        self._random = mix(self._random)
        return self.prompt[self._random % len(self.prompt)]

    def note(self, gram: Sequence[int]) -> None:
        """Add an n-gram to the pool, which keeps the latest `pool_size` per first token."""
        known = self.pool.setdefault(gram[0], {})
        known.pop(tuple(gram[1:]), None)
        known[tuple(gram[1:])] = None
        if len(known) > self.pool_size:
            del known[next(iter(known))]

    def comb(self, trie: Trie) -> None:
        """Add the window to a trie: a spine, and a tooth below each of its nodes."""
        window, above = len(self.levels[0]), -1
        for token in self.levels[0]:
            above = trie.grow(above, token)
        for level in self.levels[1:]:
            for token in level:
                trie.grow(len(trie) - window, token)

    def candidates(self, guesses: int, max_tokens: int) -> list[tuple[int, ...]]:
        """The latest n-grams that start with the last token, without that token."""
        known = list(self.pool.get(self.text[-1], {}))[-guesses:] if max_tokens > 0 else []
        return [rest[:max_tokens] for rest in reversed(known)]

    def move(self, tips: Sequence[int], emitted: Sequence[int]) -> None:
        """Complete n-grams with the target's tokens at the teeth's tips, and move the window: one Jacobi step on, and
        by the emitted tokens in the text."""
        if tips:
            for column, tip in enumerate(tips):
                self.note([*(level[column] for level in self.levels), tip])
            levels = [*self.levels[1:], list(tips)]
            shift = len(emitted) - 1  # dropping the first level has moved the window by one position
            self.levels = [[*level[shift:], *[self._filler() for _ in level[:shift]]] for level in levels]
        for token in emitted:
            self.text = [*self.text, token][-self.ngram :]
            if len(self.text) == self.ngram:
                self.note(self.text)


@dataclass(frozen=True)
class _Tips:
    """The target's likeliest tokens [B, W] after the tips of `window` teeth, from row `first` of the scores on; where
    no row has a comb, of other rows."""

    first: int
    window: int
    parts: ClassVar[int] = 1

    def __call__(self, draft: Draft, scores: Scores) -> Sequence[Tensor]:
        rows = torch.arange(self.first, self.first + self.window, device=draft.tokens.device).clamp(max=draft.size)
        distributions = scores.distributions(rows.expand(draft.rows, -1))
        return (distributions.name(argmax(distributions.probs)),)


class Lookahead(WeightFree):
    """Trajectories at `window` positions, n-grams of `ngram` tokens, `pool` of them kept per first token, and up to
    `guesses` of them drafted."""

    standalone: Literal[True] = True  # the window is updated from its own draft's scores

    def __init__(self, *, window: int = 5, ngram: int = 4, guesses: int = 5, pool: int = 16) -> None:
        if min(window, guesses, pool) < 1 or ngram < 2:
            raise InvalidOption(
                f"window={window}, guesses={guesses}, pool={pool}, ngram={ngram}: the first three must be 1 or more, "
                "ngram 2 or more"
            )
        self.window, self.ngram, self.guesses, self.pool = window, ngram, guesses, pool
        self.readings = (_Tips(window * (ngram - 2) + 1, window),)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._rows = [_Row(prompt, self.window, self.ngram, self.pool, sum(prompt)) for prompt in prompts]

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        """The comb comes first, so that its node indices are fixed; rows with too little room for it have none."""
        left = room.tolist()
        self._combed = [count >= self.window + self.ngram - 2 for count in left]
        tries = []
        for row, max_tokens, combed in zip(self._rows, left, self._combed, strict=True):
            trie = Trie()
            if combed:
                row.comb(trie)
            for candidate in row.candidates(self.guesses, max_tokens):
                trie.add(candidate)
            tries.append(trie)
        return to_draft(tries, rng.device, [combed * self.window * (self.ngram - 1) for combed in self._combed])

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        tips: list[list[int]] = [[] for _ in self._rows]
        if any(self._combed):
            tips = scores.read(self.readings[0])[0].tolist()
        for row, own_tips, combed, emitted in zip(self._rows, tips, self._combed, verdict.rows(draft), strict=True):
            row.move(own_tips if combed else [], emitted)

    def end(self) -> None:
        self._rows = []
