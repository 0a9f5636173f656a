"""Copies between host and device that avoid needless synchronisation, and the memory that this process uses.

On CUDA, making a tensor from Python numbers waits for the stream; `upload` does not. Knows nothing of drafts or
distributions.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's names of what mallopt sets


def upload(values: Sequence[Any] | Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers, or a tensor on the host, as a tensor on the device; nobody waits."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # pragma: CUDA


class SideTransfer:
    """Something done beside what this thread does: in a second thread, and on CUDA on a second stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worker = ThreadPoolExecutor(1, "outrider-aside")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def run(self, work: Callable[..., None], *given: Any) -> Iterator[None]:
        """`work` goes on while the body does, and both have ended (on CUDA: what follows waits for both) behind it."""
        if self._stream is not None:  # pragma: CUDA
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        future = self._worker.submit(self._on_stream, work, given)
        try:
            yield
        finally:
            future.result()
            if self._stream is not None:  # pragma: CUDA
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _on_stream(self, work: Callable[..., None], given: Sequence[Any]) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            work(*given)

    def end(self) -> None:
        self._worker.shutdown()


@lru_cache(maxsize=4096)
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """The same, remembered: for numbers that come up again in every step."""
    return upload(values, device, torch.long)


def fetch(*tensors: Tensor) -> list[np.ndarray]:
    """Tensors [B, ...] as arrays on the host, in one transfer whatever their number. This is the wait of a step."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    flat = torch.cat([tensor.double().flatten(1) for tensor in tensors], 1).cpu().numpy()  # pragma: CUDA
    cuts = np.cumsum([tensor[0].numel() for tensor in tensors])[:-1]  # pragma: CUDA
    return [  # pragma: CUDA
        part.reshape(tuple(tensor.shape)).astype(torch.empty(0, dtype=tensor.dtype).numpy().dtype)
        for part, tensor in zip(np.split(flat, cuts, axis=1), tensors, strict=True)
    ]


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
