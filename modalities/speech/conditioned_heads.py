"""Medusa heads for speech, each of which also reads the conditioning of the position it predicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.drafters.trained.heads import MedusaHeads, PrefixCache, heads_in_kernels, residual
from outrider.core.engine.native.sampled_tree import NativeHeads
from outrider.core.engine.trainable.block import AttentionMask, Matrix
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, Guess
from outrider.speech.voice import LOOKAHEAD


class ConditionedHeads(MedusaHeads):
    """Medusa heads (arXiv 2401.10774) for speech, after VADUSA (arXiv 2410.21951). Head k predicts the token k
    positions after the next one from x + SiLU(W_k x + V_k c), where x is the last hidden state and c the voice's
    conditioning at that position. VADUSA's heads read x only; c is known here because the durations are predicted
    beforehand."""

    taps: Any = ("last", "ahead")
    needs = frozenset({"last", "ahead"})

    def __init__(
        self,
        target: Any,
        *,
        heads: int = 4,
        layers: int = 1,
        vocabulary: PrefixCache = 0,
        fade: float = 0.8,
        accuracy: Sequence[Sequence[float]] = (),
    ) -> None:
        if heads > LOOKAHEAD:
            raise InvalidOption(
                f"heads is {heads}; it must be at most {LOOKAHEAD}, the positions the voice looks ahead"
            )
        super().__init__(target, heads=heads, layers=layers, vocabulary=vocabulary, fade=fade, accuracy=accuracy)
        self.config = {name: value for name, value in self.config.items() if name != "own"}
        self.about = Matrix(self.words.hidden_size, heads * self.words.hidden_size, zero=True)  # V_k of all heads

    def _condition(self, k: int, conditioning: Tensor) -> Tensor:
        """V_k times the conditioning of head k's position, which is one of LOOKAHEAD: [..., LOOKAHEAD D] -> [...,
        D]."""
        width = self.words.hidden_size
        weight = self.about.weight[k * width : (k + 1) * width]
        return F.linear(conditioning[..., k * width : (k + 1) * width], weight)

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        width, first = self.words.hidden_size, self.first
        for k in range(self.depth):
            loss_mask = batch.loss_mask(k + 2)
            x, conditioning = (batch.taps[tap][loss_mask].to(first.weight.dtype) for tap in self.taps)
            rows = slice(k * width, (k + 1) * width)
            projected = F.linear(x, first.weight[rows], None if first.bias is None else first.bias[rows])
            state = residual(self.more[k], x + F.silu(projected + self._condition(k, conditioning)))
            yield Guess(self.words.logits(state), k + 2, self.fade**k, self.words.vocabulary)

    def native_heads(self) -> NativeHeads | None:
        return heads_in_kernels(self, self.about)

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        width = self.words.hidden_size
        rows, x = len(state), state[:, :width]
        conditioning = state[:, width : (1 + self.depth) * width].view(rows, self.depth, width)
        # one product gives every head at every position; each head uses the one at its own
        products = self.about(conditioning).view(rows, self.depth, self.depth, width)
        own = products.diagonal(dim1=1, dim2=2).transpose(1, 2)  # [B, K, D]
        states = x[:, None] + F.silu(self.first(x).view(rows, self.depth, width) + own)
        if self.config["layers"] > 1:
            states = torch.stack([residual(self.more[k], head) for k, head in enumerate(states.unbind(1))], 1)
        return states
