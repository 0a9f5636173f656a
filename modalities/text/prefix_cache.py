"""A target whose KV cache is kept between the turns of a conversation, so that only new tokens are read.

The next prompt is compared with the cached tokens; the cache is rewound to the last step before the first difference.
Independent of roles and chat templates.
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

_CHUNK = 512  # prompt tokens per pass


class PrefixCache:
    """A target of one row whose cache is kept after a generation."""

    rollback = True

    def __init__(self, inner: transformer.Decoder | hf.TransformersTarget) -> None:
        self.inner = inner
        self.vocabulary, self.device, self.weight_bytes = inner.vocabulary, inner.device, inner.weight_bytes
        self.tokens: list[int] = []  # committed
        self.reused = 0  # tokens of the last prompt that were cached
        self._marks: list[tuple[int, transformer.Mark | hf.Mark]] = []  # (number of tokens, cache position)
        # whether tokens of answers are kept: not where those of prompts have numbers of their own
        self._answers = not (isinstance(inner, transformer.Decoder) and inner.network.reads_apart)

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        """Read the new tokens of one prompt. If the drafter needs hidden states, the whole prompt is read
        again, because those of cached tokens are not kept."""
        (prompt,) = prompts
        shared = 0
        if not needs:
            shared = next(
                (n for n, pair in enumerate(zip(self.tokens, prompt, strict=False)) if pair[0] != pair[1]), -1
            )
            shared = min(len(self.tokens), len(prompt)) if shared < 0 else shared
        while self._marks and self._marks[-1][0] > shared:
            self._marks.pop()
        if not self._marks:
            self.reused = 0
            prefill = self.inner.begin(prompts, sampling, needs)
        else:
            self.reused, mark = self._marks[-1]
            self.inner.rewind(mark)
            for start in range(self.reused, len(prompt), _CHUNK):
                self._read(prompt[start : start + _CHUNK])
            pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
            self.inner.rewind(replace(self._mark(), pipeline=pipeline))
            prefill = Prefill(self_draftable=self.inner if isinstance(self.inner, transformer.Decoder) else None)
        self.tokens = list(prompt)
        self._save_mark()
        return prefill

    def _mark(self) -> transformer.Mark | hf.Mark:
        mark = self.inner.mark()
        assert isinstance(mark, transformer.Mark | hf.Mark)
        return mark

    def _save_mark(self) -> None:
        self._marks.append((len(self.tokens), self._mark()))

    def _read(self, tokens: Sequence[int]) -> None:
        """Commit given tokens: all but the last as a chain that is accepted whole."""
        size = len(tokens) - 1
        ids = torch.tensor([tokens], device=self.device)
        draft = Draft.guess(ids[:, :size], Tree.chain(size, self.device), torch.ones_like(ids[:, :size]).bool())
        zeros = torch.zeros(1, size, device=self.device)
        verdict = Verdict(
            path=torch.arange(size, device=self.device)[None],
            accepted=torch.tensor([size], device=self.device),
            token=ids[:, -1],
            resampled=torch.zeros(1, dtype=torch.bool, device=self.device),
            tried=zeros.bool(),
            chance=zeros,
            p=zeros,
            q=zeros,
            outcome=Outcome.accepted([tokens]),
        )
        (self.inner.read if isinstance(self.inner, transformer.Decoder) else self.inner.score)(draft)
        self.inner.keep(draft, verdict, torch.tensor([size + 1], device=self.device))

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        return self.inner.score(draft, since)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        self.inner.keep(draft, verdict, count)
        self.tokens += verdict.rows(draft)[0][: int(count[0])]
        if self._answers:
            self._save_mark()

    def captured(self, rule: Rule) -> Rule:
        return self.inner.captured(rule) if isinstance(self.inner, transformer.Decoder) else rule

    def mark(self) -> object:
        return self.inner.mark()

    def rewind(self, mark: object) -> None:
        self.inner.rewind(mark)

    def end(self) -> None:
        """Keep the cache for the next turn."""
