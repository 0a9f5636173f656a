"""The cache of a conversation, kept from one turn to the next: only what is new is read.

A target that forgets nothing at the end: the next turn's tokens are compared with those it holds, it goes back to the
last step before they part, and reads on from there. Knows token ids, not roles or templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.engine import transformer
from outrider.core.engine.adapters import hf
from outrider.core.protocol import Prefill, Prompts, Rule, Scores
from outrider.core.tree import Tree

_PIECE = 512  # tokens read a pass


class PrefixCache:
    """A target of one row whose cache outlives a generation."""

    rollback = True

    def __init__(self, inner: transformer.Decoder | hf.TransformersTarget) -> None:
        self.inner = inner
        self.vocabulary, self.device, self.weight_bytes = inner.vocabulary, inner.device, inner.weight_bytes
        self.tokens: list[int] = []  # committed
        self.reused = 0  # of the last prompt
        self._marks: list[tuple[int, transformer.Mark | hf.Mark]] = []  # how many tokens, and that place

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        """Read what is new of one prompt. Hidden states of what was read before are gone, so a drafter that needs them
        has the whole prompt read again."""
        (prompt,) = prompts
        same = 0
        if not needs:
            same = next((n for n, pair in enumerate(zip(self.tokens, prompt, strict=False)) if pair[0] != pair[1]), -1)
            same = min(len(self.tokens), len(prompt)) if same < 0 else same
        while self._marks and self._marks[-1][0] > same:
            self._marks.pop()
        if not self._marks:
            self.reused = 0
            prefill = self.inner.begin(prompts, sampling, needs)
        else:
            self.reused, mark = self._marks[-1]
            self.inner.rewind(mark)
            for start in range(self.reused, len(prompt), _PIECE):
                self._read(prompt[start : start + _PIECE])
            fresh = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
            self.inner.rewind(replace(self._mark(), pipeline=fresh))
            prefill = Prefill(self_draftable=self.inner if isinstance(self.inner, transformer.Decoder) else None)
        self.tokens = list(prompt)
        self._note()
        return prefill

    def _mark(self) -> transformer.Mark | hf.Mark:
        mark = self.inner.mark()
        assert isinstance(mark, transformer.Mark | hf.Mark)
        return mark

    def _note(self) -> None:
        self._marks.append((len(self.tokens), self._mark()))

    def _read(self, tokens: Sequence[int]) -> None:
        """Commit tokens that nobody drafted: a chain of all but the last, accepted whole."""
        size = len(tokens) - 1
        ids = torch.tensor([tokens], device=self.device)
        draft = Draft.guess(ids[:, :size], Tree.chain(size, self.device), torch.ones_like(ids[:, :size]).bool())
        none = torch.zeros(1, size, device=self.device)
        verdict = Verdict(
            path=torch.arange(size, device=self.device)[None],
            accepted=torch.tensor([size], device=self.device),
            token=ids[:, -1],
            resampled=torch.zeros(1, dtype=torch.bool, device=self.device),
            tried=none.bool(),
            chance=none,
            p=none,
            q=none,
            outcome=Outcome.accepted([tokens]),
        )
        self.inner.score(draft)
        self.inner.keep(draft, verdict, torch.tensor([size + 1], device=self.device))

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        return self.inner.score(draft, since)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        self.inner.keep(draft, verdict, count)
        self.tokens += verdict.rows(draft)[0][: int(count[0])]
        self._note()

    def captured(self, rule: Rule) -> Rule:
        return self.inner.captured(rule) if isinstance(self.inner, transformer.Decoder) else rule

    def mark(self) -> object:
        return self.inner.mark()

    def rewind(self, mark: object) -> None:
        self.inner.rewind(mark)

    def end(self) -> None:
        """The cache stays, for the next turn."""
