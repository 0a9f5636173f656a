"""The speech codec: log-mel frames <-> one code for every two frames (43 per second).

Convolutions around Finite Scalar Quantization (arXiv 2309.15505), whose codebook is fixed and so cannot collapse.
Independent of sound and of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import DraftHead
from outrider.speech.conv1d import Residual, conv, rows
from outrider.speech.mel import BINS

FRAMES = 2  # mel frames per token
# The loss weights loud bins more: (log-mel - _FAINT) / _RANGE, clamped to _WEIGHTS.
_FAINT, _RANGE, _WEIGHTS = -9.0, 6.0, (0.15, 1.5)


class Quantiser:
    """Rounds each coordinate to one of its `levels`; a code is the index of the combination, first coordinate
    fastest."""

    def __init__(self, levels: Sequence[int]) -> None:
        if not levels or min(levels) < 2:
            raise InvalidOption(f"levels are {list(levels)}; each must be 2 or more")
        self.levels = tuple(levels)
        self.size = math.prod(levels)
        self._steps = [math.prod(levels[:index]) for index in range(len(levels))]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> levels in [-1, 1], with straight-through gradients."""
        top = torch.tensor(self.levels, device=x.device, dtype=x.dtype) - 1
        scaled = (x.tanh() + 1) / 2 * top
        return (scaled + (scaled.round() - scaled).detach()) / top * 2 - 1

    def codes(self, rounded: Tensor) -> Tensor:
        """Levels [..., D] -> codes [...]."""
        top = torch.tensor(self.levels, device=rounded.device, dtype=rounded.dtype) - 1
        steps = torch.tensor(self._steps, device=rounded.device)
        return (((rounded + 1) / 2 * top).round().long() * steps).sum(-1)

    def points(self, codes: Tensor) -> Tensor:
        """Codes [...] -> levels [..., D] in [-1, 1]."""
        levels = torch.tensor(self.levels, device=codes.device)
        steps = torch.tensor(self._steps, device=codes.device)
        return (codes[..., None] // steps % levels) / (levels - 1) * 2 - 1


class Codec(DraftHead):
    """Mel frames [B, 80, T] (T even) <-> codes [B, T / 2]. A DraftHead for its weight files only: `target` is
    unused."""

    mean: Tensor
    scale: Tensor

    def __init__(
        self, target: Any = None, *, width: int = 160, levels: Sequence[int] = (8, 5, 5, 5), depth: int = 4
    ) -> None:
        super().__init__()
        self.config = {"width": width, "levels": list(levels), "depth": depth}
        self.quantiser = Quantiser(levels)
        self.register_buffer("mean", torch.full((BINS, 1), -5.0))  # of log-mel frames; set from the training data
        self.register_buffer("scale", torch.full((BINS, 1), 2.0))
        dilations = [3 ** (index % 3) for index in range(depth)]
        reach = sum(dilations)
        self.context = 1 + reach + -(-(reach + 1) // FRAMES)  # tokens on either side that a decoded frame depends on
        half = depth // 2
        self.encoder = nn.Sequential(
            conv(BINS, width, 3),
            *(Residual(width, step) for step in dilations[:half]),
            nn.Conv2d(width, width, (1, FRAMES), (1, FRAMES)),
            *(Residual(width, step) for step in dilations[half:]),
            conv(width, len(self.quantiser.levels), 1),
        )
        self.decoder = nn.Sequential(
            conv(len(self.quantiser.levels), width, 3),
            *(Residual(width, step) for step in dilations),
            nn.ConvTranspose2d(width, width, (1, FRAMES), (1, FRAMES)),
            *(Residual(width, step) for step in dilations),
            conv(width, BINS, 1),
        )

    def _quantise(self, mel: Tensor) -> Tensor:
        if mel.shape[-1] % FRAMES:
            raise InvalidOption(
                f"there are {mel.shape[-1]} mel frames; give a multiple of {FRAMES}, the frames per token"
            )
        return self.quantiser(self.encoder(rows((mel - self.mean) / self.scale))[:, :, 0].transpose(1, 2))

    def _decode_points(self, points: Tensor) -> Tensor:
        mel: Tensor = self.decoder(rows(points.transpose(1, 2)))[:, :, 0] * self.scale + self.mean
        return mel

    @property
    def codes(self) -> int:
        """The number of codes."""
        return self.quantiser.size

    def encode(self, mel: Tensor) -> Tensor:
        return self.quantiser.codes(self._quantise(mel))

    def decode(self, codes: Tensor) -> Tensor:
        return self._decode_points(self.quantiser.points(codes).to(self.mean.dtype))

    def reconstruct(self, mel: Tensor) -> Tensor:
        """Encode and decode frames, with gradients."""
        return self._decode_points(self._quantise(mel))

    def distance(self, mel: Tensor, decoded: Tensor | None = None) -> Tensor:
        """The weighted L1 distance of decoded frames, plus half that of their differences in time, in standard
        deviations of each bin. `decoded` defaults to the reconstruction."""
        error = ((self.reconstruct(mel) if decoded is None else decoded) - mel) / self.scale
        weight = ((mel - _FAINT) / _RANGE).clamp(*_WEIGHTS)
        return (weight * error.abs()).mean() + (weight[..., 1:] * error.diff(dim=-1).abs()).mean() / 2
