"""Softmax attention by torch, without cuDNN on CUDA: it makes a plan for every shape, which takes tens of milliseconds
on Hopper, where torch prefers it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.nn import functional as F

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
