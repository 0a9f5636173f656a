"""Convolutions along time, done as those of pictures one pixel high whose channels lie side by side: how processors
like them, several times as fast in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def conv(ins: int, outs: int, size: int, dilation: int = 1) -> nn.Conv2d:
    """One that keeps the length."""
    return nn.Conv2d(ins, outs, (1, size), dilation=dilation, padding=(0, dilation * (size // 2)))


def rows(x: Tensor) -> Tensor:
    """[B, C, T] as [B, C, 1, T], channels side by side."""
    return x[:, :, None].contiguous(memory_format=torch.channels_last)
