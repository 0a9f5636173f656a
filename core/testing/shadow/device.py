"""`shadow_device()`: torch reports CUDA devices whose tensors compute on the CPU, and what would fail or wait shows.

- An operation on a host and a device tensor, or on two devices, raises; so do `.numpy()` of a device tensor and, while
  a graph is captured, waits and pageable uploads.
- Kernel launches, waits of the host, uploads, captures and replays are counted, with the line that made them.

Counts are of torch calls: one call is one launch or several. Says nothing of time, memory or the kernels' rounding.

Over 400 lines, being one dispatcher of torch's calls.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outrider.core.testing.shadow import runtime
from outrider.core.testing.shadow.runtime import (
    STATE,
    Event,
    Graph,
    ShadowError,
    Stream,
    Weak,
    map_tensors,
    tensors_in,
    weak,
)
from outrider.core.testing.shadow.work import Work, work_of

_OPERATORS = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor")
)
_METADATA = frozenset(["squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "set_", "resize_", "rename_"])
_WAITS = frozenset(
    [
        *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"),
        *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "is_nonzero", "bincount"),
    ]
)
_LEAF = frozenset(["requires_grad_", "retain_grad", "backward", "register_hook", "detach_"])  # of the tensor itself
_LAYOUT = frozenset(["broadcast_tensors", "broadcast_to", "expand_as", "view_as", "is_same_size", "result_type"])


class DeviceTensor(Tensor):
    """Numbers on the CPU that report a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    cuda_index = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.cuda_index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return self.cuda_index


def _host(value: Any) -> Any:
    return value.as_subclass(Tensor) if type(value) is DeviceTensor else value


def _on(index: int, value: Any) -> Any:
    if not isinstance(value, Tensor) or type(value) is DeviceTensor:
        return value
    tensor = value.as_subclass(DeviceTensor)
    tensor.cuda_index = index
    return tensor


@dataclass
class Counts:
    """What happened since the last `reset`."""

    launches: int = 0
    waits: int = 0  # of the host for the device
    uploads: int = 0
    pageable: int = 0  # uploads that wait, their memory not being pinned
    captures: int = 0
    replays: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    replayed: int = 0  # kernels of replays
    work: Work = field(default_factory=Work)  # of all kernels, those of replays included, if the device is metered
    places: Counter[tuple[str, str]] = field(default_factory=Counter)  # (why it waits, file:line)


class ShadowDevice:
    """The devices' state: counts, streams, pinned memory, and who wrote which storage last."""

    def __init__(self, devices: int) -> None:
        self.counts, self.metered = Counts(), False
        self.default_streams = [Stream(torch.device("cuda", index)) for index in range(devices)]
        self.capturing = threading.Lock()
        self._pinned: dict[int, Weak] = {}
        self._writers: dict[int, tuple[Weak, int, int]] = {}

    def reset(self) -> None:
        self.counts = Counts()

    # ---- what costs or is forbidden

    def wait(self, why: str) -> None:
        """The host waits for the device; afterwards all that was launched is over."""
        if STATE.graph is not None:
            raise ShadowError(f"operation not permitted when stream is capturing: {why}, at {_place()}")
        self.counts.waits += 1
        self.counts.places[why, _place()] += 1
        self._writers.clear()

    def _upload(self, source: Tensor, free: bool) -> None:
        self.counts.uploads += 1
        if free and self._is_pinned(source):
            return
        if STATE.graph is not None:
            raise ShadowError(f"upload of pageable memory while capturing, at {_place()}")
        self.counts.pageable += 1
        self.counts.places["pageable upload", _place()] += 1

    def replayed(self, graph: Graph) -> None:
        self.counts.replays += 1
        self.counts.launches += 1
        self.counts.replayed += graph.kernels
        self.counts.work = self.counts.work.and_also(graph.work or Work())

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = weak(storage)
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        known = self._pinned.get(tensor.untyped_storage().data_ptr())
        return known is not None and not known.expired()

    # ---- calls

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__"):
            return self._attribute(func, name, args)
        if name == "pin_memory":
            return self.pin(args[0].clone())
        if name == "is_pinned":
            return self._is_pinned(args[0])
        if name == "_has_compatible_shallow_copy_type":
            return (type(args[0]) is DeviceTensor) == (type(args[1]) is DeviceTensor)
        if name in _LEAF:
            return func(*args, **kwargs)
        if name == "record_stream":
            return None
        tensors = tensors_in((args, kwargs))
        device = [each for each in tensors if type(each) is DeviceTensor]
        if name in ("to", "cuda", "cpu"):
            moved = self._move(func, name, args, dict(kwargs))
            if moved is not NotImplemented:
                return moved
        wanted = kwargs.get("device")
        index = None if wanted is None else _cuda_index(wanted)
        if kwargs.pop("pin_memory", False):
            return self.pin(func(*args, **kwargs))
        if index is None and device and wanted is None:
            index = device[0].cuda_index
        if index is None:
            return self._from_device(func, name, args, kwargs) if device else func(*args, **kwargs)
        return self._run(func, name, args, kwargs, tensors, device, index)

    def _attribute(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        if name != "__get__" or type(args[0]) is not DeviceTensor:
            return func(*args)
        own = {"device": args[0].device, "is_cuda": True, "is_cpu": False}
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return own[attribute] if attribute in own else _on(args[0].cuda_index, func(args[0]))

    def _move(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`to`, `cuda` and `cpu`, where they name a device."""
        source, rest = args[0], list(args[1:])
        if not isinstance(source, Tensor):
            return NotImplemented
        wanted: Any = {"cuda": "cuda", "cpu": "cpu"}.get(name)
        for place, each in enumerate(rest):
            if isinstance(each, str | torch.device) or (isinstance(each, int) and not isinstance(each, bool)):
                wanted = torch.device(each)
                rest.pop(place)
                break
            if isinstance(each, Tensor):
                wanted, rest[place] = each.device, each.dtype
        wanted = kwargs.pop("device", None) or wanted
        if wanted is None:
            return NotImplemented
        index = _cuda_index(wanted)
        types = [each for each in rest if isinstance(each, torch.dtype)] or [kwargs.get("dtype") or source.dtype]
        flags = [each for each in rest if isinstance(each, bool)]
        free = kwargs.get("non_blocking", flags[0] if flags else False)
        copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
        value = _host(source).to(types[0], copy=copy)
        if type(source) is not DeviceTensor:
            if index is None:
                return value
            self._upload(source, free)
            return self._written(index, value.clone() if value is source else value)
        if index is None:
            self.wait("copy to the host")
            return value.clone() if value.data_ptr() == source.data_ptr() else value
        if index == source.cuda_index:
            return source if value.data_ptr() == source.data_ptr() else self._launched("to", (source,), index, value)
        mine, theirs = (runtime.current_stream(torch.device("cuda", each)) for each in (index, source.cuda_index))
        mine.wait_stream(theirs)  # as CUDA does between two devices
        return self._launched("to", (source,), index, value.clone())

    def _from_device(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that asks for the host's memory, given a device tensor, such as zeros_like(x, device="cpu")."""
        return func(*map_tensors(_host, args), **map_tensors(_host, kwargs))

    def _run(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        device: list[DeviceTensor],
        index: int,
    ) -> Any:
        if device and name in ("numpy", "__array__", "__dlpack__"):
            raise TypeError(f"can't convert cuda:{index} device type tensor to numpy; use Tensor.cpu() first")
        if name in ("tensor", "as_tensor", "asarray", "scalar_tensor"):
            self._upload(torch.empty(0), False)
        waits = bool(device) and name in _WAITS
        waits |= (
            name == "repeat_interleave"
            and len(args) > 1
            and isinstance(args[1], Tensor)
            and "output_size" not in kwargs
        )
        if name in ("__getitem__", "__setitem__"):
            self._index(name, args, index)
        elif name == "copy_":
            if self._copy(args, kwargs):
                return args[0]
        elif name not in _LAYOUT:
            self._same_device(name, tensors, index)
        if waits:
            self.wait(name)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        values, more = map_tensors(_host, (tuple(args), kwargs))
        out = func(*values, **more)
        out = values[0] if out is None and name.startswith("_foreach_") and _in_place(name) else out
        made = tensors_in(out)
        given = {_pointer(each) for each in tensors}
        writes = name in _OPERATORS or name == "__setitem__" or "out" in kwargs or _in_place(name)
        fresh = [each for each in made if _pointer(each) not in given]
        if name.startswith(("empty", "new_empty")):
            if STATE.graph is not None:
                STATE.graph.allocated(out)
        elif fresh or writes:
            return self._launched(name, device, index, out, func, (values, more))
        return map_tensors(lambda each: _on(index, each), out)

    def _launched(self, name: str, read: Any, index: int, out: Any, func: Any = None, given: Any = None) -> Any:
        """Count a kernel, check its order against those that wrote what it reads, and record it in a capture."""
        made = tensors_in(out)
        if not made or any(each.numel() for each in made):  # nothing runs for tensors without elements
            self.counts.launches += 1
            self.counts.kernels[name] += 1
            if self.metered:
                work = (
                    Work(2 * sum(each.nbytes for each in made))
                    if given is None
                    else work_of(name, given[0], given[1], out)
                )
                self.counts.work = self.counts.work.and_also(work)
                if STATE.graph is not None:
                    STATE.graph.work = (STATE.graph.work or Work()).and_also(work)
        stream = runtime.current_stream(torch.device("cuda", index))
        for each in read:
            writer = self._writers.get(_pointer(each))
            if writer is not None and not writer[0].expired() and stream.clock.get(writer[1], 0) < writer[2]:
                raise ShadowError(f"{name} reads what another stream writes, without waiting for it, at {_place()}")
        by, count = stream.launch()
        for each in made:
            if each.numel():
                storage = each.untyped_storage()
                self._writers[storage.data_ptr()] = weak(storage), by, count
        if STATE.graph is not None and STATE.graph.index == index and func is not None:
            args, kwargs = given
            STATE.graph.record(func, args, kwargs, out, _place())
        if read and (name in _OPERATORS or _in_place(name)):
            return read[0]
        return map_tensors(lambda each: _on(index, each), out)

    def _written(self, index: int, value: Tensor) -> Tensor:
        tensor: Tensor = self._launched("upload", (), index, value)
        return tensor

    def _same_device(self, name: str, tensors: list[Tensor], index: int) -> None:
        for each in tensors:
            if type(each) is DeviceTensor and each.cuda_index != index and each.dim():
                raise ShadowError(f"{name}: tensors on cuda:{index} and cuda:{each.cuda_index}, at {_place()}")
            if type(each) is not DeviceTensor and each.dim():
                raise ShadowError(f"{name}: a host tensor {tuple(each.shape)} among the device's, at {_place()}")

    def _index(self, name: str, args: Any, index: int) -> None:
        if type(args[0]) is not DeviceTensor:
            raise ShadowError(f"{name}: a host tensor indexed with the device's, at {_place()}")
        for each in args[1] if isinstance(args[1], tuple) else (args[1],):
            if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) and each.dim():
                self.wait("boolean index")
            elif isinstance(each, list | np.ndarray) or (
                isinstance(each, Tensor) and type(each) is not DeviceTensor and each.dim()
            ):
                self.wait("index from the host")
        if (
            name == "__setitem__"
            and isinstance(args[2], Tensor)
            and type(args[2]) is not DeviceTensor
            and args[2].dim()
        ):
            self._upload(args[2], False)

    def _copy(self, args: Any, kwargs: Any) -> bool:
        """`copy_` between host and device; False within a device, where it is a kernel like others."""
        into, value = args[0], args[1]
        free = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if type(into) is DeviceTensor and type(value) is DeviceTensor:
            return False
        if type(into) is DeviceTensor:
            self._upload(value, free)
            self._launched("copy_", (into,), into.cuda_index, _host(into).copy_(value))
        elif not (free and self._is_pinned(into)):
            self.wait("copy to the host")
            into.copy_(_host(value))
        else:
            into.copy_(_host(value))
        return True


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in _METADATA


def _pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _cuda_index(device: Any) -> int | None:
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type != "cuda":
        return None
    return STATE.index if place.index is None else place.index


def _place() -> str:
    """The line outside of torch and of this package that made the call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in ("/lib/python", "/shadow/", "<")):
            return f"{'/'.join(file.split('/')[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class _Mode(TorchFunctionMode):
    """Routes a thread's torch calls to the device."""

    def __init__(self, device: ShadowDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.call(func, args, dict(kwargs or {}))


@contextmanager
def shadow_device(devices: int = 1) -> Iterator[ShadowDevice]:
    """torch has this many CUDA devices, in this thread and in those started under it."""
    shadow = ShadowDevice(devices)
    start = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        STATE.device = shadow
        with _Mode(shadow):
            start(thread)

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: STATE.graph is not None,
        "device_count": lambda: devices,
        "current_device": lambda: STATE.index,
        "get_device_name": lambda *_: "shadow device",
        "get_device_capability": lambda *_: (9, 0),
        "current_stream": runtime.current_stream,
        "stream": runtime.use_stream,
        "device": runtime.use_device,
        "graph": runtime.capture,
        "graph_pool_handle": object,
        "synchronize": lambda *_: shadow.wait("synchronize"),
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (70 << 30, 80 << 30),
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run))
        stack.enter_context(mock.patch.object(torch.version, "cuda", None))  # no kernels but torch's
        STATE.device, STATE.index, STATE.stream, STATE.graph = shadow, 0, None, None
        stack.enter_context(_Mode(shadow))
        yield shadow
