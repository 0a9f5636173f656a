"""Our decoder for LongRoPE (arXiv 2402.13753), whose rotary factors depend on the length of the text: the short ones up
to the original context and the long ones beyond it, for all positions at once.

A row that reaches the original context is read again with the long factors. Until all rows have, each pass is computed
with both, and each token takes the logits of its own length, so that a draft changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.kv_cache.rows import sequence_positions
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder, Mark
from outrider.core.protocol import Prefill, Prompts, Scores


@dataclass(frozen=True, eq=False)
class _LongMark(Mark):
    """A state to rewind to, with the state of the other factors' cache."""

    lengths: tuple[int, ...] = ()
    other: Mark | None = None
    followed: frozenset[int] = frozenset()
    exchanged: bool = False


def make_decoder(network: Network, *, cache_bits: int | None = None) -> Decoder:
    """The decoder of a network: one that changes its rotary factors, if they depend on the length."""
    kind = Decoder if network.config.original_context is None else LongContextDecoder
    return kind(network, cache_bits=cache_bits)


class LongContextDecoder(Decoder):
    """A decoder with two caches of the same network: its own with the short factors, `_other` with the long ones for
    the rows that need them. They are exchanged once all rows are long."""

    def __init__(self, network: Network, *, cache_bits: int | None = None) -> None:
        super().__init__(network, cache_bits=cache_bits)
        self._bits = cache_bits
        self._texts: list[list[int]] = []
        self._reset(batched=False)

    def _reset(self, *, batched: bool) -> None:
        self._other: Decoder | None = None
        self._followed: set[int] = set()  # the rows that the other cache has read
        self._exchanged, self._batched = False, batched
        self.cache.long = False

    @property
    def _original(self) -> int:
        original = self.config.original_context
        assert original is not None
        return original

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._reset(batched=False)
        self._texts = [list(prompt) for prompt in prompts]
        long = [row for row, prompt in enumerate(prompts) if len(prompt) > self._original]
        self.cache.long = self._exchanged = len(long) == len(prompts)
        prefill = super().begin(prompts, sampling, needs)
        if not self._exchanged:
            for row, other in self._follow(long).items():
                for tap, states in other.hidden.items():
                    prefill.hidden[tap][row, : states.shape[1]] = states[0]
        return prefill

    def _follow(self, rows: Sequence[int]) -> dict[int, Prefill]:
        """Read these rows' texts with the long factors, unless that was done."""
        if self._other is None and rows:
            self._other = Decoder(self.network, cache_bits=self._bits)
            self._other.cache.long = True
            self._other.open(self._pipeline.sampling, self._taps)
            self._other.arrange([-1] * len(self._texts), 0)
        prefills = {}
        for row in set(rows) - self._followed:
            assert self._other is not None
            reading = self._other.enter(lambda row=row: row, self._texts[row])  # type: ignore[misc]
            while True:
                try:
                    next(reading)
                except StopIteration as done:
                    prefills[row] = done.value
                    break
            self._followed.add(row)
        return prefills

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        if self._exchanged:
            return super().score(draft, since)
        longest = draft.tree.depth if draft.positions is None else int(draft.positions.max()) if draft.size else 0
        self._follow([row for row, text in enumerate(self._texts) if len(text) + longest > self._original])
        rows = self.cache.rows
        short = super().score(draft, since)
        if self._other is None:
            return short
        long = self._other.score(replace(draft, carry=None), since)
        positions = sequence_positions(rows, draft)
        if draft.size:
            positions = torch.cat(
                [rows.committed[:, None] - 1, positions[:, -draft.size :].expand(len(rows.host), -1)], 1
            )
        else:
            positions = rows.committed[:, None] - 1
        beyond = (positions >= self._original)[:, short.first :, None]
        logits = torch.where(beyond, long.logits(), short.logits())
        hidden = {tap: torch.where(beyond, long.hidden[tap], states) for tap, states in short.hidden.items()}
        return Scores(draft, self._pipeline, rows.committed, logits, hidden, short.first)

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        counts = count.tolist() if verdict.outcome is None else verdict.outcome.counts
        for text, tokens, kept in zip(self._texts, verdict.rows(draft), counts, strict=True):
            text.extend(tokens[:kept])
        super().keep(draft, verdict, count)
        if self._exchanged:
            return
        if self._other is not None:
            self._other.keep(draft, verdict, count)
        if self._other is not None and not self._batched and all(len(text) > self._original for text in self._texts):
            self._follow(range(len(self._texts)))
            self._exchange()

    def _exchange(self) -> None:
        """Make the other cache this decoder's own, in place, since views refer to it."""
        assert self._other is not None
        own, other = self.cache.__dict__, self._other.cache.__dict__
        self.cache.__dict__, self._other.cache.__dict__ = other, own
        self._exchanged = not self._exchanged

    def mark(self) -> object:
        own, other = super().mark(), None if self._other is None else self._other.mark()
        assert isinstance(own, Mark) and (other is None or isinstance(other, Mark))
        lengths = tuple(map(len, self._texts))
        return _LongMark(own.rows, own.pipeline, lengths, other, frozenset(self._followed), self._exchanged)

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, _LongMark)
        if self._exchanged and not mark.exchanged:
            self._exchange()
        self._texts = [text[:length] for text, length in zip(self._texts, mark.lengths, strict=True)]
        super().rewind(mark)
        if mark.other is None:
            self._other = None
        elif self._other is not None:
            self._other.rewind(mark.other)
        self._followed = set(mark.followed)

    def end(self) -> None:
        super().end()
        if self._other is not None:
            self._other.end()
        self._reset(batched=False)

    # ---- continuous batching

    def open(self, sampling: Sampling, needs: frozenset[str] = frozenset()) -> None:
        self._texts = []
        self._reset(batched=True)
        super().open(sampling, needs)

    def arrange(self, order: Sequence[int], width: int) -> None:
        super().arrange(order, width)
        if self._other is not None:
            self._other.arrange(order, width)
        self._texts = [self._texts[row] if row >= 0 else [] for row in order]
        self._followed = {new for new, old in enumerate(order) if old in self._followed}

    @torch.no_grad()
    def enter(self, row: Callable[[], int], prompt: Sequence[int]) -> Generator[int, None, Prefill]:
        prefill = yield from super().enter(row, prompt)
        index = row()
        self._texts[index] = list(prompt)
        self._followed.discard(index)
        followed = self._follow([index] if len(prompt) > self._original else [])
        return followed.get(index, prefill)

    def leave(self, row: int) -> None:
        super().leave(row)
        self._texts[row] = []
        if self._other is not None:
            self._other.leave(row)
        self._followed.discard(row)
