"""The protocol of the loop: what a target, a drafter and an acceptance rule must provide, and the data they exchange.

Knows drafts and distributions; nothing of what a token means. Guidance, codecs and prompts are a target's own business:
it returns logits, from which `Scores` makes distributions row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.distribution import Distribution, LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.rng import CounterRNG

Prompts = Sequence[Sequence[int]]
PIECE = 512  # prompt tokens a pass


@dataclass(frozen=True)
class Prefill:
    """What reading the prompts gave: hidden states [B, L, D] at each tap asked for, rows padded on the right; and the
    target itself, for drafters that are the same weights seen cheaper (None: it can't be seen so)."""

    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    itself: SelfDraftable | None = None


class Scores:
    """The target's distributions after the root (row 0) and after each draft node (row i + 1), made when asked for.

    `logits` is [B, R, V], or a function from rows [B, K] to [B, K, V] for targets that would rather not compute them
    all (where rows come and go, called with a slice of members as well: of those alone). `first` is the row that logits
    begin with: a draft that grows level by level is scored in pieces.
    """

    def __init__(
        self,
        draft: Draft,
        pipeline: LogitsPipeline,
        lengths: Tensor,
        logits: Tensor | Callable[..., Tensor],
        hidden: Mapping[str, Tensor] | None = None,
        first: int = 0,
    ) -> None:
        self.draft = draft
        self.lengths = lengths  # [B] committed tokens, prompt included
        self.hidden = hidden or {}  # tap -> [B, R, D]
        self.first = first
        self._logits = logits
        self._pipeline = pipeline
        self._every_law: Distribution | None = None

    @property
    def sampling(self) -> Sampling:
        return self._pipeline.sampling

    @property
    def vocabulary(self) -> int:
        return self._pipeline.vocabulary

    @property
    def whole(self) -> Tensor | None:
        """All logits [B, N + 1, V], where they have been computed and distributions are made of them as usual."""
        usual = type(self._pipeline) is LogitsPipeline and not self.first
        return self._logits if usual and isinstance(self._logits, Tensor) else None

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """Rows [B, K] as the model gave them -> [B, K, V]; all rows from `first` on if none are named."""
        if not isinstance(self._logits, Tensor):
            return self._logits(self._every_row() if rows is None else rows)
        if rows is None:
            return self._logits
        batch, count, vocabulary = self._logits.shape
        flat = (rows - self.first) + torch.arange(batch, device=rows.device)[:, None] * count
        return self._logits.flatten(0, 1).index_select(0, flat.flatten()).view(*rows.shape, vocabulary)

    def leading(self, count: int) -> Tensor:
        """The first rows [B, count, V], as the model gave them."""
        if isinstance(self._logits, Tensor) and not self.first:
            return self._logits[:, :count]
        return self.logits(torch.arange(count, device=self.lengths.device).expand(len(self.lengths), -1))

    def _every_row(self) -> Tensor:
        rows = torch.arange(self.first, self.draft.size + 1, device=self.lengths.device)
        return rows.expand(len(self.lengths), -1)

    def row(self, row: int, draft: Draft) -> Scores:
        """One row's alone, for its own draft: this one's nodes are the first of that row's here."""
        one, stop = slice(row, row + 1), draft.size + 1 - self.first
        logits = self._logits

        def some(rows: Tensor) -> Tensor:
            assert not isinstance(logits, Tensor)
            return logits(rows, one)

        return Scores(
            draft,
            self._pipeline.row(row),
            self.lengths[one],
            logits[one, :stop] if isinstance(logits, Tensor) else some,
            {tap: states[one, :stop] for tap, states in self.hidden.items()},
            self.first,
        )

    def distribution(self, row: Tensor) -> Distribution:
        """The distribution after one row for each batch member: [B] -> [B, S]."""
        return self.distributions(row[:, None]).column(0)

    def distributions(self, rows: Tensor | None = None) -> Distribution:
        """The distributions after rows [B, K] -> [B, K, S]; after every row from `first` on if none are named. Where
        they hang on nothing else they are kept, once all have been asked for."""
        if self._every_law is not None:
            return self._every_law if rows is None else self._every_law.rows(rows - self.first)
        path = None
        if self.sampling.remembers and self.draft.size:
            paths = self.draft.path_tokens()
            wanted = self._every_row() if rows is None else rows
            path = paths.gather(1, wanted[..., None].expand(-1, -1, paths.shape[2]))
            if self.draft.embeddings is not None:
                path = torch.where(path < self.vocabulary, path, -1)  # what has no id is no token that was emitted
        distributions = self._pipeline.distribution(self.logits(rows), path)
        if rows is None and not self.sampling.remembers:
            self._every_law = distributions
        return distributions

    def position(self, row: Tensor) -> Tensor:
        """Where in its sequence the token after each row [B, ...] stands, the prompt's first token being 0."""
        tree = self.draft.tree
        after = torch.nn.functional.pad(tree.depths + 1, (1, 0)).expand(len(row), -1)
        flat = after.gather(1, row.flatten(1) if row.dim() > 1 else row[:, None]).view_as(row)
        return flat + self.lengths.view(-1, *[1] * (row.dim() - 1))


class Target(Protocol):
    """A model that can score a draft in one pass and keep the part of it that was committed.

    The last committed token is the root: it is fed together with the draft, so that row 0 follows it. A draft that
    grows is scored in pieces: `since` says that the root and that many nodes were scored by the calls before, and the
    scores then begin with the row after. What is scored is scratch: the next call without `since` drops it, `rewind`
    drops it, and `keep` makes the committed part permanent and drops the rest (nodes never scored are read later).
    """

    vocabulary: int
    device: torch.device
    rollback: bool  # can it drop what it has scored? False for recurrent state that only moves forward
    weight_bytes: int  # what one pass reads; 0 where that is nothing to speak of

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str]) -> Prefill: ...
    def score(self, draft: Draft, since: int | None = None) -> Scores: ...
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None: ...
    def mark(self) -> object: ...
    def rewind(self, mark: object) -> None: ...
    def end(self) -> None: ...


class BatchedTarget(Target, Protocol):
    """A target whose rows come and go while others are decoded (outrider.core.batching)."""

    @property
    def slot_bytes(self) -> int: ...  # of the cache, for each token of each row
    def open(self, sampling: Sampling, needs: frozenset[str]) -> None:
        """Begin with no rows."""

    def arrange(self, order: Sequence[int], width: int) -> None:
        """Row i is from now on what row order[i] was; -1: an empty one. Rows have room for `width` tokens, scratch
        included."""

    def enter(self, row: Callable[[], int], prompt: Sequence[int]) -> Generator[None, None, Prefill]:
        """Read a prompt into the row that it stands in by then, PIECE tokens at a time; other rows may be decoded in
        between. Returns its prefill."""

    def leave(self, row: int) -> None:
        """A row is finished; it is a hole now."""


class View(Target, Protocol):
    """A target's own weights seen cheaper, over its cache. Begun after it on the same prompts; moves when it does."""

    def recall(self, texts: Prompts, count: int) -> Tensor:
        """What it would have said ahead of each of the last `count` committed tokens of each row, in one pass: logits
        [B, count, V], row b's first min(count, len(texts[b]) - 1) of them being meant. `texts`: all of each row."""


class SelfDraftable(Protocol):
    """A target that can be seen cheaper, to draft for itself."""

    weight_bytes: int

    @property
    def sublayers(self) -> tuple[str, ...]: ...  # what a view may skip
    def view(
        self,
        *,
        skip: Collection[str] = (),
        exit: int | None = None,
        window: tuple[int, int] | None = None,
        chunks: tuple[int, int] | None = None,
        refresh: int = 16,
        bits: int | None = None,
    ) -> View: ...
    def likeness(self, texts: Prompts, count: int) -> Tensor:
        """[B, sublayers] cosine of what enters and what leaves each, averaged over the last `count` tokens read."""


def committed(draft: Draft, verdict: Verdict, count: Tensor) -> Tensor:
    """[B, D + 1] what a step adds to each row: the first count [B] emitted tokens; -1 fills up."""
    emitted = verdict.emitted(draft)
    places = torch.arange(emitted.shape[1], device=emitted.device)
    return torch.where(places < count[:, None], emitted, -1)


class Drafter(Protocol):
    """Guesses ahead. `room` [B], on the host, is how many tokens a row may still draft; -1: the row is finished.

    A drafter that overlaps with the target's pass also has `ahead(draft)`, run in a thread of its own while the target
    scores, and finished before the rule decides; it shares nothing with the target.
    """

    vocabulary: int | None  # None: any
    needs: frozenset[str]  # hidden taps of the target it reads

    @property
    def bytes_read(self) -> int: ...  # of weights, so far; 0 for a drafter without any
    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None: ...
    def propose(self, room: Tensor, rng: CounterRNG) -> Draft: ...
    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None: ...
    def end(self) -> None: ...


class Rule(Protocol):
    """Decides which path of the draft is accepted, and which token follows it."""

    @property
    def lossless(self) -> bool: ...
    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict: ...


class Plain:
    """Drafts nothing: decoding one token a pass, the baseline on the same code path."""

    vocabulary: int | None = None
    needs: frozenset[str] = frozenset()
    bytes_read = 0

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        """Nothing to prepare."""

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        return Draft.empty(len(room), rng.device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        """Nothing to learn."""

    def end(self) -> None:
        """Nothing to free."""

    # ---- rows that come and go (outrider.core.drafters.per_row.Joined)

    def joins(self) -> bool:
        return True

    def open(self, sampling: Sampling) -> None:
        """Nothing to prepare."""

    def arrange(self, order: Sequence[int], width: int) -> None:
        """Nobody has anything."""

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        """Nothing to read."""

    def leave(self, row: int) -> None:
        """Nothing to forget."""
