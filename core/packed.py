"""Many small tensors moved by one kernel: into fixed buffers, into fresh memory, or to the host as bytes.

A round's tensors are some hundred bytes each, so moving them costs their launches. Independent of what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_LARGE = 1 << 20  # bytes from which a tensor is copied by itself, as vectors instead of bytes
_ALIGNMENT = 16


def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each tensor into the contiguous one of the same shape and type; one kernel for all small contiguous ones.
    A tensor that is the buffer itself is left alone."""
    small: tuple[list[Tensor], list[Tensor]] = ([], [])
    for buffer, value in zip(into, values, strict=True):
        if not value.numel() or (value.data_ptr() == buffer.data_ptr() and value.is_contiguous()):
            continue
        if value.is_contiguous() and value.device == buffer.device and value.nbytes < _LARGE:
            for part, tensor in zip(small, (buffer, value), strict=True):
                part.append(tensor.view(-1).view(torch.uint8))
        else:
            buffer.copy_(value, non_blocking=True)
    if len(small[0]) == 1:
        small[0][0].copy_(small[1][0])
    elif small[0]:
        torch._foreach_copy_(*small)


def carved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Uninitialised contiguous tensors of the same shapes and types, in one allocation."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    made, start = list[Tensor](), 0
    for tensor, size in zip(tensors, sizes, strict=True):
        made.append(memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += size
    return made


def cloned(out: Any) -> Any:
    """A copy of a tensor, or of tuples and dicts of them."""
    tensors = tensors_in(out)
    if not tensors:
        return rebuilt(out, iter(()))
    copies = carved(tensors, tensors[0].device)
    copy_all(copies, tensors)
    return rebuilt(out, iter(copies))


def tensors_in(out: Any) -> list[Tensor]:
    """The tensors of tuples, lists and dicts, in order."""
    if isinstance(out, Tensor):
        return [out]
    parts: Iterable[Any] = out.values() if isinstance(out, dict) else out if isinstance(out, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def rebuilt(out: Any, tensors: Any) -> Any:
    """The same tuples and dicts with other tensors."""
    if isinstance(out, Tensor):
        return next(tensors)
    if isinstance(out, dict):
        return {name: rebuilt(part, tensors) for name, part in out.items()}
    return None if out is None else tuple(rebuilt(part, tensors) for part in out)
