"""The base class of draft heads, and the batches they are trained on; shared by recipes, heads and the trainer.

A draft head guesses the next tokens from a batch that its teacher, the target, has read; the loss is the distance of
its guesses from the teacher's distributions. Several draft heads train on one pass of the teacher. Independent of text,
images and speech. outrider.core.training.trainer runs the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from outrider.core.engine.cuda_graphs import GraphPool
from outrider.core.engine.native.draft_tree import NativeTree
from outrider.core.engine.native.sampled_tree import NativeHeads
from outrider.core.engine.trainable.block import AttentionMask
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible
from outrider.core.training.losses import Loss


@dataclass(eq=False)
class Batch:
    """Rows of tokens that the teacher has read, padded on the right. The teacher's distribution at position t is that
    of token t + 1."""

    tokens: Tensor  # [B, T]; 0 after a row's end
    live: Tensor  # [B, T] bool: False in padding
    answer: Tensor  # [B, T] bool: whether the NEXT token (t + 1) counts for the loss
    taps: Mapping[str, Tensor]  # [B, T, D] the teacher's states, by the decoder's names of taps
    teacher_logits: Callable[
        [Tensor, Tensor | None], Tensor
    ]  # states of the tap "last" [N, D], ids kept [R] -> logits [N, V|R]
    _distributions: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def positions(self) -> Tensor:
        """[1, T], for rotary angles."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)[None]

    def loss_mask(self, offset: int = 1) -> Tensor:
        """[B, T] bool: the positions t at which a guess about token t + offset counts; compute logits only there."""
        return shifted(self.answer, offset - 1, fill=False)

    def labels(self, offset: int = 1) -> Tensor:
        """[B, T] the tokens t + offset; 0 after the end."""
        return shifted(self.tokens, offset, fill=0)

    def teacher_log_probs(self, where: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """The teacher's log-probabilities [N, V] at the positions `where` [B, T] bool, a subset of `answer`; with
        `vocabulary` [R], renormalised over these ids [N, R]. Computed without a gradient, once for all draft heads with
        the same vocabulary tensor."""
        key = 0 if vocabulary is None else vocabulary.data_ptr()
        if key not in self._distributions:
            with torch.no_grad():
                logits = self.teacher_logits(self.taps["last"][self.answer], vocabulary)
                self._distributions[key] = vocabulary, logits.float().log_softmax(-1)
        log_probs = self._distributions[key][1]
        if where is self.answer:
            return log_probs
        row = (self.answer.flatten().cumsum(0) - 1).view_as(self.answer)
        return log_probs.index_select(0, row[where])

    def teacher_log_probs_for(self, offset: int = 1, vocabulary: Tensor | None = None) -> Tensor:
        """The teacher's log-probabilities [N, V|R] of the tokens t + offset, at the positions of loss_mask(offset)."""
        if offset == 1:
            return self.teacher_log_probs(self.answer, vocabulary)
        counts = torch.zeros_like(self.answer)
        counts[:, offset - 1 :] = self.answer[:, offset - 1 :]
        return self.teacher_log_probs(counts, vocabulary)


def shifted(values: Tensor, count: int, fill: float) -> Tensor:
    """Rows [B, T] shifted left by `count`."""
    if not count:
        return values
    return torch.nn.functional.pad(values[:, count:], (0, min(count, values.shape[1])), value=fill)


@dataclass(eq=False)
class Guess:
    """A draft head's logits for the tokens t + offset, at the positions t of batch.loss_mask(offset).

    `logits` is [N, V], or [N, R] over a reduced `vocabulary`; or [B, T, V|R], from which these positions are taken. The
    guesses by offset are the draft after one position; a head with a single guess is applied at each next position."""

    logits: Tensor
    offset: int
    weight: float = 1.0
    vocabulary: Tensor | None = None


class DraftHead(nn.Module):
    """Base of the modules that are trained to draft.

    A draft head is made by Kind(target, **config), where `config` can be stored as JSON. Rows that it shares with the
    target are non-persistent buffers, so its state_dict is what is shipped. Parameters are float32; the trainer
    autocasts to bfloat16. `drafts` returns what the drafter takes as `draft_head`, a `DraftingHead` unless the head has
    its own drafter."""

    needs: frozenset[str] = frozenset()  # taps for training; "last" is always available
    drafting_needs: frozenset[str] | None = None  # taps for drafting; None: `needs`
    config: Mapping[str, Any]  # the keyword arguments to make it again
    block_offset: int = 0  # positions between a root and the first input of a parallel head's block
    windows: tuple[int | None, ...] = ()  # for each cached layer how many positions it sees; None or empty: all
    policy: str = "fixed"  # what ends its chains by default
    threshold: float = 0.4  # of the policy "confidence"
    finished: float = 0.0  # share of the training that is done, for losses that change with it
    graph_pool: GraphPool | None = None  # captures its passes while drafting
    runner: Callable[[Any], Any] | None = None  # runs it while drafting; None: HeadRunner
    drafter_class: Callable[..., Any] | None = None  # makes its drafts; None: by `draft_kind`

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        """Its guesses, with a gradient; with unrolled drafting (training-time test), one per round."""
        raise TypeError(f"{type(self).__name__} must implement guesses() or loss()")

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        """The training loss: the mean of `loss` over the positions that count, as a weighted sum over guesses.
        Overridden for other losses: CTC, acceptance heads, regression of states."""
        return guessed(self.guesses(batch), batch, loss)

    def forward(self, batch: Batch, loss: Loss) -> Tensor:
        """`loss`, as forward() so that modules can be wrapped for several devices."""
        return self.loss(batch, loss)

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        """[B, T, K] bool: whether guess k of a draft after position t equals the answer's token; the input of
        `acceptance_curve.walk`. By default computed from `guesses`."""
        return agreement(list(self.guesses(batch)), batch, depth)

    def drafts(self, target: Any) -> Any:
        """What the drafter takes as its `draft_head`: by default the draft head itself."""
        return self

    def native_tree(self) -> NativeTree | None:
        """Compiled code that grows its trees in one call, if there is any."""
        return None

    def native_heads(self) -> NativeHeads | None:
        """Compiled code that draws the trees of a parallel head in one call, if there is any."""
        return None

    def shared(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Maps its tensors to their names in a draft head of another configuration, to start from that one's
        weights."""
        for name, value in config.items():  # with other taps or tokens, rows would have another meaning
            if isinstance(value, list) and name != "accuracy" and value != self.config.get(name):
                raise Incompatible(f"the weights to start from have other {name}; start without them")
        return {name: name for name in self.state_dict()}


class DraftingHead(Protocol):
    """A draft head's interface for drafting. S is the width of its states."""

    needs: frozenset[str]
    drafting_needs: frozenset[str] | None
    taps: tuple[str, ...]  # in the order of concatenation
    words: SharedEmbedding
    draft_kind: str  # the kind of draft in its paper, one of outrider.core.drafters.trained.drafter.DRAFT_KINDS
    depth: int | None  # maximum number of tokens ahead; None: unlimited
    parallel: bool  # whether all guesses come from one pass, independent of the drafted tokens
    cached_layers: int  # number of layers with a KV cache
    form: Config  # of these layers
    block_offset: int  # positions between a root and the first input of a parallel head's block
    windows: tuple[int | None, ...]  # for each cached layer how many positions it sees; None or empty: all
    pass_bytes: int  # of weights read per pass
    graph_pool: GraphPool | None
    runner: Callable[[Any], Any] | None
    drafter_class: Callable[..., Any] | None

    def open(
        self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask
    ) -> Tensor: ...  # [B,P,F], [B,P] -> [B,P,S]
    def logits(self, states: Tensor) -> Tensor: ...  # [..., S] -> [..., R] of the next token
    def native_tree(self) -> NativeTree | None: ...
    def native_heads(self) -> NativeHeads | None: ...


class SequentialHead(DraftingHead, Protocol):
    """Guesses one level per pass."""

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        """States [B, n, S] of parents and their children's tokens [B, n] on a level -> [B, n, S]."""


@runtime_checkable
class ParallelHead(Protocol):
    """Guesses several positions in one pass."""

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        """The root's state [B, S] and its attention mask -> the states [B, K, S'] of the next K positions, or [B, 1,
        S'] from which `step` continues."""


@runtime_checkable
class ConfidentHead(Protocol):
    """Estimates the acceptance of its own guesses."""

    def acceptance(self, states: Tensor) -> Tensor:
        """States [..., S] -> the probability that the next token is accepted."""


def guessed(guesses: Iterable[Guess], batch: Batch, loss: Loss) -> Tensor:
    """The weighted sum over guesses of their mean loss over the positions that count."""
    total = torch.zeros((), device=batch.tokens.device)
    for guess in guesses:
        loss_mask = batch.loss_mask(guess.offset)
        token = _local(batch.labels(guess.offset)[loss_mask], guess.vocabulary)
        each = loss(_rows(guess, loss_mask), batch.teacher_log_probs_for(guess.offset, guess.vocabulary), token)
        total = total + guess.weight * each.sum() / max(len(each), 1)
    return total


def agreement(guesses: list[Guess], batch: Batch, depth: int) -> Tensor:
    """`DraftHead.hits`, from guesses."""
    hits = []
    for guess in sorted(guesses, key=lambda guess: guess.offset):
        loss_mask = batch.loss_mask(guess.offset)
        guessed_tokens = _rows(guess, loss_mask).argmax(-1)
        guessed_tokens = guessed_tokens if guess.vocabulary is None else guess.vocabulary[guessed_tokens]
        right = torch.zeros_like(batch.answer)
        right[loss_mask] = guessed_tokens == batch.labels(guess.offset)[loss_mask]
        hits.append(right)
    if len(hits) == 1:
        hits = [shifted(hits[0], offset, fill=False) for offset in range(depth)]
    return torch.stack(hits, -1)


def rank_hits(guesses: Iterable[Guess], batch: Batch, ranks: int) -> tuple[Tensor, Tensor]:
    """How often the r-th likeliest token of each guess is right [K, ranks], and how often each was asked [K]."""
    right, asked = [], []
    for guess in sorted(guesses, key=lambda guess: guess.offset):
        loss_mask = batch.loss_mask(guess.offset)
        token = _local(batch.labels(guess.offset)[loss_mask], guess.vocabulary)
        logits = _rows(guess, loss_mask)
        top = logits.topk(min(ranks, logits.shape[-1]), -1).indices
        right.append((top == token[:, None]).sum(0))
        asked.append(token.new_tensor(len(token)))
    return torch.stack(right), torch.stack(asked)


def _rows(guess: Guess, loss_mask: Tensor) -> Tensor:
    return guess.logits if guess.logits.dim() == 2 else guess.logits[loss_mask]


def _local(tokens: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Ids [N] -> indices into a reduced vocabulary, -1 for tokens outside it."""
    if vocabulary is None:
        return tokens
    size = int(vocabulary.max()) + 1
    index = torch.full((size + 1,), -1, device=tokens.device)
    index[vocabulary] = torch.arange(len(vocabulary), device=tokens.device)
    return index[tokens.clamp(max=size)]
