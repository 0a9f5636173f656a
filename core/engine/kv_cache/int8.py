"""Keys and values in 8 bits: a slot holds the scale and the int8 values of one head and token.

With one scale per head and token, entries never depend on other tokens and are never rounded twice. (KIVI, arXiv
2402.02750, shares the scales of keys between tokens, which pays at 2 bits but keeps the newest tokens unquantized.)
Every pass, also the one that writes an entry, reads the rounded values, so drafting over this cache gives the tokens of
plain decoding over it. Independent of attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 4  # bytes of the scale, a 32-bit float


def slot_size(dim: int) -> int:
    """Bytes of a scale and `dim` values, rounded up to a multiple of 4."""
    return SCALE + -(-dim // 4) * 4


def pack(x: Tensor) -> Tensor:
    """Values [..., d] -> slots [..., slot_size(d)] int8."""
    wide = x if x.dtype.itemsize > 2 else x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).float().clamp(min=1e-30)
    ints = (wide / scale).round_().clamp_(-127, 127).to(torch.int8)
    padding = slot_size(x.shape[-1]) - SCALE - x.shape[-1]
    parts = [scale.view(torch.int8), ints]
    return torch.cat([*parts, ints.new_zeros(*ints.shape[:-1], padding)] if padding else parts, -1)


def unpack(slots: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Slots [..., slot_size(d)] -> values [..., d]."""
    scale = slots[..., :SCALE].view(torch.float32)
    values = torch.empty(*slots.shape[:-1], dim, dtype=dtype, device=slots.device)
    return torch.mul(slots[..., SCALE : SCALE + dim], scale, out=values)
