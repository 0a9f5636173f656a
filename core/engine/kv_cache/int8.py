"""Keys and values in 8 bits: those of one head and token are rounded together, their scale before them.

A scale for each head and token keeps what was written where it is: tokens come and go without anything being rounded
twice, and what a token's entries are depends on nothing but the token. (KIVI, arXiv 2402.02750, shares the scales of
keys among tokens, which saves more at 2 bits and needs the newest tokens apart.) Whoever reads, reads what was rounded,
so that drafting over such a cache gives what plain decoding over it gives. Knows slots, nothing of attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 4  # bytes: 32 bits


def slot(dim: int) -> int:
    """Bytes of `dim` numbers with their scale, in fours."""
    return SCALE + -(-dim // 4) * 4


def pack(x: Tensor) -> Tensor:
    """Numbers [..., d] -> slots [..., slot(d)] int8."""
    wide = x if x.dtype.itemsize > 2 else x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).float().clamp(min=1e-30)
    ints = (wide / scale).round_().clamp_(-127, 127).to(torch.int8)
    spare = slot(x.shape[-1]) - SCALE - x.shape[-1]
    parts = [scale.view(torch.int8), ints]
    return torch.cat([*parts, ints.new_zeros(*ints.shape[:-1], spare)] if spare else parts, -1)


def unpack(slots: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Slots [..., slot(d)] -> numbers [..., d]."""
    scale = slots[..., :SCALE].view(torch.float32)
    found = torch.empty(*slots.shape[:-1], dim, dtype=dtype, device=slots.device)
    return torch.mul(slots[..., SCALE : SCALE + dim], scale, out=found)
