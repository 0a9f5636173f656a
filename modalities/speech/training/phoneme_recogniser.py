"""A listener, which hears what phoneme is being said in each frame. It is nobody's judge and is not shipped: what a
codec brings back shall be heard by it as the frames themselves are, which is closer to being understood than likeness
bin by bin. Knows frames and phonemes, nothing of codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.training.draft_head import DraftHead
from outrider.speech.conv1d import Residual, conv, rows
from outrider.speech.mel import BINS
from outrider.speech.phonemes import COUNT

_LIKE = 0.3  # how much that it hears the same counts beside what it makes of it


class PhonemeRecogniser(DraftHead):
    """Log-mel frames [B, 80, T] -> what it hears on the way, layer by layer, and phonemes. `target` is not looked
    at."""

    mean: Tensor
    scale: Tensor

    def __init__(self, target: Any = None, *, width: int = 160, depth: int = 5, drop: float = 0.1) -> None:
        super().__init__()
        self.config = {"width": width, "depth": depth, "drop": drop}
        self.register_buffer("mean", torch.full((BINS, 1), -5.0))
        self.register_buffer("scale", torch.full((BINS, 1), 2.0))
        self.begin = conv(BINS, width, 5)
        self.blocks = nn.ModuleList(Residual(width, 3 ** (place % 3)) for place in range(depth))
        self.end = conv(width, COUNT, 1)
        self.drop = drop

    def hears(self, mel: Tensor) -> tuple[list[Tensor], Tensor]:
        """Of each layer [B, C, 1, T], and logits [B, COUNT, T]."""
        x = self.begin(rows((mel - self.mean) / self.scale))
        heard = []
        for block in self.blocks:
            x = block(F.dropout(x, self.drop, self.training))
            heard.append(x)
        return heard, self.end(x)[:, :, 0]

    def misheard(self, back: Tensor, mel: Tensor, said: Tensor) -> Tensor:
        """How different frames that were brought back are to it from what they were: what it hears, layer by layer, in
        shares of all that could be heard; and how surprised it is by the phonemes [B, T] that are said."""
        with torch.no_grad():
            meant, _ = self.hears(mel)
        heard, told = self.hears(back)
        off = torch.stack([(a - b).abs().mean() / b.abs().mean() for a, b in zip(heard, meant, strict=True)]).mean()
        return off + _LIKE * F.cross_entropy(told.float(), said)
