"""CUDA graphs of a pass, a verdict or a trained drafter's proposal: one per input shape, with inputs in fixed buffers.

A pass of a small model is about 240 kernels of a few microseconds each; launching them one by one takes longer than
running them. There are few shapes: rows, tokens, and cache columns in coarse steps. Without CUDA, or for a shape whose
capture fails, the same code runs eagerly on the same buffers; `OUTRIDER_GRAPHS=0` turns graphs off. Independent of
networks and drafts.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.core.packed import carved, cloned, copy_all, tensors_in

_MAX_CAPTURES = 192  # per pool; the least recently used one is evicted
_AHEAD_AFTER = 2  # uses of a capture after which it is made for longer caches too
_ROOMY = 8192  # slots of a row that a store has from the start where they take a small part of the memory
_SMALL_PART = 16
_MAX_FREE_STORES = 2  # unused KV stores kept per pool
_CAPTURING = threading.Lock()  # CUDA captures one graph at a time
_WARMUP_RUNS = 2  # before a capture, so that libraries allocate their workspaces

Inputs = Sequence[Tensor | None]
Replay = Callable[[], object]
StoreShape = tuple[int, int, int, int, int]
Ahead = Callable[[], Iterable[tuple[tuple[object, ...], Inputs, Callable[[Inputs], Any]]]]  # keys, inputs, works
Out = TypeVar("Out")
# work -> its outputs, and a function that computes them again in place
Recorder = Callable[[Callable[[], Any]], tuple[Any, Replay]]


def graphs_enabled(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get("OUTRIDER_GRAPHS", "1") != "0"


class CudaRecorder:  # pragma: CUDA
    """Captures CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, Replay]:
        """Warm up and capture. `work` must be idempotent: it runs several times."""
        with _CAPTURING, torch.cuda.device(self.device):
            return self._captured(work)

    def _captured(self, work: Callable[[], Any]) -> tuple[Any, Replay]:
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARMUP_RUNS):
                work()
        current.wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = work()
        return out, graph.replay


def record_on_cpu(work: Callable[[], Any]) -> tuple[Any, Replay]:
    """A recorder without CUDA, for tests: a replay runs the recorded work and copies its results into the recorded
    outputs. It has the limits of a graph: inputs outside the buffers stay those of the recording, and outputs may not
    change their shape."""
    out = work()

    def replay() -> None:
        for output, value in zip(tensors_in(out), tensors_in(work()), strict=True):
            if output.shape != value.shape:
                raise RuntimeError(f"recorded with shape {tuple(output.shape)}, replayed with {tuple(value.shape)}")
            output.copy_(value)

    return out, replay


@dataclass(eq=False)
class _Capture:
    """The work for one shape: its input buffers, and its outputs and replay once it is recorded."""

    inputs: list[Tensor | None]
    work: Callable[[], Any]
    references: Any  # further tensors that the work reads, kept alive
    out: Any = None
    replay: Replay | None = None
    failed: bool = False  # it cannot be recorded
    uses: int = 0


@dataclass(frozen=True, eq=False)
class Lent:
    """What a work gave, in memory of its recording; the recording's buffers and key."""

    key: tuple[object, ...]
    inputs: Inputs
    out: Any
    replayed: bool  # else the work ran without a recording


class GraphPool:
    """Captures by shape, and KV stores that outlive a generation, so that captures stay valid."""

    def __init__(self, device: torch.device, record: Recorder | None) -> None:
        self.device, self.record = device, record
        self.captured = self.replayed = 0
        self._captures: OrderedDict[tuple[object, ...], _Capture] = OrderedDict()
        self._stores: list[Tensor] = []
        self._room: dict[tuple[object, ...], int] = {}  # by the shape of a slot
        self._working = False
        self.lock = threading.RLock()  # buffers are filled, replayed and read by one thread at a time

    def __len__(self) -> int:
        """The number of shapes seen."""
        return len(self._captures)

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype, exact: bool = False) -> Tensor:
        """A KV store [L, B, 2 K, C, d] with at least this many columns, or exactly; its contents are stale but
        finite."""
        layers, rows, heads, columns, dim = shape
        columns = columns if exact else max(1 << (columns - 1).bit_length(), 1024)
        padded = (layers, rows, heads, columns, dim)
        for index, store in enumerate(self._stores):
            if tuple(store.shape) == padded and store.dtype == dtype:
                return self._stores.pop(index)
        return torch.zeros(padded, dtype=dtype, device=self.device)

    def roomy(self, shape: StoreShape, dtype: torch.dtype, context: int) -> StoreShape:
        """The shape of a store for rows that grow: with columns for `context` tokens, at most _ROOMY, if that takes
        little memory, so that the store stays where recordings read it."""
        layers, rows, heads, columns, dim = shape
        key = layers, rows, heads, dim, dtype
        if key not in self._room:
            room = min(_ROOMY, context)
            if self.device.type == "cuda":
                total = torch.cuda.mem_get_info(self.device)[1]
                slot = layers * rows * heads * dim * dtype.itemsize
                while room > 1024 and room * slot * _SMALL_PART > total:
                    room //= 2
            self._room[key] = room if self.device.type == "cuda" else 0
        return layers, rows, heads, max(columns, self._room[key]), dim

    def give_back(self, store: Tensor) -> None:
        if store.numel():
            self._stores.append(store)
        while len(self._stores) > _MAX_FREE_STORES:
            address = self._stores.pop(0).data_ptr()
            for key in [key for key in self._captures if key[0] == address]:  # their graphs refer to the freed store
                del self._captures[key]

    def lend(
        self,
        key: tuple[object, ...],
        inputs: Inputs,
        work: Callable[[Inputs], Any],
        references: Any = None,
        still: int | None = None,
        ahead: Ahead = tuple,
    ) -> Lent:
        """As `run`, without a copy of what the work gives: it is overwritten when the work runs again. `still`: the
        input that is 0 while the work is recorded, so that work which may run only once changes nothing. `ahead`: what
        else to record now that this work is known to repeat, as what it becomes when the cache is fuller."""
        with self.lock:
            capture, key = self._filled(key, inputs, work, references, still)
            capture.uses += 1
            if capture.uses == _AHEAD_AFTER and capture.replay is not None:
                for longer in ahead():
                    self._filled(*longer, references, None)
            if capture.replay is None:
                return Lent(key, capture.inputs, self._ran(partial(work, capture.inputs)), replayed=False)
            capture.replay()
            self.replayed += 1
            return Lent(key, capture.inputs, capture.out, replayed=True)

    def record_work(self, key: tuple[object, ...], inputs: Inputs, work: Callable[[Inputs], Any]) -> Any:
        """As outrider.core.protocol.Recordings."""
        return self.lend(key, inputs, work).out

    def run(
        self,
        key: tuple[object, ...],
        inputs: Inputs,
        work: Callable[[Inputs], Out],
        references: Any = None,
        ahead: Ahead = tuple,
    ) -> Out:
        """`work(inputs)`, replayed if it was captured for these shapes. Everything else that it reads must be fixed or
        identified by `key`."""
        with self.lock:
            if self._working:  # part of a larger recording
                return work(inputs)
            lent = self.lend(key, inputs, work, references, ahead=ahead)
            out: Out = cloned(lent.out) if lent.replayed else lent.out
            return out

    def _filled(
        self,
        key: tuple[object, ...],
        inputs: Inputs,
        work: Callable[[Inputs], Any],
        references: Any,
        still: int | None,
    ) -> tuple[_Capture, tuple[object, ...]]:
        """The capture of this work, its buffers filled, recorded if that is possible; and its whole key."""
        shapes = (None if value is None else (*value.shape, value.dtype) for value in inputs)
        key = (*key, *shapes)
        capture = self._captures.get(key)
        if capture is None:
            made = iter(carved([value for value in inputs if value is not None], self.device))
            buffers = [None if value is None else next(made) for value in inputs]
            capture = self._captures[key] = _Capture(buffers, partial(work, buffers), references)
            if len(self._captures) > _MAX_CAPTURES:
                self._captures.popitem(last=False)
        self._captures.move_to_end(key)
        pairs = [(buffer, value) for buffer, value in zip(capture.inputs, inputs, strict=True) if value is not None]
        copied = [buffer for buffer, _ in pairs if buffer is not None], [value for _, value in pairs]
        copy_all(*copied)
        if self.record is not None and capture.replay is None and not capture.failed:
            if still is not None and (stilled := capture.inputs[still]) is not None:
                stilled.zero_()
            self._record(capture, self.record)
            copy_all(*copied)
        return capture, key

    def _ran(self, work: Callable[[], Any]) -> Any:
        """The work's result; what it runs in this pool is part of it."""
        self._working = True
        try:
            return work()
        finally:
            self._working = False

    def _record(self, capture: _Capture, record: Recorder) -> None:
        try:
            capture.out, capture.replay = record(partial(self._ran, capture.work))
            self.captured += 1
        except RuntimeError as error:  # what is not about capturing fails again when the work runs eagerly
            if not any(other.failed for other in self._captures.values()):
                why = str(error).splitlines()[0]
                warnings.warn(f"a shape of passes is not captured in a CUDA graph: {why}", stacklevel=3)
            capture.failed, capture.out, capture.replay = True, None, None


def separate_recorder(record: Recorder | None) -> Recorder | None:
    """A recorder of the same kind whose graphs share no memory with those of `record`."""
    return CudaRecorder(record.device) if isinstance(record, CudaRecorder) else record
