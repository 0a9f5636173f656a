"""Drafters that guess several places in one pass: what they have in common, and more kinds of heads.

Each reads what was committed once, and then says all it has to say about the next places. All share the target's
embedding and output rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.drafters.trained.head_runner import ready
from outrider.core.drafters.trained.heads import PrefixCache, before, causal, kept
from outrider.core.drafters.trained.lora import adapted
from outrider.core.engine.network import Network
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, DraftHead, Guess


class ParallelHeads(DraftHead):
    """What draft heads that guess at once have in common. `trunk` gives states [B, T, D], `every` turns those of some
    places [N, D] into states of the next K, [N, K, D]; guess 1 is about the token `first` places on."""

    parallel, cached_layers, draft_kind, first = True, 0, "tree", 2
    taps: tuple[str, ...] = ("last",)
    needs = frozenset({"last"})
    depth: int

    def _begin(self, network: Network, vocabulary: PrefixCache, fade: float, **config: Any) -> None:
        for name, value in config.items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise InvalidOption(f"{name} is {value}; it must be 1 or more")
        self.words, self.fade = SharedEmbedding(network, vocabulary), fade
        self.form = network.config
        self.angles = Angles(network.config)
        self.config = {**config, "vocabulary": kept(self.words), "fade": fade}

    def trunk(self, batch: Batch) -> Tensor:
        return batch.taps["last"].to(next(self.parameters()).dtype)

    def every(self, x: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} says nothing")

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        loss_mask = [batch.loss_mask(self.first + k) for k in range(self.depth)]
        wanted = torch.stack(loss_mask).any(0)
        said = self.every(self.trunk(batch)[wanted])
        for k, one in enumerate(loss_mask):
            logits = self.words.logits(said[one[wanted], k])
            yield Guess(logits, self.first + k, self.fade**k, self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return features

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        return self.every(state)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states)

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)


class BlockwiseHeads(ParallelHeads):
    """Blockwise parallel decoding (arXiv 1811.03115): one hidden layer for all heads, then a residual output each; the
    pass that verifies a block is the one that predicts the next. Drafts are chains. In the paper the model may be
    trained along; here it is frozen, and heads share its output rows."""

    draft_kind = "chain"

    def __init__(
        self, target: Any, *, heads: int = 4, hidden: int = 256, vocabulary: PrefixCache = 0, fade: float = 0.8
    ) -> None:
        super().__init__()
        self._begin(target.network, vocabulary, fade, heads=heads, hidden=hidden)
        self.depth = heads
        width = self.form.hidden_size
        self.up = Matrix(width, heads * hidden, bias=True)
        self.down: Any = nn.ModuleList(Matrix(hidden, width, bias=True, zero=True) for _ in range(heads))

    def every(self, x: Tensor) -> Tensor:
        inner = F.relu(self.up(x)).view(len(x), self.depth, -1).unbind(1)
        return torch.stack([x + down(one) for down, one in zip(self.down, inner, strict=True)], 1)


class AmphistaHeads(ParallelHeads):
    """Amphista (arXiv 2406.13170): what was committed goes through two adaptation layers, of which the second also sees
    the token chosen last; heads then look at one another in both directions before they speak. Ours share the target's
    output rows, and the adaptation layers begin as the target's last two, or are those, corrected to a rank of `lora`;
    the layer in which heads meet has an MLP as wide as the target's, or `hidden` wide."""

    cached_layers, first = 2, 1

    def __init__(
        self,
        target: Any,
        *,
        heads: int = 4,
        hidden: int = 0,
        lora: int = 0,
        vocabulary: PrefixCache = 0,
        fade: float = 0.8,
    ) -> None:
        super().__init__()
        network = target.network
        self._begin(network, vocabulary, fade, heads=heads)
        self.config = {**self.config, "hidden": hidden, "lora": lora}
        self.depth = heads
        width = self.form.hidden_size
        adapt = [Block(self.form, index=index) for index in range(2)]
        self.adapt: Any = nn.ModuleList(adapt)
        self.fuse = Matrix(2 * width, width)
        self.embedded = Norm(width, self.form.norm_eps)
        self.heads = Matrix(width, heads * width, bias=True)
        self.place = nn.Parameter(torch.zeros(heads, width))
        self.mixer = Block(replace(self.form, intermediate_size=hidden or self.form.intermediate_size))
        self.norm = Norm(width, self.form.norm_eps)
        for one, layer in zip(reversed(adapt), reversed(network.layers), strict=False):
            one.copy(layer)
            adapted(one, lora, known=width)
        with torch.no_grad():
            self.fuse.weight[:, width:] = torch.eye(width)
            self.mixer.attention.out.weight.mul_(0.1)
            self.norm.weight.copy_(network.norm)

    def _adapted(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        x = self.adapt[0](features, attn_mask)
        x = self.fuse(torch.cat([self.embedded(self.words.embed(tokens)).to(x.dtype), x], -1))
        adapted: Tensor = self.adapt[1](x, attn_mask)
        return adapted

    def trunk(self, batch: Batch) -> Tensor:
        x = before(super().trunk(batch))
        return self._adapted(x, batch.tokens, causal(self.angles, batch, x))

    def every(self, x: Tensor) -> Tensor:
        said = x[:, None] + F.silu(self.heads(x)).view(len(x), self.depth, -1) + self.place
        order = torch.arange(self.depth, device=x.device)[None]
        mixed: Tensor = self.norm(self.mixer(said, AttentionMask(*self.angles(order, self.depth, said.dtype), None)))
        return mixed

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return self._adapted(features, tokens, attn_mask)
