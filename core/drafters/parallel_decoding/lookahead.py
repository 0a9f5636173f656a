"""Lookahead decoding: a two-dimensional Jacobi window makes n-grams, and those that fit are tried, all in one pass.

Fu et al., "Break the sequential dependency of LLM inference using lookahead decoding" (arXiv 2402.02057). The window
is a comb: its spine stands at the next `window` positions, and below each of its tokens hangs a tooth of the later
steps of the same Jacobi trajectories, `ngram` - 2 tokens long. What the target says at the tip of each tooth completes
an n-gram, which joins the pool of its first token, and becomes the new tip as the window moves on by a step. Beside
the comb, whose nodes are probes that no rule tries, stand up to `guesses` n-grams of the pool that begin with the last
token; those are what may be accepted. Ours keeps the window at its place in the text when several tokens are accepted
at once, merges n-grams that begin alike, and holds rows and their pools apart. Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from outrider.core.device import fetch, upload
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Trie, planted
from outrider.core.errors import InvalidOption
from outrider.core.kernels.topk import argmax
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG, mix


class _Row:
    """One row's window, levels [N - 1][W], and its pool: first token -> what followed it, the latest last."""

    def __init__(self, prompt: Sequence[int], window: int, ngram: int, pool: int, seed: int) -> None:
        self.prompt, self.pool_size, self.ngram = list(prompt), pool, ngram
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}
        self.text = list(prompt)[-ngram:]
        self._drawn = seed
        self.levels = [[self._filler() for _ in range(window)] for _ in range(ngram - 1)]
        for start in range(max(len(prompt) - ngram + 1, 0)):
            self.note(list(prompt)[start : start + ngram])

    def _filler(self) -> int:
        """Some token of the prompt: what stands at places that nothing is known about."""
        self._drawn = mix(self._drawn)
        return self.prompt[self._drawn % len(self.prompt)]

    def note(self, gram: Sequence[int]) -> None:
        """An n-gram was seen: of each first token the latest few are kept."""
        known = self.pool.setdefault(gram[0], {})
        known.pop(tuple(gram[1:]), None)
        known[tuple(gram[1:])] = None
        if len(known) > self.pool_size:
            del known[next(iter(known))]

    def comb(self, trie: Trie) -> None:
        """The window: a spine, and below each of its nodes a tooth."""
        window, above = len(self.levels[0]), -1
        for token in self.levels[0]:
            above = trie.grow(above, token)
        for level in self.levels[1:]:
            for token in level:
                trie.grow(len(trie) - window, token)

    def candidates(self, guesses: int, most: int) -> list[tuple[int, ...]]:
        """The latest n-grams that begin with the last token, without it."""
        known = list(self.pool.get(self.text[-1], {}))[-guesses:] if most > 0 else []
        return [after[:most] for after in reversed(known)]

    def move(self, tips: Sequence[int], emitted: Sequence[int]) -> None:
        """The tips of the teeth are new n-grams' ends; the window goes a step on in time, and as many places on in the
        text as were emitted."""
        if tips:
            for column, tip in enumerate(tips):
                self.note([*(level[column] for level in self.levels), tip])
            levels = [*self.levels[1:], list(tips)]
            ahead = len(emitted) - 1  # a step in time is a place on already
            self.levels = [[*level[ahead:], *[self._filler() for _ in level[:ahead]]] for level in levels]
        for token in emitted:
            self.text = [*self.text, token][-self.ngram :]
            if len(self.text) == self.ngram:
                self.note(self.text)


class Lookahead(WeightFree):
    """`window` places of trajectories, `ngram` tokens long n-grams, and up to `guesses` of them tried."""

    standalone: Literal[True] = True  # its window is read off its own draft

    def __init__(self, *, window: int = 5, ngram: int = 4, guesses: int = 5, pool: int = 16) -> None:
        if min(window, guesses, pool) < 1 or ngram < 2:
            raise InvalidOption(
                f"window={window}, guesses={guesses}, pool={pool}, ngram={ngram}: the first three must be 1 or more, "
                "ngram 2 or more"
            )
        self.window, self.ngram, self.guesses, self.pool = window, ngram, guesses, pool

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._rows = [_Row(prompt, self.window, self.ngram, self.pool, sum(prompt)) for prompt in prompts]

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        """The comb comes first, so that it stands at the same nodes whatever is tried; where the end is too near for
        it, there is none."""
        left = room.tolist()
        self._combed = [one >= self.window + self.ngram - 2 for one in left]
        tries = []
        for row, most, combed in zip(self._rows, left, self._combed, strict=True):
            trie = Trie()
            if combed:
                row.comb(trie)
            for candidate in row.candidates(self.guesses, most):
                trie.add(candidate)
            tries.append(trie)
        draft = planted(tries, rng.device)
        comb = torch.arange(draft.size, device=rng.device) < self.window * (self.ngram - 1)
        return replace(draft, probe=comb & upload(self._combed, rng.device)[:, None], belief=None)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        tips: list[list[int]] = [[] for _ in self._rows]
        if any(self._combed):
            last = self.window * (self.ngram - 2) + 1  # the row behind the first tip
            rows = torch.arange(last, last + self.window, device=draft.tokens.device).expand(draft.rows, -1)
            distributions = scores.distributions(rows)
            tips = fetch(distributions.name(argmax(distributions.probs)))[0].tolist()
        for row, said, combed, emitted in zip(self._rows, tips, self._combed, verdict.rows(draft), strict=True):
            row.move(said if combed else [], emitted)

    def end(self) -> None:
        self._rows = []
