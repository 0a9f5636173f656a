"""Kernels in Triton for the passes of a decoder on a GPU, behind functions of tensors; torch's operations compute the
same where they are not used.

Modules in this folder need Triton, which torch brings along for CUDA; import them where `usable` says so. With
`TRITON_INTERPRET=1` they run on the CPU, for tests. `OUTRIDER_TRITON=1` turns them on."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

SWITCH = "OUTRIDER_TRITON=1 turns the kernels on"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def hindrance() -> str | None:
    """Why Triton's kernels cannot run on this machine; None: they can."""
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than Ampere"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def wanted() -> bool:
    """Whether the switch is on."""
    return os.environ.get("OUTRIDER_TRITON", "0") == "1"


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether passes with such tensors use the kernels."""
    return wanted() and device.type == "cuda" and dtype in DTYPES and hindrance() is None


def launched_on(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
