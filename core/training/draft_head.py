"""The base class of draft heads, and the batches they are trained on: shared by recipes, heads and the trainer.

A draft head reads a batch that its teacher (the target) has read, and guesses the next tokens; the loss is the distance
of its guesses from the teacher's distributions. Several draft heads learn from one pass of the teacher. Knows token ids
and distributions, nothing of text, images or speech; outrider.core.training.trainer runs the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from outrider.core.engine.cuda_graphs import GraphPool
from outrider.core.engine.native.draft_tree import NativeTree
from outrider.core.engine.trainable.block import AttentionMask
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible
from outrider.core.training.losses import Loss


@dataclass(eq=False)
class Batch:
    """Rows of tokens that the teacher has read, padded on the right.

    A position t is where token t stands. The teacher's distribution "behind t" is that of token t + 1.
    """

    tokens: Tensor  # [B, T]; 0 behind a row's end
    live: Tensor  # [B, T] bool: does a token stand here?
    answer: Tensor  # [B, T] bool: does the NEXT token (t + 1) count for the loss?
    taps: Mapping[str, Tensor]  # [B, T, D] the teacher's states, under the decoder's names of taps
    teacher_logits: Callable[
        [Tensor, Tensor | None], Tensor
    ]  # states of the tap "last" [N, D], ids kept [R] -> logits [N, V|R]
    _distributions: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def positions(self) -> Tensor:
        """[1, T], for rotary angles."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)[None]

    def loss_mask(self, offset: int = 1) -> Tensor:
        """[B, T] bool: the positions t at which a guess about token t + offset counts. Compute logits there alone."""
        return shifted(self.answer, offset - 1, fill=False)

    def labels(self, offset: int = 1) -> Tensor:
        """[B, T] the tokens t + offset; 0 beyond the end."""
        return shifted(self.tokens, offset, fill=0)

    def teacher_log_probs(self, where: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """The logarithm of the teacher's distribution behind positions [B, T] bool, all of them in `answer` -> [N, V];
        over the ids `vocabulary` [R] if given, as if there were no others -> [N, R]. Computed once for all draft heads
        that share a vocabulary (the same tensor), without a gradient."""
        key = 0 if vocabulary is None else vocabulary.data_ptr()
        if key not in self._distributions:
            with torch.no_grad():
                logits = self.teacher_logits(self.taps["last"][self.answer], vocabulary)
                self._distributions[key] = vocabulary, logits.float().log_softmax(-1)
        found = self._distributions[key][1]
        if where is self.answer:
            return found
        row = (self.answer.flatten().cumsum(0) - 1).view_as(self.answer)
        return found.index_select(0, row[where])

    def teacher_log_probs_for(self, offset: int = 1, vocabulary: Tensor | None = None) -> Tensor:
        """The logarithm of the teacher's distribution of tokens t + offset, for the positions in asked(offset) -> [N,
        V|R]."""
        if offset == 1:
            return self.teacher_log_probs(self.answer, vocabulary)
        counts = torch.zeros_like(self.answer)
        counts[:, offset - 1 :] = self.answer[:, offset - 1 :]
        return self.teacher_log_probs(counts, vocabulary)


def shifted(values: Tensor, count: int, fill: float) -> Tensor:
    """Each row of [B, T] moved to the left by `count`."""
    if not count:
        return values
    return torch.nn.functional.pad(values[:, count:], (0, min(count, values.shape[1])), value=fill)


@dataclass(eq=False)
class Guess:
    """What a draft head says about the tokens t + offset, for the positions t in batch.loss_mask(offset), row by row.

    `logits` is [N, V] or, with `vocabulary` (ids kept), [N, R]; or [B, T, V|R], of which the asked positions are taken.
    The draft head's guesses in the order of their offsets are the draft it would make behind one position; a draft head
    that guesses by itself, token after token, makes one guess, and a draft is the same guess at the next positions."""

    logits: Tensor
    offset: int
    weight: float = 1.0
    vocabulary: Tensor | None = None


class DraftHead(nn.Module):
    """Anything that is trained to draft.

    A draft head is made as Kind(target, **config): `config` is what JSON can hold, and of the target's weights it
    refers to rows as buffers that are not persistent (`register_buffer(..., persistent=False)`): its state_dict is
    what ships, in 16 bits. Parameters are float32, and the trainer autocasts to bfloat16. `drafts` gives what its
    drafter takes as `draft_head`, a `DraftingHead` unless the drafter is the head's own."""

    needs: frozenset[str] = frozenset()  # taps it is trained on; "last" is always there
    drafting_needs: frozenset[str] | None = None  # taps it reads while drafting; None: `needs`
    config: Mapping[str, Any]  # the keyword arguments that make it again, besides the teacher
    graph_pool: GraphPool | None = None  # records its passes while drafting
    runner: Callable[[Any], Any] | None = None  # reads it while drafting; None: the usual HeadRunner
    drafter_class: Callable[..., Any] | None = None  # makes its drafts; None: those that `draft_kind` names

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        """What it guesses, with a gradient; training-time test (unrolled drafting) is one guess a round."""
        raise TypeError(f"{type(self).__name__} has neither guesses nor a loss of its own")

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        """A number to minimise: the mean of the loss over what was asked, summed over guesses by their weights.
        Overridden for what isn't of this form: CTC, acceptance heads, features."""
        return guessed(self.guesses(batch), batch, loss)

    def forward(self, batch: Batch, loss: Loss) -> Tensor:
        """`loss`, under the name by which several devices can share it."""
        return self.loss(batch, loss)

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        """[B, T, K] bool: would guess number k of a draft made behind position t agree with what came? For greedy
        answers, this times the walk is how far drafts get. The default reads `guesses`."""
        return agreement(list(self.guesses(batch)), batch, depth)

    def drafts(self, target: Any) -> Any:
        """What the drafter takes as its `model`: by default the draft head itself."""
        return self

    def native_tree(self) -> NativeTree | None:
        """Compiled code that grows its trees in one call; None: there is none."""
        return None

    def shared(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Its tensors, each with its name in a draft head of another configuration, whose weights it can begin from."""
        for name, value in config.items():  # rows of other words would be taken for theirs
            if isinstance(value, list) and value != self.config.get(name):
                raise Incompatible(f"what it is to begin from has other {name}; begin from nothing")
        return {name: name for name in self.state_dict()}


class DraftingHead(Protocol):
    """What a draft head offers to draft with. S is the width of its states, of its own choice."""

    needs: frozenset[str]
    drafting_needs: frozenset[str] | None
    taps: tuple[str, ...]  # in the order in which it reads them, concatenated
    words: SharedEmbedding
    draft_kind: str  # how its paper drafts: one of outrider.core.drafters.trained.drafter.DRAFT_KINDS
    depth: int | None  # how many tokens ahead it can guess; None: any number
    parallel: bool  # does it make all guesses at once, whatever is drafted?
    cached_layers: int  # number of layers that attend to what was read before
    form: Config  # of their heads
    pass_bytes: int  # of weights, read by one pass
    graph_pool: GraphPool | None
    runner: Callable[[Any], Any] | None
    drafter_class: Callable[..., Any] | None

    def open(
        self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask
    ) -> Tensor: ...  # [B,P,F], [B,P] -> [B,P,S]
    def logits(self, states: Tensor) -> Tensor: ...  # [..., S] -> [..., R] of the next token
    def native_tree(self) -> NativeTree | None: ...


class SequentialHead(DraftingHead, Protocol):
    """Guesses token after token."""

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        """States [B, n, S] of parents and their children's tokens [B, n] on a level -> [B, n, S]."""


@runtime_checkable
class ParallelHead(Protocol):
    """Guesses several positions in one pass."""

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        """The root's state [B, S] and what it attends to -> [B, K, S'], whose logits are those of positions 1 to K; or
        [B, 1, S'] for `step` to continue from."""


@runtime_checkable
class ConfidentHead(Protocol):
    """Estimates the acceptance of its own guesses."""

    def acceptance(self, states: Tensor) -> Tensor:
        """States [..., S] -> the probability that the next token is accepted."""


def guessed(guesses: Iterable[Guess], batch: Batch, loss: Loss) -> Tensor:
    """The weighted sum over guesses of the mean loss over their asked positions."""
    total = torch.zeros((), device=batch.tokens.device)
    for guess in guesses:
        loss_mask = batch.loss_mask(guess.offset)
        token = _local(batch.labels(guess.offset)[loss_mask], guess.vocabulary)
        each = loss(_rows(guess, loss_mask), batch.teacher_log_probs_for(guess.offset, guess.vocabulary), token)
        total = total + guess.weight * each.sum() / max(len(each), 1)
    return total


def agreement(guesses: list[Guess], batch: Batch, depth: int) -> Tensor:
    """`DraftHead.hits` of guesses."""
    found = []
    for guess in sorted(guesses, key=lambda one: one.offset):
        loss_mask = batch.loss_mask(guess.offset)
        said = _rows(guess, loss_mask).argmax(-1)
        said = said if guess.vocabulary is None else guess.vocabulary[said]
        right = torch.zeros_like(batch.answer)
        right[loss_mask] = said == batch.labels(guess.offset)[loss_mask]
        found.append(right)
    if len(found) == 1:
        found = [shifted(found[0], place, fill=False) for place in range(depth)]
    return torch.stack(found, -1)


def _rows(guess: Guess, loss_mask: Tensor) -> Tensor:
    return guess.logits if guess.logits.dim() == 2 else guess.logits[loss_mask]


def _local(tokens: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Ids [N] -> places in a vocabulary; -1 where it lacks them."""
    if vocabulary is None:
        return tokens
    size = int(vocabulary.max()) + 1
    place = torch.full((size + 1,), -1, device=tokens.device)
    place[vocabulary] = torch.arange(len(vocabulary), device=tokens.device)
    return place[tokens.clamp(max=size)]
