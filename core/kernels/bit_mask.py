"""Masks of a bit an id, such as a grammar's: bit i of word w is id 32 w + i."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from outrider.core.kernels import native


def masked(logits: Tensor, bits: Tensor) -> Tensor:
    """Logits [..., V] with -inf where bits [..., ceil(V / 32)], on the same device, are 0. A row without any other
    finite logit stays as it is."""
    if native.streams(logits.dtype, logits.device):
        return native.masked(logits, bits)
    if bits.device.type == "cpu" and sys.byteorder == "little":  # the same in a tenth of the time
        single = torch.from_numpy(np.unpackbits(bits.contiguous().numpy().view(np.uint8), axis=-1, bitorder="little"))
    else:
        single = ((bits[..., None] >> torch.arange(32, device=bits.device)) & 1).flatten(-2)
    cap = (single[..., : logits.shape[-1]].to(logits.dtype) - 0.5) * torch.inf  # of either sign, without branches
    restricted = torch.minimum(logits, cap)
    left = restricted.amax(-1, keepdim=True) > -torch.inf
    if left.device.type == "cpu" and bool(left.all()):
        return restricted
    return torch.where(left, restricted, logits)
