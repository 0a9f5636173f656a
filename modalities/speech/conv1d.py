"""One-dimensional convolutions, computed as 2D convolutions of height 1 in channels-last layout, which is several times
as fast on CPUs in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def conv(ins: int, outs: int, size: int, dilation: int = 1) -> nn.Conv2d:
    """A convolution that preserves the length."""
    return nn.Conv2d(ins, outs, (1, size), dilation=dilation, padding=(0, dilation * (size // 2)))


def rows(x: Tensor) -> Tensor:
    """[B, C, T] -> [B, C, 1, T] in channels-last layout."""
    return x[:, :, None].contiguous(memory_format=torch.channels_last)


class Residual(nn.Module):
    """A residual block of a dilated and a pointwise convolution."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.wide = conv(width, width, 3, dilation)
        self.out = conv(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.permute(0, 2, 3, 1)  # normalised per position, so that the context stays finite
        normed = nn.functional.layer_norm(frames, frames.shape[-1:]).permute(0, 3, 1, 2)
        change: Tensor = self.out(nn.functional.gelu(self.wide(normed)))
        return x + change
