"""Argmax and top-k along the last axis, such as a vocabulary's logits.

On a CPU torch's own take several times as long as reading the values. A few in 32 bits are found by the compiled
kernels, others by numpy where that is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.kernels import native

_MIN_SIZE = 1024  # axis length from which this is faster than torch
_MAX_COUNT = 64  # for the compiled kernel


def argmax(values: Tensor) -> Tensor:
    """The first index of the largest value along the last axis."""
    if _code(values, 1):
        rows = values if values.dim() == 3 else values.reshape(1, -1, values.shape[-1])
        return native.largest(rows, 1)[1].view(values.shape[:-1])
    if _host(values):
        return torch.from_numpy(values.detach().numpy().argmax(-1))
    return values.argmax(-1)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values along the last axis, largest first, and their indices."""
    size = values.shape[-1]
    if _code(values, count):
        rows = values.detach()
        rows = rows if rows.dim() == 3 else rows.reshape(1, -1, size)
        best, place = native.largest(rows, count)
        return best.view(*values.shape[:-1], count), place.view(*values.shape[:-1], count)
    if not _host(values) or size < _MIN_SIZE or count > size // 4:
        return values.topk(count)
    if count <= 8:
        left, found = values.clone(), []
        for _ in range(count):
            found.append(argmax(left)[..., None])
            left.scatter_(-1, found[-1], -torch.inf)
        place = torch.cat(found, -1)
    else:
        unordered = values.detach().numpy().argpartition(size - count, axis=-1)[..., size - count :]
        place = torch.from_numpy(unordered)
        place = place.gather(-1, values.gather(-1, place).argsort(dim=-1, descending=True, stable=True))
    return values.gather(-1, place), place


def _host(values: Tensor) -> bool:
    """Whether numpy can read the values."""
    return values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)


def _code(values: Tensor, count: int) -> bool:
    """Whether the compiled kernel applies."""
    small = values.shape[-1] < _MIN_SIZE or not 0 < count <= _MAX_COUNT
    if small or values.dtype != torch.float32 or values.stride(-1) != 1:
        return False
    return values.device.type == "cpu" and not values.requires_grad and native.library() is not None
