"""Streams, events and graphs of the shadow device, with the ordering and capture rules of CUDA.

Orders are vector clocks: a kernel that reads what another stream wrote, without a wait in between, is a race. A graph
keeps its operations and runs them again on replay, over the memory they were recorded with; memory freed since is an
error. Which torch calls are kernels is decided in device.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[int, int]
Weak = Any  # a StorageWeakRef, which torch leaves untyped


class ShadowError(RuntimeError):
    """What would fail, stall or race on a CUDA device."""


def weak(storage: torch.UntypedStorage) -> Weak:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a call's arguments or results, depth first."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A copy of the arguments or results with every tensor replaced."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: map_tensors(change, part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts, kind = [map_tensors(change, part) for part in value], type(value)
        return kind(*parts) if hasattr(kind, "_make") else kind(parts)
    return value


def _merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)


class Stream:
    """A queue of kernels, each ordered after those that the stream has waited for."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        index = 0 if device is None else torch.device(device).index or 0
        self.device = torch.device("cuda", index)
        self.clock: Clock = {id(self): 0}

    def launch(self) -> tuple[int, int]:
        self.clock[id(self)] += 1
        return id(self), self.clock[id(self)]

    def wait_stream(self, other: Stream) -> None:
        _merge(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        STATE.device.wait("stream.synchronize")

    def query(self) -> bool:
        return True


class Event:
    """A point in a stream."""

    def __init__(self, **_: Any) -> None:
        self.clock: Clock = {}
        self.seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or current_stream()).clock)
        self.seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        STATE.device.wait("event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return (other.seconds - self.seconds) * 1e3


@dataclass(frozen=True)
class _Memory:
    """A tensor by its storage, which may be freed meanwhile."""

    storage: Weak
    like: tuple[torch.dtype, int, torch.Size, tuple[int, ...]]

    @classmethod
    def of(cls, tensor: Tensor) -> _Memory:
        like = tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return cls(weak(tensor.untyped_storage()), like)

    def tensor(self, place: str) -> Tensor:
        storage = None if self.storage.expired() else torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise ShadowError(f"a graph uses memory that was freed after its capture, at {place}: {self.like}")
        dtype, offset, size, stride = self.like
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


class Graph:
    """Operations recorded between `capture_begin` and `capture_end`, run again by `replay`."""

    def __init__(self, **_: Any) -> None:
        self.index = 0
        self._operations: list[tuple[Callable[..., Any], Any, Any, str]] = []
        self._own: dict[int, Tensor] = {}  # by storage: memory that the capture itself allocated
        self.work: Any = None  # of its kernels, if the device is metered

    def record(self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any, place: str) -> None:
        def kept(tensor: Tensor) -> Any:
            if not tensor.numel():  # has no memory to free
                return tensor
            return tensor if _pointer(tensor) in self._own else _Memory.of(tensor)

        given = {_pointer(tensor) for tensor in tensors_in((args, kwargs))}
        inputs = map_tensors(kept, (args, kwargs))
        for tensor in tensors_in(out):
            if _pointer(tensor) not in given:
                self.allocated(tensor)
        self._operations.append((func, inputs, [kept(tensor) for tensor in tensors_in(out)], place))

    @property
    def kernels(self) -> int:
        return len(self._operations)

    def allocated(self, tensor: Tensor) -> None:
        self._own[_pointer(tensor)] = tensor

    def replay(self) -> None:
        STATE.device.replayed(self)
        with torch._C.DisableTorchFunction():
            for func, inputs, out, place in self._operations:
                args, kwargs = _live(inputs, place)
                for value, old in zip(tensors_in(func(*args, **kwargs)), _live(out, place), strict=True):
                    if value.data_ptr() == old.data_ptr():
                        continue
                    if value.shape != old.shape:
                        raise ShadowError(f"{func} gave {tuple(old.shape)} in the capture and {tuple(value.shape)} now")
                    with torch.no_grad():
                        old.copy_(value)

    def reset(self) -> None:
        self._operations.clear()
        self._own.clear()


def _pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _live(value: Any, place: str) -> Any:
    """Recorded arguments with the tensors of now."""
    if isinstance(value, _Memory):
        return value.tensor(place)
    if isinstance(value, dict):
        return {name: _live(part, place) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_live(part, place) for part in value])
    return value


class _State(threading.local):
    """What CUDA keeps for each thread."""

    device: Any  # the ShadowDevice in use, set in every thread that runs under it
    index = 0  # of the current device
    stream: Stream | None = None
    graph: Graph | None = None  # that is being captured


STATE = _State()


def current_stream(device: Any = None) -> Stream:
    index = STATE.index if device is None or torch.device(device).index is None else torch.device(device).index
    if STATE.stream is not None and STATE.stream.device.index == index:
        return STATE.stream
    stream: Stream = STATE.device.default_streams[index]
    return stream


@contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    before, index = STATE.stream, STATE.index
    if stream is not None:
        STATE.stream, STATE.index = stream, stream.device.index
    try:
        yield
    finally:
        STATE.stream, STATE.index = before, index


@contextmanager
def use_device(device: Any) -> Iterator[None]:
    before = STATE.index
    index = device if isinstance(device, int) else torch.device(device).index
    STATE.index = before if index is None or index < 0 else index
    try:
        yield
    finally:
        STATE.index = before


@contextmanager
def capture(
    graph: Graph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """As torch.cuda.graph: one capture at a time, on a stream of its own."""
    device = STATE.device
    device.wait("torch.cuda.graph synchronises before it captures")
    if not device.capturing.acquire(blocking=False):
        raise ShadowError("two captures at once: another thread is capturing")
    side = stream or Stream(torch.device("cuda", STATE.index))
    side.wait_stream(current_stream())
    graph.index = side.device.index
    STATE.graph = graph
    device.counts.captures += 1
    try:
        with use_stream(side):
            yield
    finally:
        STATE.graph = None
        device.capturing.release()
    current_stream().wait_stream(side)
