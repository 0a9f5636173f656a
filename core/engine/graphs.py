"""A pass as one launch: embedding, layers and output layer captured in a CUDA graph for each shape that comes up, its
inputs in buffers that stay where they are.

A small model's pass is some 240 kernels of a few microseconds each, and launching them one by one takes longer than
running them. Shapes are few: so many rows, so many tokens, so many columns of the cache in steps. Where there is no
CUDA, or a capture fails, the same buffers go through the same code uncaptured (`OUTRIDER_GRAPHS=0`: no graphs at
all). Knows a network and places; nothing of drafts.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.core.engine.network import Network, Places

if TYPE_CHECKING:
    from outrider.core.engine.cache import Cache

_MOST = 96  # captured shapes; the one unused for longest is let go
_LOGITS = 1 << 23  # up to so many are computed within the pass
_WARM = 2  # runs ahead of a capture, in which libraries set themselves up

Found = tuple[Tensor, Tensor | None, dict[str, Tensor]]


def wanted(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get("OUTRIDER_GRAPHS", "1") != "0"


@dataclass(eq=False)
class _Pass:
    """One shape: its inputs, what comes out, and the graph, if it is captured."""

    ids: Tensor
    places: Places
    kept: Any  # what the graph reads and nobody else may free
    out: Found | None = None
    graph: Any = None


class Graphs:
    """A network's passes by shape, and stores of keys and values that outlive a generation, so that graphs do too."""

    def __init__(self, network: Network, *, capture: bool | None = None) -> None:
        self.network = network
        self.capture = wanted(network.device) if capture is None else capture
        self.captured = self.replayed = 0
        self._passes: OrderedDict[tuple[object, ...], _Pass] = OrderedDict()
        self._stores: list[Tensor] = []
        self._pool: Any = None

    # ---- stores

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A store [L, B, 2 K, C, d] of so many columns or more; what is in it is old, and finite."""
        layers, rows, heads, columns, dim = shape
        columns = max(1 << (columns - 1).bit_length(), 1024)
        whole = (layers, rows, heads, columns, dim)
        for place, store in enumerate(self._stores):
            if tuple(store.shape) == whole and store.dtype == dtype:
                return self._stores.pop(place)
        return torch.zeros(whole, dtype=dtype, device=self.network.device)

    def give_back(self, store: Tensor) -> None:
        if store.numel():
            self._stores.append(store)
            del self._stores[:-2]  # no more than two are kept

    def serve(self, cache: Cache) -> None:
        cache.keeper = self

    # ---- passes

    def run(self, ids: Tensor, store: Tensor, places: Places, taps: Collection[str]) -> Found:
        """Ids [B, Q] -> normed states [B, Q, D], logits [B, Q, V] unless they are very many, and the states at taps."""
        network = self.network
        angles = network.angles
        key = (
            store.data_ptr(),
            *store.shape,
            *ids.shape,
            places.columns,
            len(places.positions),
            None if places.mask is None else len(places.mask),
            angles[0].data_ptr(),
            *sorted(taps),
        )
        one = self._passes.get(key)
        if one is None:
            one = self._passes[key] = self._made(ids, places, angles)
            if len(self._passes) > _MOST:
                self._passes.popitem(last=False)
        self._passes.move_to_end(key)
        for buffer, value in zip(_inputs(one.ids, one.places), _inputs(ids, places), strict=True):
            buffer.copy_(value)
        if self.capture and one.graph is None:
            self._capture(one, store, taps)
        if one.graph is None:
            return self._compute(one, store, taps)
        one.graph.replay()
        self.replayed += 1
        assert one.out is not None
        states, logits, hidden = one.out  # the next pass writes over these
        copies = {tap: part.clone() for tap, part in hidden.items()}
        return states.clone(), None if logits is None else logits.clone(), copies

    def _made(self, ids: Tensor, places: Places, angles: tuple[Tensor, Tensor]) -> _Pass:
        assert places.slots is not None
        mask = None if places.mask is None else places.mask.clone()
        still = Places(places.positions.clone(), places.columns, mask, None, places.slots.clone())
        return _Pass(ids.clone(), still, angles)

    def _compute(self, one: _Pass, store: Tensor, taps: Collection[str]) -> Found:
        network, found = self.network, {tap: list[Tensor]() for tap in taps}
        rows, count = one.ids.shape
        x = network.run(network.embed(one.ids), store, one.places, found)
        states = network.finish(x, rows, found)
        logits = network.logits(states) if rows * count * network.config.vocabulary <= _LOGITS else None
        return states, logits, {tap: parts[0] for tap, parts in found.items()}

    def _capture(self, one: _Pass, store: Tensor, taps: Collection[str]) -> None:
        """What a pass writes to the store it would write again, so that running it more than once does no harm."""
        try:
            now, side = torch.cuda.current_stream(store.device), torch.cuda.Stream(store.device)  # type: ignore[no-untyped-call]
            side.wait_stream(now)
            with torch.cuda.stream(side):
                for _ in range(_WARM):
                    self._compute(one, store, taps)
            now.wait_stream(side)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                one.out = self._compute(one, store, taps)
            one.graph = graph
            self.captured += 1
        except RuntimeError as error:
            self.capture, one.out, one.graph = False, None, None
            warnings.warn(f"passes are not captured in CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2)


def _inputs(ids: Tensor, places: Places) -> list[Tensor]:
    return [part for part in (ids, places.positions, places.mask, places.slots) if part is not None]
