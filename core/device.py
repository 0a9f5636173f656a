"""Copies between host and device without needless synchronisation, and the memory use of this process.

On CUDA, creating a tensor from Python numbers synchronises with the stream; `upload` does not. Independent of drafts
and distributions.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import InvalidOption

_SIDE = threading.local()
_SIDES = itertools.count(1)
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # glibc's constants for mallopt


AUTO = "auto"


def best_device() -> str:
    """The device of this machine to compute on: cuda, else mps, else cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def usable_device(name: str | torch.device) -> torch.device:
    """The device of a name, after a small trial on it; "auto" is the best of this machine."""
    try:
        device = torch.device(best_device() if name == AUTO else name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidOption(
            f"the device '{name}' cannot be used here ({str(error).splitlines()[0][:100]}); "
            "`outrider doctor` lists those that can"
        ) from None
    return device


def device_name(name: str) -> str:
    """A device with the name of its hardware, such as "cuda (NVIDIA H100 80GB HBM3)"."""
    if torch.device(name).type != "cuda":
        return name
    return f"{name} ({torch.cuda.get_device_name(name)})"  # pragma: CUDA


def usual_dtype(device: torch.device) -> str:
    """The precision to load weights in on a device: bfloat16, or float16 where that is not computed in hardware."""
    if device.type == "mps" or (device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)):
        return "float16"
    return "bfloat16"


def upload(values: Sequence[Any] | Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy numbers or a host tensor to the device, without synchronising."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # pragma: CUDA


def upload_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors on the device, of any types, by one transfer without synchronising."""
    if device.type == "cpu":
        return [*tensors]
    sizes = [-(-tensor.nbytes // 8) * 8 for tensor in tensors]  # pragma: CUDA
    memory = torch.empty(sum(sizes), dtype=torch.uint8)  # pragma: CUDA
    starts = [sum(sizes[:index]) for index in range(len(sizes))]  # pragma: CUDA
    for tensor, start in zip(tensors, starts, strict=True):  # pragma: CUDA
        memory[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    moved = upload(memory, device)  # pragma: CUDA
    return [  # pragma: CUDA
        moved[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=True)
    ]


def download(tensor: Tensor) -> Tensor:
    """Copy to the host without synchronising: the numbers are there once the host has waited for the device for another
    reason, such as the verdict."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )  # pragma: CUDA


class SideTransfer:
    """Runs work concurrently with the calling thread: in a second thread, and on CUDA on a second stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._number = device, next(_SIDES)
        self._worker = ThreadPoolExecutor(1, "outrider-side")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def run(self, work: Callable[..., None], *args: Any) -> Iterator[None]:
        """Run `work(*args)` while the body of the `with` runs, and wait for it at the end (on CUDA the current stream
        waits, not the host)."""
        if self._stream is not None:  # pragma: CUDA
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        future = self._worker.submit(self._on_stream, work, args)
        try:
            yield
        finally:
            future.result()
            if self._stream is not None:  # pragma: CUDA
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _on_stream(self, work: Callable[..., None], args: Sequence[Any]) -> None:
        _SIDE.number = 0 if self._stream is None else self._number  # of this worker's thread
        with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            work(*args)

    def end(self) -> None:
        self._worker.shutdown()


def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """`upload` with a cache, for index tensors that every round needs."""
    return _constant(values, device, side_number())


@lru_cache(maxsize=4096)
def _constant(values: tuple[int, ...], device: torch.device, side: int) -> Tensor:
    return upload(values, device, torch.long)


def side_number() -> int:
    """The number of the SideTransfer whose work this is, 0 outside of any: part of the key of caches of device tensors,
    since what one stream is still computing must not be read on another."""
    number: int = getattr(_SIDE, "number", 0)
    return number


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors one after another, [bytes]."""
    return torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in tensors])


def fetch(*tensors: Tensor, bytes_of: Tensor | None = None) -> list[np.ndarray]:
    """Copy tensors to the host in one transfer, each in its own type, 16-bit numbers as float32. This is the one
    synchronisation of a round. `bytes_of`: the same tensors as `packed` bytes, if there are already."""
    if tensors[0].device.type == "cpu":
        return [_array(tensor) for tensor in tensors]
    flat, start = (packed(tensors) if bytes_of is None else bytes_of).cpu(), 0  # pragma: CUDA
    arrays = []  # pragma: CUDA
    for tensor in tensors:  # pragma: CUDA
        part = flat[start : start + tensor.nbytes].clone()  # aligned
        arrays.append(_array(part.view(tensor.dtype).view(tensor.shape)))
        start += tensor.nbytes
    return arrays  # pragma: CUDA


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = (tensor.float() if tensor.dtype.itemsize == 2 else tensor).numpy()
    return array


def peak_memory() -> int:
    """Peak memory of this process in bytes: of its tensors on the GPU once CUDA is in use, else main memory."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # pragma: CUDA
        return int(torch.cuda.max_memory_allocated())
    return lifetime_peak()


def lifetime_peak() -> int:
    """Peak main memory of this process in bytes; 0 where the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resident_memory() -> int:
    """Main memory that this process uses now, in bytes; its peak where the system does not report that."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return lifetime_peak()


def free_memory(device: torch.device) -> int | None:
    """The bytes that can be allocated on a device now; None where that is not known."""
    if device.type == "cuda":  # pragma: CUDA
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = 1024 * int(facts["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
    return min([available, *control_group_memory()])


def control_group_memory(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """The bytes that each control group of this process, as of a container, and each group above it still allow,
    without their file caches."""
    try:
        groups = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        names = ("memory.max", "memory.current", "inactive_file")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        top = root / controllers  # within a container, its own group
        own = top / path.lstrip("/")
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
            try:
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield max(limit - used + int(stat.get(names[2], 0)), 0)
            except (OSError, ValueError):  # no such group, or "max"
                continue


def keep_memory() -> None:
    """Make glibc keep freed memory for reuse. Otherwise each large CPU tensor is mapped anew and its pages are cleared,
    which takes longer than the arithmetic. No effect with other C libraries."""
    _mallopt((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1))


def share_arenas() -> None:
    """Make glibc's threads allocate from two arenas. Otherwise each has one of its own, where what many requests freed
    adds up. No effect with other C libraries."""
    _mallopt((_ARENA_MAX, 2))


def return_freed_memory() -> None:
    """Give the system back what glibc keeps of freed memory, which takes milliseconds. No effect with other C
    libraries."""
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(0)


def _mallopt(*options: tuple[int, int]) -> None:
    if (mallopt := _of_libc("mallopt")) is not None:
        for option, value in options:
            mallopt(option, value)


def _of_libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
