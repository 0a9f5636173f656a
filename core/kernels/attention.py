"""Softmax attention: by torch, without cuDNN on CUDA (it makes a plan for every shape, which takes tens of milliseconds
on Hopper, where torch prefers it), or by the compiled kernels."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.kernels import native

_LOCK = threading.Lock()
_users, _allowed = 0, True  # threads that attend now, and torch's setting before, which is the process's


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Queries [..., Q, d], keys and values [..., C, d], a mask to add or of bools -> [..., Q, d]."""
    if query.device.type != "cuda":
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    global _users, _allowed
    with _LOCK:
        if not _users:
            _allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
            torch.backends.cuda.enable_cudnn_sdp(False)
        _users += 1
    try:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    finally:
        with _LOCK:
            _users -= 1
            if not _users:
                torch.backends.cuda.enable_cudnn_sdp(_allowed)


def batch_invariant(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor | None:
    """Attention whose numbers for a row are the same in any batch. Queries [B, K, Q G, d], keys and values
    [B, K, C, d], a mask of bools [B|1, Q, C] -> [B, K, Q G, d]; None where the kernels can't."""
    code = native.library() if query.device.type == "cpu" and query.dtype == torch.bfloat16 else None
    rows, heads, count, dim = query.shape
    if code is None or dim % 32 or not query.numel():
        return None
    if key.stride() != value.stride() or key.stride()[2:] != (dim, 1):
        key, value = key.contiguous(), value.contiguous()
    query, columns, group = query.contiguous(), key.shape[2], 1
    mask_stride = 0
    if mask is not None:
        mask, group = mask.contiguous(), count // mask.shape[1]
        mask_stride = mask.stride(0) if len(mask) > 1 else 0
    tokens, threads, found = count // group, torch.get_num_threads(), torch.empty_like(query)
    space = native.work(code.outrider_attend_work(rows * tokens, columns, dim, threads))
    addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), native.at(mask), found.data_ptr()
    strides = 2 * key.stride(0), 2 * key.stride(1), mask_stride
    code.outrider_attend(*addresses, *strides, rows, heads, tokens, group, columns, dim, threads, space)
    return found
