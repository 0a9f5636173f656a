"""The protocol of the loop: what a target, a drafter and an acceptance rule must provide, and the data they exchange.

Optional abilities are separate Protocols, checked with `isinstance`; `capabilities` lists those of a drafter.
Independent of what a token means. Over 400 lines, since the contract belongs together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from outrider.core.device import fetch, upload
from outrider.core.distribution import Distribution, LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import NotFinite
from outrider.core.rng import CounterRNG

Prompts = Sequence[Sequence[int]]
PREFILL_CHUNK = 512  # prompt tokens per pass


@dataclass(frozen=True)
class Prefill:
    """The result of reading the prompts: hidden states [B, L, D] at each requested tap, rows padded on the right; and
    the target, for drafters that are a cheaper view of the same weights (None: the target has no such view)."""

    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    self_draftable: SelfDraftable | None = None


class Recordings(Protocol):
    """Records work on a device (CUDA graphs)."""

    def record_work(
        self, key: tuple[object, ...], inputs: Sequence[Tensor | None], work: Callable[[Sequence[Tensor | None]], Any]
    ) -> Any:
        """`work(inputs)`, from a recording for this key and these shapes; lent until it runs again."""


class Scores:
    """The target's distributions after the root (row 0) and after each draft node (row i + 1), computed on request.

    `logits` is [B, R, V], or a function from rows [B, K] to [B, K, V] for targets that compute only the requested rows
    (in continuous batches the function also takes a slice of batch members). `first` is the row that logits begin with:
    a draft that grows level by level is scored in pieces.
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
        self.recordings: Recordings | None = None  # of work on these scores; None: nothing is recorded
        self.fetched: Mapping[Reading, Sequence[np.ndarray]] = {}  # what came to the host with the verdict
        self._logits = _finite(logits) if isinstance(logits, Tensor) else logits
        self._pipeline = copy.copy(pipeline)  # its state before the verdict on this draft
        self._bits: Tensor | None = None  # a constraint's, of all rows from `first` on
        self._all_distributions: Distribution | None = None

    @property
    def sampling(self) -> Sampling:
        return self._pipeline.sampling

    @property
    def vocabulary(self) -> int:
        return self._pipeline.vocabulary

    @property
    def whole(self) -> Tensor | None:
        """All logits [B, N + 1, V], if they are computed and only the standard processors apply to them."""
        standard = type(self._pipeline) is LogitsPipeline and not self.first
        return self._logits if standard and isinstance(self._logits, Tensor) else None

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """The model's logits of rows [B, K] -> [B, K, V]; of all rows from `first` on by default."""
        if not isinstance(self._logits, Tensor):
            return _finite(self._logits(self._all_rows() if rows is None else rows))
        if rows is None:
            return self._logits
        batch, count, vocabulary = self._logits.shape
        flat = (rows - self.first) + torch.arange(batch, device=rows.device)[:, None] * count
        return self._logits.flatten(0, 1).index_select(0, flat.flatten()).view(*rows.shape, vocabulary)

    def leading(self, count: int) -> Tensor:
        """The model's logits of the first rows [B, count, V]."""
        if isinstance(self._logits, Tensor) and not self.first:
            return self._logits[:, :count]
        return self.logits(torch.arange(count, device=self.lengths.device).expand(len(self.lengths), -1))

    def read(self, reading: Reading) -> Sequence[np.ndarray]:
        """What a reading gives, on the host; a transfer, unless it came with the verdict."""
        known = self.fetched.get(reading)
        return fetch(*reading(self.draft, self)) if known is None else known

    def followed_by(self, draft: Draft) -> Scores:
        """The same scores for a longer draft; of its additional nodes they say nothing that is true."""
        known, last = self._logits, self.draft.size

        def clamped(rows: Tensor, *member: slice) -> Tensor:
            assert not isinstance(known, Tensor)
            return known(rows.clamp(max=last), *member)

        if isinstance(known, Tensor):
            more = known[:, -1:].expand(-1, draft.size - last, -1)
            return Scores(draft, self._pipeline, self.lengths, torch.cat([known, more], 1), self.hidden, self.first)
        return Scores(draft, self._pipeline, self.lengths, clamped, self.hidden, self.first)

    def _all_rows(self) -> Tensor:
        rows = torch.arange(self.first, self.draft.size + 1, device=self.lengths.device)
        return rows.expand(len(self.lengths), -1)

    def row(self, row: int, draft: Draft) -> Scores:
        """The scores of one batch row, for its own draft, whose nodes are the row's first nodes in this draft."""
        member, stop = slice(row, row + 1), draft.size + 1 - self.first
        logits = self._logits

        def of_rows(rows: Tensor) -> Tensor:
            assert not isinstance(logits, Tensor)
            return logits(rows, member)

        own = Scores(
            draft,
            self._pipeline.row(row),
            self.lengths[member],
            logits[member, :stop] if isinstance(logits, Tensor) else of_rows,
            {tap: states[member, :stop] for tap, states in self.hidden.items()},
            self.first,
        )
        own.fetched = {reading: [part[member] for part in parts] for reading, parts in self.fetched.items()}
        return own

    def distribution(self, row: Tensor) -> Distribution:
        """The distribution after one row for each batch member: [B] -> [B, S]."""
        return self.distributions(row[:, None]).column(0)

    def distributions(self, rows: Tensor | None = None) -> Distribution:
        """The distributions after rows [B, K] -> [B, K, S]; by default after every row from `first` on, which is
        cached."""
        if self._all_distributions is not None:
            return self._all_distributions if rows is None else self._all_distributions.rows(rows - self.first)
        logits, path = self.logits(rows), self._path(rows)
        distributions = self._likeliest(logits, path, rows)
        if distributions is None:
            distributions = self._pipeline.distribution(logits, path, self._allowed(rows))
        if rows is None:
            self._all_distributions = distributions
        return distributions

    def softmax(self, rows: Tensor | None = None) -> Distribution:
        """The same at temperature 1 and uncut, but with penalties and processors, whatever the sampling is: what
        confidence is read from."""
        if self.sampling == self.sampling.unscaled:
            return self.distributions(rows)
        return self._pipeline.distribution(self.logits(rows), self._path(rows), self._allowed(rows), unscaled=True)

    def _path(self, rows: Tensor | None) -> Tensor | None:
        """The drafted tokens before each row, if penalties or processors depend on them."""
        path = None
        if (self.sampling.penalises or self.sampling.processors) and self.draft.size:
            paths = self.draft.path_tokens()
            wanted = self._all_rows() if rows is None else rows
            path = paths.gather(1, wanted[..., None].expand(-1, -1, paths.shape[2]))
            if self.draft.embeddings is not None:
                path = torch.where(path < self.vocabulary, path, -1)  # probes with embeddings are not tokens
        return path

    def _likeliest(self, logits: Tensor, path: Tensor | None, rows: Tensor | None) -> Distribution | None:
        """Greedy distributions under a constraint, if they can be had for less than all that it allows: where it allows
        the likeliest token, that is the one."""
        masks = self._pipeline.masks
        if masks is None or not self.sampling.greedy or self.lengths.device.type != "cpu":
            return None
        free, paths = self._pipeline.distribution(logits, path), self._paths(rows)
        likeliest = free.sole()
        places, bits = masks.corrections(paths, likeliest.tolist(), self.vocabulary)
        if not places:
            return free
        index = torch.tensor(places)
        before = None if path is None else path.index_select(1, index)
        few = self._pipeline.distribution(logits.index_select(1, index), before, bits)
        return Distribution.point(likeliest.index_copy(1, index, few.sole()), self.vocabulary, free.probs.dtype)

    def _paths(self, rows: Tensor | None) -> list[list[list[int]]]:
        """The drafted tokens before each row, on the host; -1 pads."""
        if rows is None:
            return [paths[self.first :] for paths in self.draft.host_paths]
        pairs = zip(self.draft.host_paths, rows.tolist(), strict=True)
        return [[paths[row] for row in wanted] for paths, wanted in pairs]

    def _allowed(self, rows: Tensor | None) -> Tensor | None:
        """The bits [B, K, W] of the ids that a constraint allows after each row. On a CPU only of the rows asked for;
        on CUDA of all at once, as the host does not know which those are."""
        masks = self._pipeline.masks
        if masks is None:
            return None
        device = self.lengths.device
        if rows is not None and device.type == "cpu":
            return masks.bits(self._paths(rows), self.vocabulary)
        if self._bits is None:
            self._bits = upload(masks.bits(self._paths(None), self.vocabulary), device)
        if rows is None:
            return self._bits
        index = (rows - self.first)[..., None].expand(-1, -1, self._bits.shape[-1])
        return self._bits.gather(1, index)

    def position(self, row: Tensor) -> Tensor:
        """The position in its sequence of the token after each row [B, ...]; the prompt's first token has 0."""
        tree = self.draft.tree
        after = torch.nn.functional.pad(tree.depths + 1, (1, 0)).expand(len(row), -1)
        flat = after.gather(1, row.flatten(1) if row.dim() > 1 else row[:, None]).view_as(row)
        return flat + self.lengths.view(-1, *[1] * (row.dim() - 1))


def _finite(logits: Tensor) -> Tensor:
    """The logits [..., V]; on a CPU, raises NotFinite if a model that computes NaN made them. One logit per row is
    enough to know: NaN in a hidden state spreads to all of them."""
    if logits.device.type == "cpu" and bool(logits[..., :1].isnan().any()):
        raise NotFinite(
            "the model's scores are not numbers (NaN), so nothing can be decoded: its weights are damaged, or values "
            "overflow in this precision; check the weight files, or load them with dtype='float32'"
        )
    return logits


class Target(Protocol):
    """A model that can score a draft in one pass and keep the part of it that was committed.

    The last committed token is the root: it is read together with the draft, and row 0 of the scores follows it. A
    growing draft is scored in pieces: with `since`, the root and that many nodes were scored by earlier calls, and the
    scores start after them. Scored nodes are scratch: the next call without `since` or `rewind` drops them; `keep`
    makes the committed part permanent and drops the others (committed nodes that were not scored are read later).
    """

    vocabulary: int
    device: torch.device
    rollback: bool  # whether it can drop scored tokens; False for recurrent states
    weight_bytes: int  # read by one pass; 0 if negligible

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str]) -> Prefill: ...
    def score(self, draft: Draft, since: int | None = None) -> Scores: ...
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None: ...
    def mark(self) -> object: ...
    def rewind(self, mark: object) -> None: ...
    def end(self) -> None: ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes drafts. `room` [B], on the host, is the number of tokens that a row may draft; -1: the row is
    finished."""

    vocabulary: int | None  # None: any
    needs: frozenset[str]  # taps of the target's hidden states that it reads

    @property
    def bytes_read(self) -> int: ...  # of weights, so far; 0 for a drafter without weights
    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None: ...
    def propose(self, room: Tensor, rng: CounterRNG) -> Draft: ...
    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None: ...
    def end(self) -> None: ...


@runtime_checkable
class Rule(Protocol):
    """Decides which path of the draft is accepted, and which token follows it."""

    @property
    def lossless(self) -> bool: ...
    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict: ...


# ---- optional abilities of targets


@runtime_checkable
class ArrangeableRows(Protocol):
    """A target or a drafter whose finished rows can leave (outrider.core.decode)."""

    def arrange(self, order: Sequence[int], width: int) -> None:
        """See BatchedTarget."""


@runtime_checkable
class BatchedTarget(Target, Protocol):
    """Rows enter and leave while others are decoded (outrider.core.batching)."""

    @property
    def slot_bytes(self) -> int: ...  # of cache, per token and row
    def open(self, sampling: Sampling, needs: frozenset[str]) -> None:
        """Start without rows."""

    def arrange(self, order: Sequence[int], width: int) -> None:
        """Reorder the rows: row i becomes the former row order[i]; -1: an empty one. Each has room for `width` tokens,
        scratch included."""

    def enter(self, row: Callable[[], int], prompt: Sequence[int]) -> Generator[int, None, Prefill]:
        """Read a prompt into a row, at most PREFILL_CHUNK tokens per step of the generator, which yields their number
        before it reads them; other rows may be decoded in between, and `row` returns the row's current index. Returns
        the prefill."""

    def leave(self, row: int) -> None:
        """Free a row."""


class SharedPrefixes(Protocol):
    """What rows have read, so that a prompt that begins with the same tokens is read from there on."""

    @property
    def bytes(self) -> int: ...  # held beside the rows
    @property
    def reused(self) -> int: ...  # prompt tokens that were copied, since the target's `open`
    def restrict(self, limit: int | None) -> None:
        """Hold at most `limit` bytes; 0: what rows in use have read is enough; None: nothing is copied."""

    def retain(self, row: int, tokens: Sequence[int]) -> None:
        """Hold what a row that is about to leave has read; `tokens` are all of its text."""


@runtime_checkable
class PrefixSharing(Protocol):
    """Does not read the beginning of a prompt that another row has read."""

    @property
    def prefixes(self) -> SharedPrefixes: ...


@runtime_checkable
class PagedTarget(Protocol):
    """Its rows may hold memory only for the slots that they have used, though all have the same number of slots."""

    @property
    def page(self) -> int | None: ...  # slots of a page, of which a row holds a whole number; None: it holds all
    def provide(self, rows: int, slots: int | None) -> None:
        """Make room for rows that have at most so many slots together (None: as many as are common), so that they stay
        where they are."""


@runtime_checkable
class BoundedTarget(Protocol):
    """Reads sequences of a limited length."""

    @property
    def context(self) -> int: ...  # tokens


@runtime_checkable
class CapturingTarget(Protocol):
    """Records its passes (CUDA graphs), and an acceptance rule's verdicts with them."""

    def captured(self, rule: Rule) -> Rule:
        """The rule with captured verdicts, or the rule itself if nothing is captured."""


@runtime_checkable
class RecordingModel(Protocol):
    """A model that drafts, and records the growth of a draft as a whole."""

    def record(
        self,
        key: tuple[object, ...],
        scratch: int,
        given: Sequence[Tensor | None],
        grow: Callable[[Sequence[Tensor | None]], Draft],
    ) -> Draft | None:
        """`grow(given)` from a recording for this key and these shapes, lent until the model's next growth. It reads
        the model, at most `scratch` nodes of it at a time, and leaves the host's state alone. None: not recorded."""


@runtime_checkable
class ChainDrawing(Protocol):
    """Draws a whole chain of a single row in one call, and the tokens of several rows in the same way."""

    def draw_chain(
        self, numbers: np.ndarray, threshold: float = 0.0, last: bool = False, joint: bool = False
    ) -> tuple[Tensor, Distribution] | None:
        """Tokens [1, N] drawn with uniform numbers [K], and their distributions [1, N, S]; None if its current state
        does not allow it. The chain ends before the first token, with `last` behind it, whose distribution has no
        probability at temperature 1 that reaches the threshold; with `joint` after multiplication by those of the
        tokens before it."""

    def draw_rows(self, logits: Tensor, numbers: Tensor) -> tuple[Tensor, Distribution] | None:
        """Tokens [B] drawn from logits [B, V] with uniform numbers [B], and their distributions [B, S]; None where
        chains are not drawn in one call."""

    def confidence(self, logits: Tensor) -> Tensor | None:
        """The highest probabilities [B] at temperature 1, which are compared with the threshold; None as above."""


@runtime_checkable
class TreeGrowing(Protocol):
    """Grows a whole tree of a row's likeliest tokens in one call."""

    def grow_tree(
        self, row: int, depth: int, width: int, floor: float
    ) -> tuple[list[int], list[int], list[float]] | None:
        """Tokens, parents and path log-probabilities of the `width` likeliest successors of the `width` best nodes of
        each level, if their log-probability reaches `floor`; None if its current state does not allow it."""


@dataclass(frozen=True, eq=False)
class DrawnTree:
    """The nodes of one row's tree, and the distributions they are from."""

    tokens: Tensor  # [N]
    live: Tensor  # [N] bool: false where nothing was left to draw
    probs: Tensor  # [N] of each node under its distribution
    distributions: Tensor  # [P, R] over the outputs
    source: Tensor  # [N] the distribution of each node
    ids: Tensor | None  # [R] the token of each output; None: its index


@runtime_checkable
class TreeDrawing(Protocol):
    """Draws a whole tree of a given shape for a row in one call."""

    def draw_tree(self, row: int, parents: tuple[int, ...], numbers: np.ndarray | None) -> DrawnTree | None:
        """The tree with these parents, in level order: nodes drawn without replacement with uniform numbers [N], or
        without numbers the likeliest tokens; None if its current state does not allow it."""


class View(Target, Protocol):
    """A cheaper view of a target's own weights, over its cache. Started after the target on the same prompts; follows
    its rows."""

    mute: bool  # computes only the hidden states at the exit, no logits
    cache_passes: int  # passes of the whole target over its cache, to choose the entries to attend to

    @property
    def cache_bytes(self) -> int: ...  # of cache entries that it holds copies of
    @property
    def layer_bytes(self) -> int: ...  # of the layers' weights alone
    def carry(self) -> object:
        """The state for the target to continue from, for Draft.carry; None if it cannot."""

    def recall(self, texts: Prompts, count: int) -> Tensor:
        """The view's logits [B, count, V] that predict the last `count` committed tokens of each row, in one pass; only
        the first min(count, len(texts[b]) - 1) of row b are valid. `texts` are the rows' tokens from the first on."""


class SelfDraftable(Protocol):
    """A target with cheaper views of itself for drafting."""

    weight_bytes: int
    reads_embeddings: bool  # whether it reads Draft.embeddings

    @property
    def kept(self) -> dict[object, Any]: ...  # what drafters keep between requests, with the weights
    @property
    def sublayers(self) -> tuple[str, ...]: ...  # the names that `skip` takes
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
    def similarity(self, texts: Prompts, count: int) -> Tensor:
        """[B, sublayers] cosine between each sublayer's input and output, averaged over the last `count` tokens."""


@dataclass(frozen=True, eq=False)
class Judged:
    """The scores of a draft and the verdict on it from one recording. The tensors hold until the target's next pass."""

    scores: Scores
    verdict: Verdict
    parts: Sequence[Tensor]  # what the host reads of both (outrider.core.step_recorder)
    packed: Tensor  # the bytes of `parts`


@runtime_checkable
class JudgingTarget(CapturingTarget, Protocol):
    """Scores a draft and decides on it in one recording."""

    def judge(
        self, draft: Draft, rule: Rule, rng: CounterRNG, *, nodes: bool, readings: Sequence[Reading] = ()
    ) -> Judged | None:
        """`score` and the captured rule's verdict; `nodes`: the host reads the draft node by node; `readings`: and
        these. None where they are not recorded together."""


# ---- optional abilities of drafters


@runtime_checkable
class BatchedDrafter(Drafter, Protocol):
    """Rows enter and leave while others draft, as those of a BatchedTarget do."""

    def supports_batching(self) -> bool:
        """Whether it does with its options; if not, one is made per row (outrider.core.drafters.per_row)."""

    def open(self, sampling: Sampling) -> None: ...
    def arrange(self, order: Sequence[int], width: int) -> None: ...
    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None: ...
    def leave(self, row: int) -> None: ...


@runtime_checkable
class OverlappedDrafter(Protocol):
    """Drafts ahead while the target scores: in its own thread (on a GPU, on its own stream)."""

    def draft_ahead(self, draft: Draft) -> None:
        """Prepare for the outcomes of this draft; shares nothing with the target, and ends before the rule decides."""


@runtime_checkable
class LateDrafter(OverlappedDrafter, Protocol):
    """Draws one more token while the target scores, and has it verified (outrider.core.late_guess)."""

    def late_guess(self) -> Draft | None:
        """After `draft_ahead`: a token per row that follows the row's whole draft, a chain, as a draft of one node."""


@runtime_checkable
class CatchUpDrafter(Protocol):
    """Can skip rounds, and catches up from the committed tokens."""

    def observe_committed(self, row: int, tokens: Sequence[int]) -> None:
        """Read the tokens that a row committed since the drafter's last round."""


@runtime_checkable
class DiscardingDrafter(Protocol):
    """Keeps scratch of its own draft, to be dropped if another draft was scored instead."""

    def discard_draft(self) -> None: ...


@runtime_checkable
class StandaloneDrafter(Protocol):
    """Takes its next guesses from the scores of its own draft, so no other drafter can draft in between."""

    standalone: Literal[True]


class Reading(Hashable, Protocol):
    """What a drafter learns on the host from a draft and its scores. Equal readings compute the same, so that they can
    be part of a recording."""

    parts: ClassVar[int]

    def __call__(self, draft: Draft, scores: Scores) -> Sequence[Tensor]:
        """As many tensors [B, ...] as `parts` says."""


@runtime_checkable
class ReadingDrafter(Protocol):
    """Observes with `scores.read`: on a device its readings come to the host with the verdict, in one transfer."""

    @property
    def readings(self) -> tuple[Reading, ...]: ...


def readings_of(drafter: Drafter) -> tuple[Reading, ...]:
    """The readings of a drafter, and of those it combines."""
    if isinstance(drafter, ReadingDrafter):
        return drafter.readings
    members = drafter.drafters if isinstance(drafter, CombinedDrafter) else ()
    return tuple(dict.fromkeys(reading for member in members for reading in readings_of(member)))


@runtime_checkable
class CrowdAwareDrafter(Protocol):
    """Adapts its drafts to the number of rows that share the target pass."""

    def set_crowd(self, rows: int) -> None: ...


@runtime_checkable
class CombinedDrafter(Protocol):
    """Drafts with several drafters."""

    @property
    def drafters(self) -> Sequence[Drafter]: ...


class WeightFree:
    """Base of drafters that read only tokens and scores: no weights, no hidden states, any vocabulary."""

    vocabulary: int | None = None
    needs: frozenset[str] = frozenset()
    bytes_read: int = 0


class Capability(StrEnum):
    """Optional abilities of drafters; the rows of outrider.core.methods declare them."""

    BATCHED = "batched"
    OVERLAPPED = "overlapped"
    CATCHES_UP = "catches up"
    DISCARDS = "discards"
    STANDALONE = "standalone"
    CROWD_AWARE = "crowd-aware"
    COMBINES = "combines"
    WEIGHT_FREE = "weight-free"


_PROTOCOLS: dict[Capability, type] = {
    Capability.BATCHED: BatchedDrafter,
    Capability.OVERLAPPED: OverlappedDrafter,
    Capability.CATCHES_UP: CatchUpDrafter,
    Capability.DISCARDS: DiscardingDrafter,
    Capability.STANDALONE: StandaloneDrafter,
    Capability.CROWD_AWARE: CrowdAwareDrafter,
    Capability.COMBINES: CombinedDrafter,
    Capability.WEIGHT_FREE: WeightFree,
}


def capabilities(drafter: Drafter) -> frozenset[Capability]:
    """The abilities of a drafter with its options."""
    able = {capability for capability, protocol in _PROTOCOLS.items() if isinstance(drafter, protocol)}
    if isinstance(drafter, BatchedDrafter) and not drafter.supports_batching():
        able.remove(Capability.BATCHED)
    return frozenset(able)


def committed(draft: Draft, verdict: Verdict, count: Tensor) -> Tensor:
    """[B, D + 1] the tokens that a round adds to each row: the first count [B] emitted ones; -1 pads."""
    emitted = verdict.emitted(draft)
    places = torch.arange(emitted.shape[1], device=emitted.device)
    return torch.where(places < count[:, None], emitted, -1)


PLAIN = "plain"  # the name of plain decoding, where a drafter's name is asked for


class Plain(WeightFree):
    """Drafts nothing: plain decoding, one token per target pass, the baseline on the same code path."""

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        """Nothing to prepare."""

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        return Draft.empty(len(room), rng.device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        """Nothing to learn."""

    def end(self) -> None:
        """Nothing to free."""

    # ---- continuous batching (BatchedDrafter)

    def supports_batching(self) -> bool:
        return True

    def open(self, sampling: Sampling) -> None:
        """Nothing to prepare."""

    def arrange(self, order: Sequence[int], width: int) -> None:
        """Nothing to move."""

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        """Nothing to read."""

    def leave(self, row: int) -> None:
        """Nothing to free."""
