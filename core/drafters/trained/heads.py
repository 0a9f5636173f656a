"""Heads on the target's last hidden state: each guesses one of the next tokens.

Medusa's know nothing of one another, Hydra's see the tokens drafted before theirs. All of them share the target's own
output rows, which stay as they are, so that a head is a few small matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.drafters.trained.head_runner import ready
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, DraftHead, Guess

PrefixCache = int | Sequence[int] | Tensor  # the ids that can be guessed, or how many of them; 0: all


class MedusaHeads(DraftHead):
    """Medusa (arXiv 2401.10774): head k says x + SiLU(W_k x), through the target's output layer, about the token k
    places behind the next one; trained on a frozen target (Medusa-1), later heads counting less. Its tree is the
    Cartesian product of what the heads find likeliest. Ours share the target's output rows instead of each having
    rows of its `own` (they may have); `layers` such steps may stand behind one another."""

    parallel, cached_layers, draft_kind, taps = True, 0, "tree", ("last",)
    needs = frozenset({"last"})

    def __init__(
        self,
        target: Any,
        *,
        heads: int = 4,
        layers: int = 1,
        own: bool = False,
        vocabulary: PrefixCache = 0,
        fade: float = 0.8,
    ) -> None:
        super().__init__()
        _counted(heads=heads, layers=layers)
        network = target.network
        self.words = SharedEmbedding(network, vocabulary)
        self.form, self.depth, self.fade = network.config, heads, fade
        self.config = {"heads": heads, "layers": layers, "own": own, "vocabulary": kept(self.words), "fade": fade}
        rows: list[Any] = [SharedEmbedding(network, vocabulary, own=True).own for _ in range(heads if own else 0)]
        self.outputs: Any = nn.ModuleList(rows)
        width = network.config.hidden_size
        self.first = Matrix(width, heads * width, bias=True, zero=True)  # of all heads
        self.more = nn.ModuleList(_steps(width, layers - 1) for _ in range(heads))

    def head(self, k: int, x: Tensor) -> Tensor:
        """What head k makes of states [..., D]."""
        width, first = x.shape[-1], self.first
        rows = slice(k * width, (k + 1) * width)
        bias = None if first.bias is None else first.bias[rows]
        return residual(self.more[k], x + F.silu(F.linear(x, first.weight[rows], bias)))

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        for k in range(self.depth):
            states = batch.taps["last"][batch.loss_mask(k + 2)].to(self.first.weight.dtype)
            speak = self.outputs[k] if self.outputs else self.words.logits
            yield Guess(speak(self.head(k, states)), k + 2, self.fade**k, self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return features

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        first = F.silu(self.first(state)).view(len(state), self.depth, -1) + state[:, None]
        if not self.outputs and not self.config["layers"] > 1:
            return first
        said = [residual(self.more[k], x) for k, x in enumerate(first.unbind(1))]
        return torch.stack([speak(x) for speak, x in zip(self.outputs, said, strict=True)] if self.outputs else said, 1)

    def logits(self, states: Tensor) -> Tensor:
        """Heads with output rows of their own have spoken already."""
        return states if self.outputs else self.words.logits(states)

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self) - (self.words.weight_bytes if self.outputs else 0)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)


class HydraHeads(DraftHead):
    """Hydra (arXiv 2402.05109): head k sees the target's state and the embeddings of the token chosen there and of the
    k - 1 drafted behind it, so that guesses hang together. With `prefix`, as in Hydra++, the states first go through
    one transformer layer over all that was committed, here begun as a copy of the target's last. Ours share the
    target's output rows, and norm what they read. A head is a matrix over all that it reads, or with `hidden` an MLP so
    wide, then `layers` steps like Medusa's."""

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
        vocabulary: PrefixCache = 0,
        fade: float = 0.8,
    ) -> None:
        super().__init__()
        _counted(heads=heads, layers=layers + hidden)
        network = target.network
        self.words = SharedEmbedding(network, vocabulary)
        self.form, self.depth, self.fade = network.config, heads, fade
        self.config = {
            "heads": heads,
            "layers": layers,
            "prefix": prefix,
            "hidden": hidden,
            "vocabulary": kept(self.words),
            "fade": fade,
        }
        width, eps = network.config.hidden_size, network.config.norm_eps
        self.cached_layers = int(prefix)
        self.prefix = Block(network.config) if prefix else None
        self.embedded = Norm(width, eps)
        self.inputs = nn.ModuleList(Matrix((k + 2) * width, hidden or width, bias=True) for k in range(heads))
        self.outputs: Any = nn.ModuleList(Matrix(hidden, width, zero=True) for _ in range(heads if hidden else 0))
        self.layers = nn.ModuleList(_steps(width, layers) for _ in range(heads))
        with torch.no_grad():
            for one in () if hidden else self.inputs.parameters():
                one.mul_(0.1)  # what the target's state says comes first
        if self.prefix is not None:
            self.prefix.copy(network.layers[-1])
        self.angles = Angles(network.config)

    def head(self, k: int, read: Tensor) -> Tensor:
        """The state [..., D] and k + 1 normed embeddings, side by side -> what head k says, [..., D]."""
        made = self.inputs[k](read)
        x = read[..., : self.words.hidden_size] + (self.outputs[k](F.silu(made)) if self.outputs else made)
        return residual(self.layers[k], x)

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        states = before(batch.taps["last"].to(self.embedded.weight.dtype))
        if self.prefix is not None:
            states = self.prefix(states, causal(self.angles, batch, states))
        embedded = self.embedded(self.words.embed(batch.tokens))
        for k in range(self.depth):
            loss_mask = batch.loss_mask(k + 1)
            row, place = loss_mask.nonzero(as_tuple=True)
            read = [states[row, place], *(embedded[row, place + j] for j in range(k + 1))]
            said = self.head(k, torch.cat(read, -1))
            yield Guess(self.words.logits(said), k + 1, self.fade**k, self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        states = features if self.prefix is None else self.prefix(features, attn_mask)
        empty = states.new_zeros(*states.shape[:2], self.depth * self.words.hidden_size)
        return self._said(torch.cat([states, empty], -1), tokens, 0)

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        return self._said(states[..., : -self.words.hidden_size], tokens, level + 1)

    def _said(self, read: Tensor, tokens: Tensor, k: int) -> Tensor:
        """Put the tokens' embeddings into place k + 1 of what is read; what head k says goes behind."""
        width = self.words.hidden_size
        if k >= self.depth:  # nobody is left to guess on
            return torch.cat([read, read[..., :width]], -1)
        parts = [read[..., : (k + 1) * width], self.embedded(self.words.embed(tokens)), read[..., (k + 2) * width :]]
        read = torch.cat(parts, -1)
        return torch.cat([read, self.head(k, read[..., : (k + 2) * width])], -1)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states[..., -self.words.hidden_size :])

    @property
    def pass_bytes(self) -> int:
        """Of the output rows and a head, which a pass reads, and the prefix layer, which the first of a step does."""
        return self.words.weight_bytes + (weight_bytes(self) - self.words.weight_bytes) // self.depth

    def drafts(self, target: Any) -> Any:
        return ready(self, target)


def _steps(width: int, count: int) -> nn.ModuleList:
    return nn.ModuleList(Matrix(width, width, bias=True, zero=True) for _ in range(count))


def residual(layers: nn.Module, x: Tensor) -> Tensor:
    """x + SiLU(W x), once for each of a list of matrices."""
    for layer in layers.children():
        x = x + F.silu(layer(x))
    return x


def kept(words: SharedEmbedding) -> int:
    """How a reduced vocabulary is written in a draft head's config: how many ids the file lists."""
    return 0 if words.vocabulary is None else len(words.vocabulary)


def before(states: Tensor) -> Tensor:
    """Moved to the right: at each token [B, T, D] the state behind the token before it, none at the first."""
    return F.pad(states, (0, 0, 1, 0))[:, :-1]


def causal(angles: Angles, batch: Batch, states: Tensor) -> AttentionMask:
    """How training looks at a row: at what came before, as drafting does; the first token, which has no state before
    it, is seen by itself alone."""
    count = batch.tokens.shape[1]
    place = batch.positions[0]
    mask = (place <= place[:, None]) & ((place > 0) | (place == place[:, None]))
    dtype = (
        torch.get_autocast_dtype(states.device.type) if torch.is_autocast_enabled(states.device.type) else states.dtype
    )
    return AttentionMask(*angles(batch.positions, count, dtype), mask[None])


def _counted(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InvalidOption(f"{name} is {count}; it must be 1 or more")
