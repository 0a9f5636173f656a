"""The target's side of the protocol: what a model must offer to be decoded speculatively, and one made of a hash.

Knows drafts and laws; nothing of rules, drafters or what a token means. Guidance, codecs and prompts are a target's
own business: what it hands over are logits, from which `Scores` makes laws row by row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from outrider.core.distribution import Distribution, LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption, unknown
from outrider.core.rng import hash_tokens, mix, signed, uniform_of

Prompts = Sequence[Sequence[int]]
PIECE = 512  # prompt tokens a pass


@dataclass(frozen=True)
class Prefill:
    """What reading the prompts gave: hidden states [B, L, D] at each tap asked for, rows padded on the right; and the
    target itself, for drafters that are the same weights seen cheaper (None: it can't be seen so)."""

    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    itself: SelfDraftable | None = None


class Scores:
    """The target's laws after the root (row 0) and after each draft node (row i + 1), made when asked for.

    `logits` is [B, R, V], or a function from rows [B, K] to [B, K, V] for targets that would rather not compute them
    all (where rows come and go, called with a slice of members as well: of those alone). `first` is the row that logits
    begin with: a draft that grows level by level is scored in pieces.
    """

    def __init__(
        self,
        draft: Draft,
        lawmaker: LogitsPipeline,
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
        self._lawmaker = lawmaker
        self._every_law: Distribution | None = None

    @property
    def sampling(self) -> Sampling:
        return self._lawmaker.sampling

    @property
    def vocabulary(self) -> int:
        return self._lawmaker.vocabulary

    @property
    def whole(self) -> Tensor | None:
        """All logits [B, N + 1, V], where they have been computed and laws are made of them as usual."""
        usual = type(self._lawmaker) is LogitsPipeline and not self.first
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
            self._lawmaker.row(row),
            self.lengths[one],
            logits[one, :stop] if isinstance(logits, Tensor) else some,
            {tap: states[one, :stop] for tap, states in self.hidden.items()},
            self.first,
        )

    def law(self, row: Tensor) -> Distribution:
        """The law after one row for each batch member: [B] -> [B, S]."""
        return self.laws(row[:, None]).column(0)

    def laws(self, rows: Tensor | None = None) -> Distribution:
        """The laws after rows [B, K] -> [B, K, S]; after every row from `first` on if none are named. Where they
        hang on nothing else they are kept, once all have been asked for."""
        if self._every_law is not None:
            return self._every_law if rows is None else self._every_law.rows(rows - self.first)
        path = None
        if self.sampling.remembers and self.draft.size:
            paths = self.draft.path_tokens()
            wanted = self._every_row() if rows is None else rows
            path = paths.gather(1, wanted[..., None].expand(-1, -1, paths.shape[2]))
            if self.draft.embeddings is not None:
                path = torch.where(path < self.vocabulary, path, -1)  # what has no id is no token that was emitted
        laws = self._lawmaker.law(self.logits(rows), path)
        if rows is None and not self.sampling.remembers:
            self._every_law = laws
        return laws

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


def _padded(texts: Prompts, device: torch.device) -> Tensor:
    """[B, L], filled up with -1."""
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[-1] * (longest - len(text))] for text in texts], device=device)


def _contexts(start: Tensor, tokens: Tensor) -> Tensor:
    """From contexts [B] over tokens [B, K], of which -1 moves nothing: the context before each, and behind the last,
    [B, K + 1]."""
    found = [start]
    for column in tokens.unbind(1):
        found.append(torch.where(column < 0, found[-1], hash_tokens(found[-1], column)))
    return torch.stack(found, 1)


class TableTarget:
    """A target whose logits are a hash of everything before: a law for every prefix, no weights, no cache to get wrong.

    `blur` mixes in a second hash: a blurred copy of a target is a drafter that is right some of the time. Hidden states
    at any tap are hashes of the same contexts, `width` numbers each.
    """

    width = 8
    rollback = True
    embeds = True  # any id has a hash
    weight_bytes = 0

    def __init__(
        self,
        vocabulary: int,
        seed: int = 0,
        *,
        sharpness: float = 1.0,
        blur: float = 0.0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        if vocabulary < 2:
            raise InvalidOption(f"a vocabulary of {vocabulary} leaves nothing to choose; it must be 2 or more")
        self.vocabulary = vocabulary
        self.device = torch.device(device)
        self.sharpness, self.blur, self.dtype = sharpness, blur, dtype
        self._salts = [signed(mix(mix(seed) + offset)) for offset in (0, 1)]

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._taps = needs
        self._lawmaker = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self._context = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        read = self._roll(_padded(prompts, self.device))[:, :-1]
        return Prefill(self.hidden(read, needs), self)

    def _roll(self, tokens: Tensor) -> Tensor:
        """Move each row's context over tokens [B, K]; -1 moves nothing -> the context behind each, [B, K]."""
        found = _contexts(self._context, tokens)
        self._context = found[:, -1]
        return found[:, 1:]

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        return self._scores(draft, since, self._lawmaker, self.blur, self._taps)

    def _scores(
        self, draft: Draft, since: int | None, lawmaker: LogitsPipeline, blur: float, taps: Collection[str]
    ) -> Scores:
        contexts = self._context[:, None]  # [B, 1 + nodes]
        parents = draft.tree.parents.expand(draft.rows, -1) + 1
        for node in range(draft.size):
            before = contexts.gather(1, parents[:, node : node + 1])
            contexts = torch.cat([contexts, hash_tokens(before, draft.tokens[:, node : node + 1])], 1)
        first = 0 if since is None else since + 1
        contexts = contexts[:, first:]
        return Scores(draft, lawmaker, self._lengths, self.logits(contexts, blur), self.hidden(contexts, taps), first)

    def hidden(self, contexts: Tensor, taps: Collection[str]) -> dict[str, Tensor]:
        """[B, K] -> noise [B, K, width] for each tap."""
        places = torch.arange(self.width, device=self.device)
        return {
            tap: torch.logit(uniform_of(hash_tokens(contexts[..., None] ^ crc32(tap.encode()), places)).to(self.dtype))
            for tap in taps
        }

    def logits(self, contexts: Tensor, blur: float | None = None) -> Tensor:
        """[...] -> [..., V] logistic noise."""
        blur = self.blur if blur is None else blur
        ids = torch.arange(self.vocabulary, device=self.device)
        clear, noise = (
            torch.logit(uniform_of(hash_tokens(contexts[..., None] ^ salt, ids)).to(self.dtype)) for salt in self._salts
        )
        return self.sharpness * ((1 - blur) * clear + blur * noise)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        tokens = committed(draft, verdict, count)
        self._roll(tokens)
        self._lengths = self._lengths + count
        self._lawmaker.commit(tokens)

    def mark(self) -> object:
        return self._context, self._lengths, copy.copy(self._lawmaker)

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        self._context, self._lengths, lawmaker = mark
        self._lawmaker = copy.copy(lawmaker)

    def end(self) -> None:
        self._context = self._lengths = torch.zeros(0, dtype=torch.long)

    # ---- seen cheaper: each sublayer left out blurs it

    @property
    def sublayers(self) -> tuple[str, ...]:
        return tuple(_TABLE_PARTS)

    def view(
        self,
        *,
        skip: Collection[str] = (),
        exit: int | None = None,
        window: tuple[int, int] | None = None,
        chunks: tuple[int, int] | None = None,
        refresh: int = 16,
        bits: int | None = None,
    ) -> TableView:
        for name in skip:
            if name not in _TABLE_PARTS:
                raise unknown("sublayer", name, _TABLE_PARTS)
        parts = [*(_TABLE_PARTS[name] for name in sorted(set(skip))), 0.3 * (exit is not None)]
        parts += [0.2 * (window is not None) - 0.1 * (chunks is not None), 0.1 * (bits is not None)]
        return TableView(self, self.blur + (1 - self.blur) * min(sum(parts), 1.0), exit)

    def likeness(self, texts: Prompts, count: int) -> Tensor:
        ids = torch.arange(len(_TABLE_PARTS), device=self.device)
        return uniform_of(hash_tokens(self._context[:, None], ids))


_TABLE_PARTS = {"attention.0": 0.1, "mlp.0": 0.4, "attention.1": 0.05, "mlp.1": 0.3}  # and what each is worth


class TableView:
    """A table target blurred further, moving with it; at an exit its states can be had."""

    rollback = True
    weight_bytes = 0

    def __init__(self, table: TableTarget, blur: float, exit: int | None = None) -> None:
        self.table, self.blur = table, blur
        self.taps = () if exit is None else (f"layer.{exit - 1}",)
        self.vocabulary, self.device = table.vocabulary, table.device

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._lawmaker = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        return Prefill()

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        return self.table._scores(draft, since, self._lawmaker, self.blur, self.taps)

    def recall(self, texts: Prompts, count: int) -> Tensor:
        nothing = torch.zeros(len(texts), dtype=torch.long, device=self.device)
        contexts = _contexts(nothing, _padded(texts, self.device))
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        wanted = torch.arange(count, device=self.device)
        place = (lengths - (lengths - 1).clamp(max=count))[:, None] + wanted  # [B, count]
        there = place < lengths[:, None]
        before = contexts.gather(1, torch.where(there, place, 0))
        return torch.where(there[..., None], self.table.logits(before, self.blur), 0)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        self._lawmaker.commit(committed(draft, verdict, count))

    def mark(self) -> object:
        return copy.copy(self._lawmaker)

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, LogitsPipeline)
        self._lawmaker = copy.copy(mark)

    def end(self) -> None:
        """Nothing of its own."""
