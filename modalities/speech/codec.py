"""Speech tokens: log-mel frames to one code for every two frames (43 a second) and back, by convolutions around finite
scalar quantisation (arXiv 2309.15505), which has no codebook to collapse. Knows nothing of sound or of training loops.
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

FRAMES = 2  # mel frames a token
_FAINT, _RANGE, _COUNTS = -9.0, 6.0, (0.15, 1.5)  # log-mel: where nothing is heard, from there to where all counts


class Quantiser:
    """Each of a few numbers is rounded to one of its `levels`; a code counts the combinations, the first fastest."""

    def __init__(self, levels: Sequence[int]) -> None:
        if not levels or min(levels) < 2:
            raise InvalidOption(f"levels are {list(levels)}; each must be 2 or more")
        self.levels = tuple(levels)
        self.size = math.prod(levels)
        self._steps = [math.prod(levels[:place]) for place in range(len(levels))]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> rounded, in -1..1; gradients pass as if it hadn't been."""
        top = torch.tensor(self.levels, device=x.device, dtype=x.dtype) - 1
        held = (x.tanh() + 1) / 2 * top
        return (held + (held.round() - held).detach()) / top * 2 - 1

    def codes(self, rounded: Tensor) -> Tensor:
        """[..., D] -> [...] ids."""
        top = torch.tensor(self.levels, device=rounded.device, dtype=rounded.dtype) - 1
        steps = torch.tensor(self._steps, device=rounded.device)
        return (((rounded + 1) / 2 * top).round().long() * steps).sum(-1)

    def points(self, codes: Tensor) -> Tensor:
        """[...] ids -> [..., D]"""
        levels = torch.tensor(self.levels, device=codes.device)
        steps = torch.tensor(self._steps, device=codes.device)
        return (codes[..., None] // steps % levels) / (levels - 1) * 2 - 1


class Codec(DraftHead):
    """Mel frames [B, 80, T] (T even) <-> codes [B, T / 2]. It is nobody's draft head: `target` is not looked at."""

    mean: Tensor
    scale: Tensor

    def __init__(
        self, target: Any = None, *, width: int = 160, levels: Sequence[int] = (8, 5, 5, 5), depth: int = 4
    ) -> None:
        super().__init__()
        self.config = {"width": width, "levels": list(levels), "depth": depth}
        self.quantiser = Quantiser(levels)
        self.register_buffer("mean", torch.full((BINS, 1), -5.0))  # of log-mel frames; set from the data
        self.register_buffer("scale", torch.full((BINS, 1), 2.0))
        dilations = [3 ** (place % 3) for place in range(depth)]
        heard = sum(dilations)
        self.context = 1 + heard + -(-(heard + 1) // FRAMES)  # tokens on either side that a frame hears
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

    def _rounded(self, mel: Tensor) -> Tensor:
        if mel.shape[-1] % FRAMES:
            raise InvalidOption(f"{mel.shape[-1]} mel frames; a token holds {FRAMES}, so give a multiple of that")
        return self.quantiser(self.encoder(rows((mel - self.mean) / self.scale))[:, :, 0].transpose(1, 2))

    def _unrolled(self, points: Tensor) -> Tensor:
        mel: Tensor = self.decoder(rows(points.transpose(1, 2)))[:, :, 0] * self.scale + self.mean
        return mel

    @property
    def codes(self) -> int:
        """How many codes there are."""
        return self.quantiser.size

    def encode(self, mel: Tensor) -> Tensor:
        return self.quantiser.codes(self._rounded(mel))

    def decode(self, codes: Tensor) -> Tensor:
        return self._unrolled(self.quantiser.points(codes).to(self.mean.dtype))

    def back(self, mel: Tensor) -> Tensor:
        """The frames as their codes bring them back, with gradients."""
        return self._unrolled(self._rounded(mel))

    def distance(self, mel: Tensor, back: Tensor | None = None) -> Tensor:
        """Mean distance of frames, and of their changes in time, in spreads of their bin; what is hardly heard counts
        less."""
        off = ((self.back(mel) if back is None else back) - mel) / self.scale
        weight = ((mel - _FAINT) / _RANGE).clamp(*_COUNTS)
        return (weight * off.abs()).mean() + (weight[..., 1:] * off.diff(dim=-1).abs()).mean() / 2
