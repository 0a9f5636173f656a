"""A recogniser of the phoneme of each mel frame, which provides a perceptual loss for the codec's decoder.

Matching its activations makes reconstructions more intelligible than matching frames bin by bin. It is used in training
only, and is not shipped. Independent of codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.training.draft_head import DraftHead
from outrider.speech.conv1d import Residual, conv, rows
from outrider.speech.mel import BINS
from outrider.speech.phonemes import COUNT

_PHONEME_WEIGHT = 0.3  # of the cross-entropy, relative to the distance of activations


class PhonemeRecogniser(DraftHead):
    """Log-mel frames [B, 80, T] -> the activations of each layer, and phoneme logits. `target` is unused."""

    mean: Tensor
    scale: Tensor

    def __init__(self, target: Any = None, *, width: int = 160, depth: int = 5, drop: float = 0.1) -> None:
        super().__init__()
        self.config = {"width": width, "depth": depth, "drop": drop}
        self.register_buffer("mean", torch.full((BINS, 1), -5.0))
        self.register_buffer("scale", torch.full((BINS, 1), 2.0))
        self.begin = conv(BINS, width, 5)
        self.blocks = nn.ModuleList(Residual(width, 3 ** (index % 3)) for index in range(depth))
        self.end = conv(width, COUNT, 1)
        self.drop = drop

    def recognise(self, mel: Tensor) -> tuple[list[Tensor], Tensor]:
        """The activations [B, C, 1, T] of each layer, and logits [B, COUNT, T]."""
        x = self.begin(rows((mel - self.mean) / self.scale))
        activations = []
        for block in self.blocks:
            x = block(F.dropout(x, self.drop, self.training))
            activations.append(x)
        return activations, self.end(x)[:, :, 0]

    def perceptual_loss(self, decoded: Tensor, mel: Tensor, phonemes: Tensor) -> Tensor:
        """The relative L1 distance of activations on decoded and on original frames, averaged over layers, plus the
        cross-entropy of the phonemes [B, T] on decoded frames."""
        with torch.no_grad():
            original, _ = self.recognise(mel)
        activations, logits = self.recognise(decoded)
        pairs = zip(activations, original, strict=True)
        distance = torch.stack([(a - b).abs().mean() / b.abs().mean() for a, b in pairs]).mean()
        return distance + _PHONEME_WEIGHT * F.cross_entropy(logits.float(), phonemes)
