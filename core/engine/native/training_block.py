"""Training a transformer block on a CPU, forward and backward: torch computes the matrix products in 16 bits, and the
compiled kernels (core/kernels/csrc/learning.cpp) all operations between them.

Run as single operations, a training step of a small model spends most of its time on memory traffic between products.
Without the kernels, blocks train through torch, to the same losses up to 16-bit rounding. Independent of drafts and
losses.
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

Shape = tuple[int, int, int, float, float]  # heads, key/value heads, head size, eps of the attention and the MLP norm


class _Heads(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64),
        *((name, c_int32) for name in ("count", "heads", "kv", "dim", "threads")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("norm", "cosine", "sine")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they are not available."""
    code = native.opened("learning")
    if code is None:
        return None
    address, rows, count = c_void_p, c_int64, c_int32
    arguments = {
        "norm": [*[address] * 6, rows, count, c_float, count],
        "norm_back": [*[address] * 7, rows, count, count],
        "heads": [address] * 6,
        "heads_back": [address] * 8,
        "causal": [address, rows, count, c_float, count],
        "causal_back": [address, address, rows, count, c_float, count],
        "opened": [address, address, rows, count, count],
        "opened_back": [*[address] * 4, rows, count, count],
    }
    for name, types in arguments.items():
        function = getattr(code, f"outrider_{name}")
        function.argtypes, function.restype = types, None
    return code


def usable(x: Tensor, intermediate_size: int, head_dim: int) -> bool:
    """Whether this is a training step in 16-bit autocast on a CPU, with sizes that the kernels support."""
    if not (torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype == torch.float32):
        return False
    if not (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16):
        return False
    return x.shape[2] % 16 == 0 and intermediate_size % 16 == 0 and head_dim % 32 == 0 and library() is not None


def apply(x: Tensor, cos: Tensor, sin: Tensor, shape: Shape, weights: Sequence[Tensor | None]) -> Tensor:
    """Apply a causal block to x [B, T, D] in 32 bits. `cos` and `sin`: [T, d]. `weights`: attention norm, qkv, qk norm
    (or None), out, MLP norm, up_gate, down."""
    half = cos.shape[1] // 2
    angles = torch.stack([cos[:, :half], sin[:, half:]]).float()  # the first half of the sines is negated
    result: Tensor = _TrainingBlock.apply(x.contiguous(), angles, shape, *weights)  # type: ignore[no-untyped-call]
    return result


class _TrainingBlock(torch.autograd.Function):
    """Gradients are computed for x and the weights, not for the angles. Names: y is a normed input, r its inverse RMS,
    g_z the gradient of z."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, shape: Shape, *weights: Any) -> Tensor:
        norm1, qkv, qk_norm, out, norm2, up_gate, down = weights
        heads, kv, dim, eps1, eps2 = shape
        rows, count, size = x.shape
        tokens, middle_size = rows * count, down.shape[1]
        qkv16, out16, up_gate16, down16 = (weight.detach().bfloat16() for weight in (qkv, out, up_gate, down))
        code, threads = library(), torch.get_num_threads()
        assert code is not None
        with torch.autocast("cpu", enabled=False):
            y1, r1 = _empty16(tokens, size), torch.empty(tokens)
            code.outrider_norm(_at(x), None, _at(norm1), None, _at(y1), _at(r1), tokens, size, eps1, threads)
            projected = y1 @ qkv16.T
            q, k, v = _empty16(rows, heads, count, dim), _empty16(rows, kv, count, dim), _empty16(rows, kv, count, dim)
            r = torch.empty(tokens, heads + kv)
            head_args = _head_args(rows, count, shape, qk_norm, angles, threads)
            code.outrider_heads(ctypes.addressof(head_args), _at(projected), _at(q), _at(k), _at(v), _at(r))
            q3, k3, v3 = q.view(rows * kv, -1, dim), k.view(rows * kv, count, dim), v.view(rows * kv, count, dim)
            weights16 = q3 @ k3.transpose(1, 2)
            code.outrider_causal(_at(weights16), rows * heads * count, count, dim**-0.5, threads)
            attended = (weights16 @ v3).view(rows, heads, count, dim).transpose(1, 2).reshape(tokens, heads * dim)
            attention_out = attended @ out16.T
            x1, y2, r2 = torch.empty_like(x), _empty16(tokens, size), torch.empty(tokens)
            code.outrider_norm(
                *(_at(x), _at(attention_out), _at(norm2), _at(x1), _at(y2), _at(r2)), tokens, size, eps2, threads
            )
            up_gate_out = y2 @ up_gate16.T
            middle = _empty16(tokens, middle_size)
            code.outrider_opened(_at(up_gate_out), _at(middle), tokens, middle_size, threads)
            mlp_out = middle @ down16.T
            x2 = torch.empty_like(x)
            code.outrider_norm(_at(x1), _at(mlp_out), None, _at(x2), None, None, tokens, size, eps2, threads)
        ctx.shape = shape
        ctx.save_for_backward(
            *(x, angles, norm1, qk_norm, norm2, qkv16, out16, up_gate16, down16),
            *(y1, r1, projected, q, k, v, r, weights16, attended, x1, y2, r2, up_gate_out),
        )
        return x2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, angles, norm1, qk_norm, norm2, qkv, out, up_gate, down, *activations = ctx.saved_tensors
        y1, r1, projected, q, k, v, r, weights16, attended, x1, y2, r2, up_gate_out = activations
        heads, kv, dim, _, _ = ctx.shape
        rows, count, size = x.shape
        tokens, middle_size = rows * count, down.shape[1]
        code, threads = library(), torch.get_num_threads()
        assert code is not None
        with torch.autocast("cpu", enabled=False):
            g = grads[0].float().contiguous()
            g16 = g.bfloat16().view(tokens, size)
            middle, g_up_gate_out = _empty16(tokens, middle_size), torch.empty_like(up_gate_out)
            g_middle = g16 @ down
            code.outrider_opened_back(
                *(_at(g_middle), _at(up_gate_out), _at(g_up_gate_out), _at(middle)), tokens, middle_size, threads
            )
            g_down, g_up_gate = g16.T @ middle, g_up_gate_out.T @ y2
            g1, sums2 = torch.empty_like(x), torch.empty(threads, size)
            g_y2 = g_up_gate_out @ up_gate
            sizes = tokens, size, threads
            code.outrider_norm_back(_at(g_y2), _at(x1), _at(norm2), _at(r2), _at(g), _at(g1), _at(sums2), *sizes)
            g16 = g1.bfloat16().view(tokens, size)
            g_out = g16.T @ attended
            g_attended = (g16 @ out).view(rows, count, heads, dim).transpose(1, 2).reshape(rows * kv, -1, dim)
            q3, k3, v3 = q.view(rows * kv, -1, dim), k.view(rows * kv, count, dim), v.view(rows * kv, count, dim)
            g_v = weights16.transpose(1, 2) @ g_attended
            g_scores = g_attended @ v3.transpose(1, 2)
            code.outrider_causal_back(_at(weights16), _at(g_scores), rows * heads * count, count, dim**-0.5, threads)
            g_q, g_k = g_scores @ k3, g_scores.transpose(1, 2) @ q3
            g_projected = torch.empty_like(projected)
            sums = None if qk_norm is None else torch.empty(threads, heads + kv, dim)
            head_args = _head_args(rows, count, ctx.shape, qk_norm, angles, threads)
            parts = _at(g_q), _at(g_k), _at(g_v), _at(g_projected), _at(sums)
            code.outrider_heads_back(ctypes.addressof(head_args), _at(projected), _at(r), *parts)
            g_qkv = g_projected.T @ y1
            g_x, sums1 = torch.empty_like(x), torch.empty(threads, size)
            g_y1 = g_projected @ qkv
            code.outrider_norm_back(_at(g_y1), _at(x), _at(norm1), _at(r1), _at(g1), _at(g_x), _at(sums1), *sizes)
        weight_grads = (
            *(sums1.sum(0), g_qkv.float(), None if sums is None else sums.sum(0), g_out.float()),
            *(sums2.sum(0), g_up_gate.float(), g_down.float()),
        )
        return g_x, None, None, *weight_grads


def _empty16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def _head_args(rows: int, count: int, shape: Shape, norm: Tensor | None, angles: Tensor, threads: int) -> _Heads:
    heads, kv, dim, eps, _ = shape
    return _Heads(rows, count, heads, kv, dim, threads, eps, _at(norm), _at(angles[0]), _at(angles[1]))


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
