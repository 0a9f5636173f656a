"""A transformer block that learns on a CPU: the products are torch's, in 16 bits, and all that lies between them is
machine code of our own (learning.cpp), forward and backward.

With operations one by one, a training step of a small model spends most of its time on reading and writing numbers
between its products. Where the code can't be had, blocks learn through torch as before, to the same losses within what
16 bits round. Knows a block's weights and who may look at whom; nothing of drafts or losses.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from outrider.core.kernels import native

Shape = tuple[int, int, int, float, float]  # heads, heads of keys and values, head size, eps of both norms


class _Heads(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64),
        *((name, c_int32) for name in ("count", "heads", "kv", "dim", "threads")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("norm", "cosine", "sine")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The code, ready to be called; None where it can't be had."""
    found = native.opened("learning")
    if found is None:
        return None
    at, rows, some = c_void_p, c_int64, c_int32
    arguments = {
        "norm": [*[at] * 6, rows, some, c_float, some],
        "norm_back": [*[at] * 7, rows, some, some],
        "heads": [at] * 6,
        "heads_back": [at] * 8,
        "causal": [at, rows, some, c_float, some],
        "causal_back": [at, at, rows, some, c_float, some],
        "opened": [at, at, rows, some, some],
        "opened_back": [*[at] * 4, rows, some, some],
    }
    for name, types in arguments.items():
        function = getattr(found, f"outrider_{name}")
        function.argtypes, function.restype = types, None
    return found


def usable(x: Tensor, hidden: int, head_dim: int) -> bool:
    """Is this a training step in 16-bit autocast on a CPU, in sizes that the kernels take?"""
    if not (torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype == torch.float32):
        return False
    if not (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16):
        return False
    return x.shape[2] % 16 == 0 and hidden % 16 == 0 and head_dim % 32 == 0 and library() is not None


def apply(x: Tensor, cos: Tensor, sin: Tensor, shape: Shape, weights: Sequence[Tensor | None]) -> Tensor:
    """A causal block on x [B, T, D] in 32 bits. `cos` and `sin` [T, d]; `weights`: attention norm, qkv, qk norm (or
    None), out, MLP norm, up and gate, down."""
    half = cos.shape[1] // 2
    angles = torch.stack([cos[:, :half], sin[:, half:]]).float()  # the first half of the sines is negated
    result: Tensor = _TrainingBlock.apply(x.contiguous(), angles, shape, *weights)  # type: ignore[no-untyped-call]
    return result


class _TrainingBlock(torch.autograd.Function):
    """Of x, the angles and the shape no more is asked than x's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, shape: Shape, *given: Any) -> Tensor:
        norm1, qkv, qk_norm, out, norm2, up_gate, down = given
        heads, kv, dim, eps1, eps2 = shape
        rows, count, width = x.shape
        tokens, hidden = rows * count, down.shape[1]
        narrow = [one.detach().bfloat16() for one in (qkv, out, up_gate, down)]
        code, threads = library(), torch.get_num_threads()
        assert code is not None
        with torch.autocast("cpu", enabled=False):
            y1, r1 = _narrow(tokens, width), torch.empty(tokens)
            code.outrider_norm(_at(x), None, _at(norm1), None, _at(y1), _at(r1), tokens, width, eps1, threads)
            every = y1 @ narrow[0].T
            q, k, v = _narrow(rows, heads, count, dim), _narrow(rows, kv, count, dim), _narrow(rows, kv, count, dim)
            r = torch.empty(tokens, heads + kv)
            form = _form(rows, count, shape, qk_norm, angles, threads)
            code.outrider_heads(ctypes.addressof(form), _at(every), _at(q), _at(k), _at(v), _at(r))
            q3, k3, v3 = q.view(rows * kv, -1, dim), k.view(rows * kv, count, dim), v.view(rows * kv, count, dim)
            shares = q3 @ k3.transpose(1, 2)
            code.outrider_causal(_at(shares), rows * heads * count, count, dim**-0.5, threads)
            found = (shares @ v3).view(rows, heads, count, dim).transpose(1, 2).reshape(tokens, heads * dim)
            told = found @ narrow[1].T
            x1, y2, r2 = torch.empty_like(x), _narrow(tokens, width), torch.empty(tokens)
            ends = _at(norm2), _at(x1), _at(y2), _at(r2), tokens, width, eps2, threads
            code.outrider_norm(_at(x), _at(told), *ends)
            both = y2 @ narrow[2].T
            middle = _narrow(tokens, hidden)
            code.outrider_opened(_at(both), _at(middle), tokens, hidden, threads)
            thought = middle @ narrow[3].T
            x2 = torch.empty_like(x)
            code.outrider_norm(_at(x1), _at(thought), None, _at(x2), None, None, tokens, width, eps2, threads)
        ctx.shape = shape
        ctx.save_for_backward(
            *(x, angles, norm1, qk_norm, norm2, *narrow),
            *(y1, r1, every, q, k, v, r, shares, found, x1, y2, r2, both),
        )
        return x2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, angles, norm1, qk_norm, norm2, qkv, out, up_gate, down, *kept = ctx.saved_tensors
        y1, r1, every, q, k, v, r, shares, found, x1, y2, r2, both = kept
        heads, kv, dim, _, _ = ctx.shape
        rows, count, width = x.shape
        tokens, hidden = rows * count, down.shape[1]
        code, threads = library(), torch.get_num_threads()
        assert code is not None
        with torch.autocast("cpu", enabled=False):
            g = grads[0].float().contiguous()
            g16 = g.bfloat16().view(tokens, width)
            middle, opened = _narrow(tokens, hidden), torch.empty_like(both)
            asked = g16 @ down
            code.outrider_opened_back(_at(asked), _at(both), _at(opened), _at(middle), tokens, hidden, threads)
            g_down, g_up_gate = g16.T @ middle, opened.T @ y2
            g1, sums2 = torch.empty_like(x), torch.empty(threads, width)
            back = opened @ up_gate
            ends = tokens, width, threads
            code.outrider_norm_back(_at(back), _at(x1), _at(norm2), _at(r2), _at(g), _at(g1), _at(sums2), *ends)
            g16 = g1.bfloat16().view(tokens, width)
            g_out = g16.T @ found
            heard = (g16 @ out).view(rows, count, heads, dim).transpose(1, 2).reshape(rows * kv, -1, dim)
            q3, k3, v3 = q.view(rows * kv, -1, dim), k.view(rows * kv, count, dim), v.view(rows * kv, count, dim)
            g_v = shares.transpose(1, 2) @ heard
            g_scores = heard @ v3.transpose(1, 2)
            code.outrider_causal_back(_at(shares), _at(g_scores), rows * heads * count, count, dim**-0.5, threads)
            g_q, g_k = g_scores @ k3, g_scores.transpose(1, 2) @ q3
            turned = torch.empty_like(every)
            sums = None if qk_norm is None else torch.empty(threads, heads + kv, dim)
            form = _form(rows, count, ctx.shape, qk_norm, angles, threads)
            parts = _at(g_q), _at(g_k), _at(g_v), _at(turned), _at(sums)
            code.outrider_heads_back(ctypes.addressof(form), _at(every), _at(r), *parts)
            g_qkv = turned.T @ y1
            g0, sums1 = torch.empty_like(x), torch.empty(threads, width)
            back = turned @ qkv
            code.outrider_norm_back(_at(back), _at(x), _at(norm1), _at(r1), _at(g1), _at(g0), _at(sums1), *ends)
        weights = (
            *(sums1.sum(0), g_qkv.float(), None if sums is None else sums.sum(0), g_out.float()),
            *(sums2.sum(0), g_up_gate.float(), g_down.float()),
        )
        return g0, None, None, *weights


def _narrow(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def _form(rows: int, count: int, shape: Shape, norm: Tensor | None, angles: Tensor, threads: int) -> _Heads:
    heads, kv, dim, eps, _ = shape
    return _Heads(rows, count, heads, kv, dim, threads, eps, _at(norm), _at(angles[0]), _at(angles[1]))


def _at(part: Tensor | None) -> int | None:
    return None if part is None else part.data_ptr()
