"""Heads on the target's last hidden state: each guesses one of the next tokens.

Medusa's heads are independent; Hydra's read the tokens drafted before theirs. All share the target's frozen output
rows, so a head is a few small matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.drafters.trained.head_runner import ready
from outrider.core.engine.native.sampled_tree import NativeHeads
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.errors import InvalidOption
from outrider.core.kernels.native import Tiled
from outrider.core.training.draft_head import Batch, DraftHead, Guess

_TWO = 2.22  # SiLU of it is 2
PrefixCache = int | Sequence[int] | Tensor  # the ids that can be guessed, or how many of them; 0: all


class MedusaHeads(DraftHead):
    """Medusa (arXiv 2401.10774): head k predicts the token k positions after the next one from x + SiLU(W_k x), in
    `layers` such steps, through an output layer. Trained on a frozen target (Medusa-1), with less weight on later
    heads. Its tree is the Cartesian product of the heads' likeliest tokens, of the shape with the best `accuracy` [K,
    R] of head k's r-th token, which training measures on held-out answers. Ours shares the target's output rows unless
    each head has its `own`."""

    parallel, cached_layers, draft_kind, taps = True, 0, "tree", ("last",)
    needs = frozenset({"last"})

    def __init__(
        self,
        target: Any,
        *,
        heads: int = 4,
        layers: int = 1,
        own: bool = False,
        accuracy: Sequence[Sequence[float]] = (),
        vocabulary: PrefixCache = 0,
        fade: float = 0.8,
    ) -> None:
        super().__init__()
        _counted(heads=heads, layers=layers)
        network = target.network
        self.words = SharedEmbedding(network, vocabulary)
        self.form, self.depth, self.fade = network.config, heads, fade
        self.config = {"heads": heads, "layers": layers, "own": own, "vocabulary": kept(self.words), "fade": fade}
        self.config = {**self.config, "accuracy": [list(row) for row in accuracy]}
        rows: list[Any] = [SharedEmbedding(network, vocabulary, own=True).own for _ in range(heads if own else 0)]
        self.outputs: Any = nn.ModuleList(rows)
        width = network.config.hidden_size
        self.first = Matrix(width, heads * width, bias=True, zero=True)  # of all heads
        self.more = nn.ModuleList(_steps(width, layers - 1) for _ in range(heads))

    @torch.no_grad()
    def take_turns(self, first: int, books: int) -> None:
        """Begin with guesses of the codebooks that follow, where the columns of the states from `first` on are 1 for
        the next token's and 0 for the others: head k adds 2 to that of the token k positions later."""
        width = self.form.hidden_size
        for k in range(self.depth):
            for book in range(books):
                later = (book + k + 1) % books
                if later != book:
                    self.first.weight[k * width + first + later, first + book] = _TWO

    def head(self, k: int, x: Tensor) -> Tensor:
        """The output of head k for states [..., D]."""
        width, first = x.shape[-1], self.first
        rows = slice(k * width, (k + 1) * width)
        bias = None if first.bias is None else first.bias[rows]
        return residual(self.more[k], x + F.silu(F.linear(x, first.weight[rows], bias)))

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        for k in range(self.depth):
            states = batch.taps["last"][batch.loss_mask(k + 2)].to(self.first.weight.dtype)
            output = self.outputs[k] if self.outputs else self.words.logits
            yield Guess(output(self.head(k, states)), k + 2, self.fade**k, self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return features

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        first = F.silu(self.first(state)).view(len(state), self.depth, -1) + state[:, None]
        if not self.outputs and not self.config["layers"] > 1:
            return first
        states = [residual(self.more[k], x) for k, x in enumerate(first.unbind(1))]
        return torch.stack(
            [output(x) for output, x in zip(self.outputs, states, strict=True)] if self.outputs else states, 1
        )

    def logits(self, states: Tensor) -> Tensor:
        """`future_states` of heads with their own output rows are logits already."""
        return states if self.outputs else self.words.logits(states)

    def native_heads(self) -> NativeHeads | None:
        return heads_in_kernels(self, None)

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self) - (self.words.weight_bytes if self.outputs else 0)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)


class HydraHeads(DraftHead):
    """Hydra (arXiv 2402.05109): head k reads the target's state and the embeddings of the next token and of the k - 1
    tokens drafted after it, so that guesses depend on one another. With `prefix`, as in Hydra++, states first go
    through a transformer layer over the committed tokens, started as a copy of the target's last. Ours shares the
    target's output rows and norms its inputs. A head is a matrix, or with `hidden` an MLP of that width, then `layers`
    steps like Medusa's. Published heads add a second matrix of the inputs (`joint`), read embeddings and the prefix
    layer's state as theirs (`plain_inputs`), and have output rows of their `own`. Static trees have the shape with the
    best `accuracy`, as Medusa's."""

    parallel, draft_kind, taps = False, "dynamic", ("last",)
    needs = frozenset({"last"})

    def __init__(
        self,
        target: Any,
        *,
        heads: int = 4,
        layers: int = 2,
        prefix: bool = True,
        hidden: int = 0,
        joint: bool = False,
        plain_inputs: bool = False,
        own: bool = False,
        form: Mapping[str, Any] | None = None,
        accuracy: Sequence[Sequence[float]] = (),
        vocabulary: PrefixCache = 0,
        fade: float = 0.8,
    ) -> None:
        super().__init__()
        _counted(heads=heads, layers=layers + hidden + joint)
        network = target.network
        self.words = SharedEmbedding(network, vocabulary)
        self.form, self.depth, self.fade = replace(network.config, **(form or {})), heads, fade
        self.config = {
            "heads": heads,
            "layers": layers,
            "prefix": prefix,
            "hidden": hidden,
            "accuracy": [list(row) for row in accuracy],
            "joint": joint,
            "plain_inputs": plain_inputs,
            "own": own,
            "form": dict(form or {}),
            "vocabulary": kept(self.words),
            "fade": fade,
        }
        width, eps = network.config.hidden_size, network.config.norm_eps
        self.cached_layers = int(prefix)
        self.prefix = Block(self.form) if prefix else None
        self.embedded: Any = nn.Identity() if plain_inputs else Norm(width, eps)
        self.prefix_norm: Any = Norm(width, self.form.norm_eps) if prefix and plain_inputs else nn.Identity()
        self.sums: Any = nn.ModuleList(Matrix((k + 2) * width, width, bias=True) for k in range(heads if joint else 0))
        self.rows: Any = nn.ModuleList(Matrix(width, self.words.count, bias=True) for _ in range(heads if own else 0))
        self._tail = self.words.count if own else width  # of a state: the last head's output, or its logits
        self.inputs = nn.ModuleList(Matrix((k + 2) * width, hidden or width, bias=True) for k in range(heads))
        self.outputs: Any = nn.ModuleList(Matrix(hidden, width, zero=True) for _ in range(heads if hidden else 0))
        self.layers = nn.ModuleList(_steps(width, layers) for _ in range(heads))
        with torch.no_grad():
            for weight in () if hidden else self.inputs.parameters():
                weight.mul_(0.1)  # start with the target's state dominating
        if self.prefix is not None:
            for last in network.layers[-1:]:
                self.prefix.copy(last)
        self.angles = Angles(self.form)

    def head(self, k: int, read: Tensor) -> Tensor:
        """The state [..., D] and k + 1 normed embeddings, concatenated -> the output of head k [..., D]."""
        hidden = self.inputs[k](read)
        if self.sums:
            return residual(self.layers[k], self.sums[k](read) + F.silu(hidden))
        x = read[..., : self.words.hidden_size] + (self.outputs[k](F.silu(hidden)) if self.outputs else hidden)
        return residual(self.layers[k], x)

    def _scored(self, k: int, output: Tensor) -> Tensor:
        """The logits of head k's output."""
        return self.rows[k](output) if self.rows else self.words.logits(output)

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        states = before(batch.taps["last"].to(next(self.inputs.parameters()).dtype))
        if self.prefix is not None:
            states = self.prefix_norm(self.prefix(states, causal(self.angles, batch, states)))
        embedded = self.embedded(self.words.embed(batch.tokens))
        for k in range(self.depth):
            loss_mask = batch.loss_mask(k + 1)
            row, place = loss_mask.nonzero(as_tuple=True)
            read = [states[row, place], *(embedded[row, place + j] for j in range(k + 1))]
            output = self.head(k, torch.cat(read, -1))
            yield Guess(self._scored(k, output), k + 1, self.fade**k, self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        states = features if self.prefix is None else self.prefix_norm(self.prefix(features, attn_mask))
        empty = states.new_zeros(*states.shape[:2], self.depth * self.words.hidden_size)
        return self._with_head(torch.cat([states, empty], -1), tokens, 0)

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        return self._with_head(states[..., : -self._tail], tokens, level + 1)

    def _with_head(self, read: Tensor, tokens: Tensor, k: int) -> Tensor:
        """Write the tokens' embeddings into slot k + 1 of the heads' inputs, and append the output of head k."""
        width = self.words.hidden_size
        if k >= self.depth:  # there is no head for later tokens
            tail = read.new_zeros(*read.shape[:-1], self._tail) if self.rows else read[..., :width]
            return torch.cat([read, tail], -1)
        parts = [read[..., : (k + 1) * width], self.embedded(self.words.embed(tokens)), read[..., (k + 2) * width :]]
        read = torch.cat(parts, -1)
        output = self.head(k, read[..., : (k + 2) * width])
        return torch.cat([read, self.rows[k](output) if self.rows else output], -1)

    def logits(self, states: Tensor) -> Tensor:
        tail = states[..., -self._tail :]
        return tail if self.rows else self.words.logits(tail)

    @property
    def pass_bytes(self) -> int:
        """Bytes of the output rows, and of a mean share of the heads and the prefix layer per pass."""
        shared = 0 if self.rows else self.words.weight_bytes
        return shared + (weight_bytes(self) - self.words.weight_bytes) // self.depth

    def drafts(self, target: Any) -> Any:
        return ready(self, target)


def _steps(width: int, count: int) -> nn.ModuleList:
    return nn.ModuleList(Matrix(width, width, bias=True, zero=True) for _ in range(count))


def heads_in_kernels(heads: MedusaHeads, about: Matrix | None) -> NativeHeads | None:
    """Medusa's heads for the compiled kernels, with a matrix of the conditions that they read; None where one of their
    layers is in another layout."""
    output, first = heads.words.tiled(), heads.first.fast
    conditions = None if about is None else about.fast
    more = [[step.fast for step in steps.children()] for steps in heads.more.children()]
    layers = [first, *([] if about is None else [conditions]), *(step for steps in more for step in steps)]
    if heads.outputs or output is None or not all(isinstance(layer, Tiled) for layer in layers):
        return None
    words = heads.words
    return NativeHeads(words.hidden_size, first, conditions, more, output, words.count, words.vocabulary)  # type: ignore[arg-type]


def residual(layers: nn.Module, x: Tensor) -> Tensor:
    """x + SiLU(W x), once for each of a list of matrices."""
    for layer in layers.children():
        x = x + F.silu(layer(x))
    return x


def kept(words: SharedEmbedding) -> int:
    """The entry for a reduced vocabulary in a draft head's config: its size; 0: the whole vocabulary."""
    return 0 if words.vocabulary is None else len(words.vocabulary)


def before(states: Tensor) -> Tensor:
    """States [B, T, D] shifted right: at each token the state of the token before it, zeros at the first."""
    return F.pad(states, (0, 0, 1, 0))[:, :-1]


def causal(angles: Angles, batch: Batch, states: Tensor) -> AttentionMask:
    """The causal attention mask of training. The first token, which has no state before it, is visible only to itself,
    as in drafting."""
    count = batch.tokens.shape[1]
    position = batch.positions[0]
    mask = (position <= position[:, None]) & ((position > 0) | (position == position[:, None]))
    dtype = (
        torch.get_autocast_dtype(states.device.type) if torch.is_autocast_enabled(states.device.type) else states.dtype
    )
    return AttentionMask(*angles(batch.positions, count, dtype), mask[None])


def _counted(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InvalidOption(f"{name} is {count}; it must be 1 or more")
