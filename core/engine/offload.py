"""Layers that do not fit are streamed: from a file to memory, or from a host's memory to a device, under a budget.

As many layers as fit stay, one after another from the first; the others pass through one slot, or through two, so that
one is read while the one before it computes. What is computed is the same to the last bit: weights are laid out as they
would be if they stayed. A pass then takes as long as the reading, whatever its width, which is where big trees of
guesses pay: SpecExec (arXiv 2406.02532) for weights in the host's memory, LLMCad (arXiv 2309.04255) for those on a
phone's disk, both with a drafter that stays resident. Embedding, norms and output layer stay too and are not counted.
Knows layers as bytes, nothing of what they compute.
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
from outrider.core.engine.quantization.quantize import ByRows
from outrider.core.engine.types import Layer
from outrider.core.errors import InvalidOption
from outrider.core.kernels import native

_ALIGNED = 64  # bytes
_PARTS = ("qkv", "out", "up_gate", "down")


class Shelf:
    """Where layers are kept that do not fit. `put` them one after another, as many as said; hand `arrive` to the
    network. The budget is in bytes, or from 0 to 1 in layers' worth; on a CPU the shelf is a file, which is gone with
    the process, on a device it is the host's memory.

    `cold` has the system forget what was read from the file, so that a pass reads from the disk and not from memory
    that the budget does not count.
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
            raise InvalidOption(f"the budget is {budget}; give bytes, or a fraction of the layers such as 0.25")
        self.layers, self.budget, self.device, self.cold = layers, budget, torch.device(device), cold
        self._folder = folder
        self._count = 0  # put so far
        self.size = 0  # of a layer, in bytes
        self.resident = 0  # layers that stay
        self.read, self.waited, self.passes = 0, 0.0, 0  # bytes, seconds (of the host), and how often all layers ran
        self._slots: list[Tensor] = []
        self._source: _File | _Host | None = None

    @property
    def streamed(self) -> int:
        """Layers that don't stay."""
        return self.layers - self.resident

    @property
    def held(self) -> int:
        """Bytes of layers and slots in memory."""
        return (self.resident + len(self._slots)) * self.size

    def put(self, layer: Layer) -> Layer:
        """The same layer where it will be found when it is needed."""
        layer = layer.map_linears(_plain)
        sizes = [part.numel() * part.element_size() for part in _tensors(layer)]
        size = sum(-(-one // _ALIGNED) * _ALIGNED for one in sizes)
        if not self._count:
            self._plan(size)
        index = self._count
        self._count += 1
        if index < self.resident:
            return layer
        assert self._source is not None
        place = index - self.resident
        slot = self._slots[place % len(self._slots)]
        blob = torch.zeros(self.size, dtype=torch.uint8)
        _housed(layer, blob, fill=True)
        self._source.write(place, blob)
        return _housed(layer, slot, fill=False)

    def _plan(self, size: int) -> None:
        """How many layers stay, and how many slots the others share."""
        self.size = size
        budget = int(self.budget * self.layers * size) if self.budget <= 1 else int(self.budget)
        fit = budget // size
        if fit < 1:
            raise InvalidOption(
                f"the budget is {budget:,} bytes, and one layer has {size:,}; give that much at least, which is "
                f"{1 / self.layers:.3f} of the layers"
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

    def serve(self, network: Network) -> Network:
        """A network whose layers have been put here asks for them from now on."""
        network.before_layer = self.arrive if self.streamed else None
        return network

    def arrive(self, index: int) -> None:
        """Layer `index` is about to compute, and those asked for before it have: see that it is there."""
        if index == 0:
            self.passes += 1
        if self._source is not None:
            self._source.arrive(index - self.resident)

    def close(self) -> None:
        """What is read ahead is waited for, and the shelf is gone."""
        if self._source is not None:
            self._source.close()
            self._source = None


class _File:
    """Layers in a file, read by a thread of their own into the slots of those that have computed."""

    def __init__(self, shelf: Shelf, folder: Path | None) -> None:
        self.shelf = shelf
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()  # one pass at a time
        self._reader = ThreadPoolExecutor(1, "outrider-layers")
        self._coming: dict[int, Future[None]] = {}  # layers read or being read, each in its slot
        self._next = 0
        self._last = -1
        self.close = weakref.finalize(self, _closed, self._reader, self.file)

    def write(self, place: int, blob: Tensor) -> None:
        self.file.seek(place * self.shelf.size)
        self.file.write(memoryview(blob.numpy()))  # type: ignore[arg-type]

    def arrive(self, place: int) -> None:
        """A resident layer, below 0, has the first of the others read meanwhile."""
        with self._lock:
            if place >= 0 and place not in self._coming:  # somebody asked out of turn
                for one in self._coming.values():
                    one.result()
                self._coming.clear()
                self._next = place
            order = list(self._coming)  # as they were asked for: what stands before this one has computed
            for old in order[: order.index(place) if place in order else len(order)]:
                if place >= 0 or old == self._last:
                    self._coming.pop(old).result()
            self._ahead()
            if place >= 0:
                before = time.perf_counter()
                self._coming[place].result()
                self.shelf.waited += time.perf_counter() - before
            self._last = place

    def _ahead(self) -> None:
        """Ask for as many as there are free slots, in turn."""
        slots, streamed = len(self.shelf._slots), self.shelf.streamed
        taken = {one % slots for one in self._coming}
        while self._next % slots not in taken and self._next not in self._coming:
            taken.add(self._next % slots)
            self._coming[self._next] = self._reader.submit(self._load, self._next)
            self._next = (self._next + 1) % streamed

    def _load(self, place: int) -> None:
        shelf, start = self.shelf, place * self.shelf.size
        self.file.seek(start)
        view = memoryview(shelf._slots[place % len(shelf._slots)].numpy())  # type: ignore[arg-type]
        done = 0
        while done < shelf.size:
            done += self.file.readinto(view[done:])  # type: ignore[attr-defined]
        shelf.read += shelf.size
        if shelf.cold and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno(), start, shelf.size, os.POSIX_FADV_DONTNEED)


def _closed(reader: ThreadPoolExecutor, file: IO[bytes]) -> None:
    reader.shutdown()
    file.close()


class _Host:  # pragma: CUDA
    """Layers in pinned memory of the host, copied on a stream of their own; nobody waits but the device."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.blobs: dict[int, Tensor] = {}
        self._stream = torch.cuda.Stream(shelf.device)  # type: ignore[no-untyped-call]
        count = len(shelf._slots)
        self._held: list[int | None] = [None] * count  # which layer is in each slot, or on its way there
        self._ready = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
        self._last: int | None = None

    def write(self, place: int, blob: Tensor) -> None:
        self.blobs[place] = blob.pin_memory()

    def arrive(self, place: int) -> None:
        if place < 0:
            return
        count, now = len(self._held), torch.cuda.current_stream(self.shelf.device)
        for ahead in range(count):
            wanted = (place + ahead) % self.shelf.streamed
            slot = wanted % count
            if self._held[slot] == wanted or (ahead and slot == place % count):
                continue
            self._stream.wait_stream(now)  # whoever computes from this slot has been launched by now
            with torch.cuda.stream(self._stream):
                self.shelf._slots[slot].copy_(self.blobs[wanted], non_blocking=True)
                self._ready[slot].record(self._stream)
            self._held[slot] = wanted
            self.shelf.read += self.shelf.size
        now.wait_event(self._ready[place % count])

    def close(self) -> None:
        self._stream.synchronize()
        self.blobs.clear()


def streamed(
    network: Network, budget: float, *, folder: Path | None = None, cold: bool = True
) -> tuple[Network, Shelf]:
    """The same network under a budget, and its shelf; what is computed stays the same."""
    shelf = Shelf(len(network.layers), budget, device=network.device, folder=folder, cold=cold)
    layers = [shelf.put(layer) for layer in network.layers]
    return shelf.serve(Network(network.config, network.embedding, layers, network.norm, network.head)), shelf


def _plain(linear: Linear) -> Linear:
    """The same product with weights whose bytes can be moved."""
    if isinstance(linear, ByRows):
        return _plain(linear.few)
    return Dense(linear.weight, linear.bias) if isinstance(linear, Packed) else linear


def _tensors(layer: Layer) -> Iterator[Tensor]:
    for name in _PARTS:
        yield from (part for part in vars(getattr(layer, name)).values() if isinstance(part, Tensor))


def _housed(layer: Layer, slot: Tensor, *, fill: bool) -> Layer:
    """The layer with its weights' bytes in a slot, where they are put, or will be."""
    start = 0

    def house(part: Tensor) -> Tensor:
        nonlocal start
        size = part.numel() * part.element_size()
        there = slot[start : start + size].view(part.dtype).view(part.shape)
        start += -(-size // _ALIGNED) * _ALIGNED
        return there.copy_(part) if fill else there

    return layer.map_linears(lambda linear: _moved(linear, house))


def _moved(linear: Linear, house: Callable[[Tensor], Tensor]) -> Linear:
    made = copy.copy(linear)
    for name, part in vars(linear).items():
        if isinstance(part, Tensor):
            object.__setattr__(made, name, house(part))
    if isinstance(made, native.Tiled):
        made.point()
    return made
