"""Heads that know what is to be said: Medusa's, each of which is also told what the token it guesses will be about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.drafters.trained.heads import MedusaHeads, PrefixCache, residual
from outrider.core.engine.trainable.block import AttentionMask, Matrix
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, Guess
from outrider.speech.voice import AHEAD


class ConditionedHeads(MedusaHeads):
    """Medusa heads (arXiv 2401.10774) for speech, in the manner of VADUSA (arXiv 2410.21951): head k says
    x + SiLU(W_k x + V_k t) about the token k places behind the next one, t being what the voice is told at that place.
    VADUSA's heads see only the state. Ours can, because text stands on the axis of time here; otherwise they are
    those of outrider.core.drafters.trained.heads."""

    taps: Any = ("last", "ahead")
    needs = frozenset({"last", "ahead"})

    def __init__(
        self, target: Any, *, heads: int = 4, layers: int = 1, vocabulary: PrefixCache = 0, fade: float = 0.8
    ) -> None:
        if heads > AHEAD:
            raise InvalidOption(f"heads is {heads}; the voice is told {AHEAD} tokens ahead, so at most that many")
        super().__init__(target, heads=heads, layers=layers, vocabulary=vocabulary, fade=fade)
        self.config = {name: value for name, value in self.config.items() if name != "own"}
        self.about = Matrix(self.words.width, heads * self.words.width, zero=True)  # of all heads

    def _about(self, k: int, told: Tensor) -> Tensor:
        """What head k makes of what is told at its place: of all AHEAD places [..., AHEAD D] -> [..., D]."""
        width = self.words.width
        weight = self.about.weight[k * width : (k + 1) * width]
        return F.linear(told[..., k * width : (k + 1) * width], weight)

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        width, first = self.words.width, self.first
        for k in range(self.depth):
            loss_mask = batch.loss_mask(k + 2)
            x, told = (batch.taps[tap][loss_mask].to(first.weight.dtype) for tap in self.taps)
            rows = slice(k * width, (k + 1) * width)
            seen = F.linear(x, first.weight[rows], None if first.bias is None else first.bias[rows])
            said = residual(self.more[k], x + F.silu(seen + self._about(k, told)))
            yield Guess(self.words.logits(said), k + 2, self.fade**k, self.words.vocabulary)

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        width = self.words.width
        x, told = state[:, :width], state[:, width : (1 + self.depth) * width].view(len(state), self.depth, width)
        # each head reads its own place alone: the products of all are made in one, and its own is taken
        every = self.about(told).view(len(state), self.depth, self.depth, width)
        about = every.diagonal(dim1=1, dim2=2).transpose(1, 2)  # [B, K, D]
        said = x[:, None] + F.silu(self.first(x).view(len(state), self.depth, width) + about)
        if self.config["layers"] > 1:
            said = torch.stack([residual(self.more[k], one) for k, one in enumerate(said.unbind(1))], 1)
        return said
