"""`cuda_device()`: a real CUDA device with the counts of the shadow device: waits of the host, and captures."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest, mock

import torch

from outrider.core.engine.cuda_graphs import CudaRecorder


class CudaCounts:
    """What happened since the last `reset`. A capture counts as a wait too, as on the shadow device."""

    pageable = 0  # torch reports them as waits

    def __init__(self, seen: list[warnings.WarningMessage]) -> None:
        self._seen, self.captures = seen, 0

    @property
    def _synchronising(self) -> list[warnings.WarningMessage]:
        return [each for each in self._seen if "called a synchronizing CUDA operation" in str(each.message)]

    @property
    def waits(self) -> int:
        return len(self._synchronising) + self.captures

    @property
    def places(self) -> Counter[str]:
        """By file and line."""
        return Counter(f"{each.filename}:{each.lineno}" for each in self._synchronising)


class CudaDevice:
    """The counts of the devices of this machine."""

    def __init__(self, seen: list[warnings.WarningMessage]) -> None:
        self._seen, self.counts = seen, CudaCounts(seen)

    def reset(self) -> None:
        self._seen.clear()
        self.counts = CudaCounts(self._seen)


@contextmanager
def cuda_device(devices: int = 1) -> Iterator[CudaDevice]:  # pragma: CUDA
    """Counts while it is open; other warnings are issued again when it ends. Skips a test for more devices than there
    are."""
    if torch.cuda.device_count() < devices:
        raise SkipTest(f"{devices} GPUs are needed")
    record: Callable[..., Any] = CudaRecorder.__call__
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        device = CudaDevice(seen)

        def counted(self: CudaRecorder, work: Callable[[], Any]) -> Any:
            before = len(seen)
            out = record(self, work)
            del seen[before:]  # its own waits
            device.counts.captures += 1
            return out

        torch.cuda.set_sync_debug_mode("warn")
        try:
            with mock.patch.object(CudaRecorder, "__call__", counted):
                yield device
        finally:
            torch.cuda.set_sync_debug_mode("default")
        others = [each for each in seen if "synchroniz" not in str(each.message).lower()]
    for each in others:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
