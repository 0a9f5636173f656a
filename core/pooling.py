"""The mass of a code's neighbours in a law. For a few laws on a CPU it is worked out by code of ours, eight side by
side: to torch it means reading, summing up and comparing as many numbers as there are neighbours of all codes."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from outrider.core.engine import native

_TOGETHER = 8  # laws
_MOST = 64  # of them, beyond which torch is given all


def pooled(p: Tensor, near: Tensor, bound: Tensor) -> Tensor:
    """[B, V] the mass of the most neighbours [V, k], nearest first, that together stay within the bound [B, V]."""
    here = p.device.type == "cpu" and p.dtype == torch.float32 and len(p) <= _MOST
    code = _library() if here else None
    if code is None:
        total = p[:, near].cumsum(-1)  # [B, V, k]
        return torch.where(total <= bound[..., None], total, 0).amax(-1)
    ids = near.to(torch.int32).contiguous()
    parts = zip(torch.split(p, _TOGETHER), torch.split(bound, _TOGETHER), strict=True)
    return torch.cat([_eight(code, some, ids, its) for some, its in parts])


def _eight(code: ctypes.CDLL, p: Tensor, near: Tensor, bound: Tensor) -> Tensor:
    beside = (0, _TOGETHER - len(p))
    ours, its = (torch.nn.functional.pad(one.T, beside).contiguous() for one in (p, bound))
    found = torch.empty_like(ours)
    code.outrider_pooled(*(one.data_ptr() for one in (ours, its, near, found)), *near.shape)
    return found[:, : len(p)].T.contiguous()


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = native.opened("pooling")
    if found is not None:
        found.outrider_pooled.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2]
        found.outrider_pooled.restype = None
    return found
