"""Work on tensors as one launch: a pass of a network, a verdict, or what a trained drafter guesses, recorded in a CUDA
graph for each shape that comes up, its inputs in buffers that stay where they are.

A small model's pass is some 240 kernels of a few microseconds each, and launching them one by one takes longer than
running them. Shapes are few: so many rows, so many tokens, so many columns of the cache in steps. Where there is no
CUDA, or a recording fails, the same buffers go through the same code unrecorded (`OUTRIDER_GRAPHS=0`: no graphs at
all). Knows tensors only; nothing of networks or drafts.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

_MOST = 96  # recorded shapes; the one unused for longest is let go
_STORES = 2  # that nobody uses at the moment, and that are kept
_WARM = 2  # runs ahead of a recording, in which libraries set themselves up

Inputs = Sequence[Tensor | None]
Replay = Callable[[], object]
Out = TypeVar("Out")
Recorder = Callable[
    [Callable[[], Any]], tuple[Any, Replay]
]  # work -> its outputs, and what computes them anew in place


def wanted(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get("OUTRIDER_GRAPHS", "1") != "0"


class Cuda:  # pragma: CUDA
    """Records in CUDA graphs, which share their memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, Replay]:
        """What work writes it would write again, so that running it more than once does no harm."""
        now, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(now)
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                work()
        now.wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = work()
        return out, graph.replay


def again(work: Callable[[], Any]) -> tuple[Any, Replay]:
    """A recorder without a device: a replay runs the work that was recorded, with all that it held then, into the
    outputs that there are. What would not do in a graph does not do here: inputs that are in no buffer are old, and
    shapes that change are refused."""
    out = work()

    def replay() -> None:
        for into, value in zip(_tensors(out), _tensors(work()), strict=True):
            if into.shape != value.shape:
                raise RuntimeError(f"recorded with {tuple(into.shape)} numbers and now {tuple(value.shape)}")
            into.copy_(value)

    return out, replay


@dataclass(eq=False)
class _Recording:
    """One shape: its inputs, the work on them, what comes out, and how that is computed anew, if it is recorded."""

    inputs: list[Tensor | None]
    work: Callable[[], Any]
    kept: Any  # what the work reads and nobody else may free
    out: Any = None
    replay: Replay | None = None


class GraphPool:
    """Work by shape, and stores of keys and values that outlive a generation, so that recordings do too."""

    def __init__(self, device: torch.device, record: Recorder | None) -> None:
        self.device, self.record = device, record
        self.captured = self.replayed = 0
        self._stills: OrderedDict[tuple[object, ...], _Recording] = OrderedDict()
        self._stores: list[Tensor] = []

    def __len__(self) -> int:
        """Shapes that came up."""
        return len(self._stills)

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A store [L, B, 2 K, C, d] of so many columns or more; what is in it is old, and finite."""
        layers, rows, heads, columns, dim = shape
        columns = max(1 << (columns - 1).bit_length(), 1024)
        whole = (layers, rows, heads, columns, dim)
        for place, store in enumerate(self._stores):
            if tuple(store.shape) == whole and store.dtype == dtype:
                return self._stores.pop(place)
        return torch.zeros(whole, dtype=dtype, device=self.device)

    def give_back(self, store: Tensor) -> None:
        if store.numel():
            self._stores.append(store)
        while len(self._stores) > _STORES:
            gone = self._stores.pop(0).data_ptr()
            for key in [key for key in self._stills if key[0] == gone]:  # recordings would hold it
                del self._stills[key]

    def run(self, key: tuple[object, ...], inputs: Inputs, work: Callable[[Inputs], Out], kept: Any = None) -> Out:
        """What the work makes of inputs. It may read nothing else that changes, but what `key` names."""
        shapes = (None if one is None else (*one.shape, one.dtype) for one in inputs)
        key = (*key, *shapes)
        one = self._stills.get(key)
        if one is None:
            buffers = [None if value is None else value.clone() for value in inputs]
            one = self._stills[key] = _Recording(buffers, partial(work, buffers), kept)
            if len(self._stills) > _MOST:
                self._stills.popitem(last=False)
        self._stills.move_to_end(key)
        for buffer, value in zip(one.inputs, inputs, strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        if self.record is not None and one.replay is None:
            self._recorded(one, self.record)
        if one.replay is None:
            return one.work()  # type: ignore[no-any-return]
        one.replay()
        self.replayed += 1
        return _cloned(one.out)  # type: ignore[no-any-return]

    def _recorded(self, one: _Recording, record: Recorder) -> None:
        try:
            one.out, one.replay = record(one.work)
            self.captured += 1
        except RuntimeError as error:
            self.record, one.out, one.replay = None, None, None
            warnings.warn(f"passes are not captured in CUDA graphs: {str(error).splitlines()[0]}", stacklevel=3)


def apart(record: Recorder | None) -> Recorder | None:
    """A recorder of the same kind whose graphs share no memory with those of `record`."""
    return Cuda(record.device) if isinstance(record, Cuda) else record


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    parts = out.values() if isinstance(out, dict) else out or ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _cloned(out: Any) -> Any:
    """The next replay writes over what there is."""
    if isinstance(out, Tensor):
        return out.clone()
    if isinstance(out, dict):
        return {name: _cloned(part) for name, part in out.items()}
    return None if out is None else tuple(map(_cloned, out))
