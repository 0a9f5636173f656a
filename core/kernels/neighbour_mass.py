"""The probability mass of image codes together with similar codes: their neighbours, or their group.

For a few distributions on a CPU the compiled kernels (csrc/pooling.cpp) are used; torch would materialise the
probabilities of all neighbours of all codes."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.kernels import native

_TOGETHER = 8  # distributions per call of the kernel
_PAIRS = 4096  # pairs of codes that are compared at a time
_MAX_ROWS = 512  # distributions up to which the kernels are used


def pooled(p: Tensor, near: Tensor, bound: Tensor, enough: Tensor) -> Tensor:
    """[B, V] the largest mass of a prefix of the code's neighbours [V, k], nearest first, that is within the bound
    [B, V]; where that is above `enough` [B, V], another one above it may be returned, which takes fewer steps."""
    code = _code(p)
    if code is None:
        total = p[:, near].cumsum(-1)  # [B, V, k]
        return torch.where(total <= bound[..., None], total, 0).amax(-1)
    ids = near.to(torch.int32).contiguous()
    parts = zip(*(torch.split(one, _TOGETHER) for one in (p, bound, enough)), strict=True)
    return torch.cat([_eight(code, ids, *part) for part in parts])


@dataclass(frozen=True)
class Alike:
    """Codes whose vectors [V, D] are within `reach` of each other, compared pair by pair: for large codebooks."""

    vectors: Tensor
    reach: float

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        """Whether the codes [B, N] of two lists are alike, in pairs."""
        pairs = zip(torch.split(first, _PAIRS, 1), torch.split(second, _PAIRS, 1), strict=True)
        near = [(self.vectors[a] - self.vectors[b]).square().sum(-1) < self.reach**2 for a, b in pairs]
        return torch.cat(near, 1)


def grouped(p: Tensor, q: Tensor, alike: Tensor | Alike, span: int, gap: float) -> tuple[Tensor, Tensor]:
    """The mass in p and in q of each code's group, both [B, V]: the code itself, and of the `span` codes ranked next
    above and below it in p those with a probability within `gap` of its own that are `alike`: a table [V, V], or
    compared pair by pair."""
    size, code = p.shape[1], _code(p)
    span = min(span, size - 1)
    if code is not None and q.dtype == p.dtype and isinstance(alike, Tensor):
        given, found = (
            [one.contiguous() for one in (p, q, alike)],
            [torch.empty_like(one).contiguous() for one in (p, q)],
        )
        code.outrider_grouped(
            *(one.data_ptr() for one in (*given, *found)), len(p), size, span, gap, torch.get_num_threads()
        )
        return found[0], found[1]
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    drawn, line = q.gather(1, order), order * size
    mass, guessed = ranked.clone(), drawn.clone()
    for step in range(1, span + 1):  # the code so many ranks below, and the one above
        close = (ranked[:, :-step] - ranked[:, step:]) < gap
        if isinstance(alike, Tensor):
            close &= alike.flatten()[line[:, :-step] + order[:, step:]]
        else:
            close &= alike(order[:, :-step], order[:, step:])
        mass[:, :-step] += ranked[:, step:] * close
        mass[:, step:] += ranked[:, :-step] * close
        guessed[:, :-step] += drawn[:, step:] * close
        guessed[:, step:] += drawn[:, :-step] * close
    return torch.empty_like(p).scatter_(1, order, mass), torch.empty_like(q).scatter_(1, order, guessed)


def _code(p: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels, if they apply to these distributions."""
    return _library() if p.device.type == "cpu" and p.dtype == torch.float32 and len(p) <= _MAX_ROWS else None


def _eight(code: ctypes.CDLL, near: Tensor, p: Tensor, bound: Tensor, enough: Tensor) -> Tensor:
    beside = (0, _TOGETHER - len(p))
    filled = (p, 0.0), (bound, -1.0), (enough, -1.0)  # rows without a distribution end at once
    given = [torch.nn.functional.pad(one.T, beside, value=value).contiguous() for one, value in filled]
    found = torch.empty_like(given[0])
    code.outrider_pooled(*(one.data_ptr() for one in (*given, near, found)), *near.shape)
    return found[:, : len(p)].T.contiguous()


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = native.opened("pooling")
    if found is not None:
        found.outrider_pooled.argtypes = [*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 2]
        found.outrider_grouped.argtypes = [
            *[ctypes.c_void_p] * 5,
            *[ctypes.c_int64] * 3,
            ctypes.c_float,
            ctypes.c_int32,
        ]
        found.outrider_pooled.restype = found.outrider_grouped.restype = None
    return found
