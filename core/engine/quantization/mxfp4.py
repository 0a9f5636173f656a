"""Weights in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss is published: blocks of 32 numbers of four bits share one
power of two. They are dequantised when they are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponents


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [..., G, 16], each with two numbers, the first in its low half, and exponents [..., G] -> [..., 32 G]."""
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=dtype, device=blocks.device)
    numbers = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1).flatten(-2)  # [..., G, 32]
    return torch.ldexp(numbers, scales.int()[..., None] - _BIAS).to(dtype).flatten(-2)
