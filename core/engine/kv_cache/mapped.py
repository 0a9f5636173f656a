"""Zeros whose memory the operating system provides when it is first written, page by page. Rows of a KV store in such
memory are contiguous and as wide as the widest, but hold memory for what they have, as in vAttention (arXiv
2405.04437), which maps a GPU's memory so. On Linux; independent of what is stored."""

from __future__ import annotations

import functools
import math
import mmap
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on


@functools.cache
def available() -> bool:
    """Whether addresses may exceed the memory that they get."""
    if sys.platform != "linux":
        return False
    import resource

    try:
        strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False
    return not strict and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


class Mapped:
    """A tensor of zeros in memory of its own."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        count = math.prod(shape)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._memory = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=flags)
        with suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)  # a row would hold 2 MiB for each of its heads
        self.tensor = torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)

    def release(self, part: Tensor) -> None:
        """Return the memory of a contiguous part of the tensor; of its first and last page only what is inside."""
        start = part.data_ptr() - self.tensor.data_ptr()
        stop = start + part.numel() * part.element_size()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if (size := stop // mmap.PAGESIZE * mmap.PAGESIZE - first) > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, first, size)
