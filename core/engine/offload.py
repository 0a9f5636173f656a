"""Offloaded layers, read from a file into memory, or from host memory to a GPU, under a memory budget.

The first layers stay resident; the others are loaded into one slot, or into two, so that one is read while another
computes. Results are equal to the last bit, since weights keep their layout. A pass takes as long as reading the
layers, however many tokens it has, so large draft trees pay: SpecExec (arXiv 2406.02532) for weights in host memory,
LLMCad (arXiv 2309.04255) for weights on a phone's flash, both with a resident drafter. Embedding, norms and output
layer stay resident and do not count. Independent of what layers compute.
"""

from __future__ import annotations

import copy
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from outrider.core.engine.linear import Dense, Linear, Packed
from outrider.core.engine.network import Network
from outrider.core.engine.quantization.quantize import SwitchByRows
from outrider.core.engine.types import Layer
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.kernels import native

_ALIGNED = 64  # bytes


class LayerOffload:
    """Storage and slots of offloaded layers. Call `add` for each of the `layers` layers in order, then `attach` to the
    network.

    `budget`: bytes, or if at most 1 a fraction of the layers. On a CPU the storage is a temporary file, on a GPU host
    memory. `cold` drops what was read from the system's page cache, so that passes read from the disk and not from
    memory beyond the budget.
    """

    def __init__(
        self,
        layers: int,
        budget: float,
        *,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
        cold: bool = True,
    ) -> None:
        if budget <= 0:
            raise InvalidOption(f"the offload budget is {budget}; give bytes, or a fraction of the layers such as 0.25")
        self.layers, self.budget, self.device, self.cold = layers, budget, torch.device(device), cold
        self._folder = folder
        self._added = 0  # layers so far
        self.layer_bytes = 0
        self.resident = 0  # layers that stay in memory
        self.read_bytes, self.wait_seconds, self.passes = 0, 0.0, 0  # seconds that the host waited
        self._slots: list[Tensor] = []
        self._source: _File | _Host | None = None

    @property
    def offloaded(self) -> int:
        """The number of layers that are not resident."""
        return self.layers - self.resident

    @property
    def held_bytes(self) -> int:
        """The memory of resident layers and slots."""
        return (self.resident + len(self._slots)) * self.layer_bytes

    def add(self, layer: Layer) -> Layer:
        """The layer itself if it stays resident, else stored and returned with its weights in a slot."""
        layer = layer.map_linears(_plain)
        sizes = [part.numel() * part.element_size() for part in _tensors(layer)]
        size = sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)
        if not self._added:
            self._plan(size)
        elif size != self.layer_bytes:
            raise Incompatible(
                "layers of different sizes, some with a mixture of experts and some without, can't be offloaded; "
                "load the model without `offload`"
            )
        index = self._added
        self._added += 1
        if index < self.resident:
            return layer
        assert self._source is not None
        number = index - self.resident
        slot = self._slots[number % len(self._slots)]
        blob = torch.zeros(self.layer_bytes, dtype=torch.uint8)
        _in_buffer(layer, blob, copy_weights=True)
        self._source.write(number, blob)
        return _in_buffer(layer, slot, copy_weights=False)

    def _plan(self, size: int) -> None:
        """Decide how many layers stay resident, and allocate the slots of the others."""
        self.layer_bytes = size
        budget = int(self.budget * self.layers * size) if self.budget <= 1 else int(self.budget)
        fit = budget // size
        if fit < 1:
            raise InvalidOption(
                f"the offload budget is {budget:,} bytes and one layer has {size:,}; give at least that, or "
                f"{1 / self.layers:.3f} as a fraction of the layers"
            )
        if fit >= self.layers:
            self.resident = self.layers
            return
        slots = 2 if fit > 1 else 1
        self.resident = fit - slots
        self._slots = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        if self.device.type == "cuda":
            self._source = _Host(self)
        else:
            self._source = _File(self, self._folder)

    def attach(self, network: Network) -> Network:
        """Make a network whose layers were added here load them before each use."""
        network.before_layer = self.load if self.offloaded else None
        return network

    def load(self, index: int) -> None:
        """Make layer `index` available; all layers requested before have been computed."""
        if index == 0:
            self.passes += 1
        if self._source is not None:
            self._source.load(index - self.resident)

    def close(self) -> None:
        """Wait for pending reads and delete the storage."""
        if self._source is not None:
            self._source.close()
            self._source = None


class _File:
    """Layers in a file. A thread prefetches them into free slots."""

    def __init__(self, owner: LayerOffload, folder: Path | None) -> None:
        self.owner = owner
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()  # one pass at a time
        self._reader = ThreadPoolExecutor(1, "outrider-layers")
        self._reads: dict[int, Future[None]] = {}  # layers in slots or being read, in the order of their requests
        self._next = 0
        self._last = -1
        self.close = weakref.finalize(self, _close, self._reader, self.file)

    def write(self, number: int, blob: Tensor) -> None:
        self.file.seek(number * self.owner.layer_bytes)
        self.file.write(memoryview(blob.numpy()))  # type: ignore[arg-type]

    def load(self, number: int) -> None:
        """Wait for an offloaded layer and prefetch the next ones. A number below 0 is a resident layer, during which
        the first offloaded ones are prefetched."""
        with self._lock:
            if number >= 0 and number not in self._reads:  # requested out of order
                for read in self._reads.values():
                    read.result()
                self._reads.clear()
                self._next = number
            order = list(self._reads)  # layers before this one have been computed, so their slots are free
            for old in order[: order.index(number) if number in order else len(order)]:
                if number >= 0 or old == self._last:
                    self._reads.pop(old).result()
            self._prefetch()
            if number >= 0:
                before = time.perf_counter()
                self._reads[number].result()
                self.owner.wait_seconds += time.perf_counter() - before
            self._last = number

    def _prefetch(self) -> None:
        """Start reading the next layers into all free slots."""
        slots = len(self.owner._slots)
        used = {number % slots for number in self._reads}
        while self._next % slots not in used and self._next not in self._reads:
            used.add(self._next % slots)
            self._reads[self._next] = self._reader.submit(self._read, self._next)
            self._next = (self._next + 1) % self.owner.offloaded

    def _read(self, number: int) -> None:
        owner, size = self.owner, self.owner.layer_bytes
        self.file.seek(number * size)
        view = memoryview(owner._slots[number % len(owner._slots)].numpy())  # type: ignore[arg-type]
        done = 0
        while done < size:
            done += self.file.readinto(view[done:])  # type: ignore[attr-defined]
        owner.read_bytes += size
        if owner.cold and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno(), number * size, size, os.POSIX_FADV_DONTNEED)


def _close(reader: ThreadPoolExecutor, file: IO[bytes]) -> None:
    reader.shutdown()
    file.close()


class _Host:  # pragma: CUDA
    """Layers in pinned host memory, copied on a separate stream. The GPU waits for a copy; the host never does."""

    def __init__(self, owner: LayerOffload) -> None:
        self.owner = owner
        self.blobs: dict[int, Tensor] = {}
        self._stream = torch.cuda.Stream(owner.device)  # type: ignore[no-untyped-call]
        count = len(owner._slots)
        self._in_slot: list[int | None] = [None] * count  # the layer in each slot, or being copied to it
        self._ready = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]

    def write(self, number: int, blob: Tensor) -> None:
        self.blobs[number] = blob.pin_memory()

    def load(self, number: int) -> None:
        if number < 0:
            return
        count, current = len(self._in_slot), torch.cuda.current_stream(self.owner.device)
        for ahead in range(count):
            layer = (number + ahead) % self.owner.offloaded
            slot = layer % count
            if self._in_slot[slot] == layer or (ahead and slot == number % count):
                continue
            self._stream.wait_stream(current)  # computations from this slot have been launched
            with torch.cuda.stream(self._stream):
                self.owner._slots[slot].copy_(self.blobs[layer], non_blocking=True)
                self._ready[slot].record(self._stream)
            self._in_slot[slot] = layer
            self.owner.read_bytes += self.owner.layer_bytes
        current.wait_event(self._ready[number % count])

    def close(self) -> None:
        self._stream.synchronize()
        self.blobs.clear()


def offload_layers(
    network: Network, budget: float, *, folder: Path | None = None, cold: bool = True
) -> tuple[Network, LayerOffload]:
    """A copy of the network with its layers offloaded under a budget, and the offload's state. Results are the same."""
    layers = LayerOffload(len(network.layers), budget, device=network.device, folder=folder, cold=cold)
    added = [layers.add(layer) for layer in network.layers]
    return layers.attach(Network(network.config, network.embedding, added, network.norm, network.head)), layers


def _plain(linear: Linear) -> Linear:
    """The layer in a form whose weights are plain tensors."""
    if isinstance(linear, SwitchByRows):
        return _plain(linear.few)
    return Dense(linear.weight, linear.bias) if isinstance(linear, Packed) else linear


def _tensors(layer: Layer) -> Iterator[Tensor]:
    for linear in layer.linears:
        yield from (part for part in vars(linear).values() if isinstance(part, Tensor))


def _in_buffer(layer: Layer, buffer: Tensor, *, copy_weights: bool) -> Layer:
    """The layer with its weights as views of a buffer, which `copy_weights` fills."""
    start = 0

    def place(part: Tensor) -> Tensor:
        nonlocal start
        size = part.numel() * part.element_size()
        view = buffer[start : start + size].view(part.dtype).view(part.shape)
        start += -(-size // _ALIGNED) * _ALIGNED
        return view.copy_(part) if copy_weights else view

    return layer.map_linears(lambda linear: _moved(linear, place))


def _moved(linear: Linear, place: Callable[[Tensor], Tensor]) -> Linear:
    moved = copy.copy(linear)
    for name, part in vars(linear).items():
        if isinstance(part, Tensor):
            object.__setattr__(moved, name, place(part))
    if isinstance(moved, native.Tiled):
        moved.point()
    return moved
