"""The memory of a process: how much it has held at most, and keeping it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's names of what mallopt sets


def peak_memory() -> int:
    """Bytes that this process has held at most; on a GPU, that its tensors have held there."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # pragma: CUDA
        return int(torch.cuda.max_memory_allocated())
    return lifetime_peak()


def lifetime_peak() -> int:
    """Bytes of main memory that this process has held at most; 0 where that can't be asked."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def resident_memory() -> int:
    """Bytes of main memory that this process holds now; where that can't be asked, at most so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return lifetime_peak()


def keep_memory() -> None:
    """Have large tensors on a CPU reuse memory, instead of giving it back each time and getting it cleared page by
    page, which takes longer than the arithmetic. Where the C library is not glibc, nothing changes."""
    option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if option is not None:
        option(_MMAP_MAX, 0)
        option(_TRIM_THRESHOLD, 2**31 - 1)
