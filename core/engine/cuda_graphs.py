"""Work on tensors as one launch: a pass of a network, a verdict, or what a trained drafter guesses, recorded in a CUDA
graph for each shape that comes up, its inputs in buffers that stay where they are.

A small model's pass is some 240 kernels of a few microseconds each, and launching them one by one takes longer than
running them. Shapes are few: so many rows, so many tokens, so many columns of the cache in steps. Where there is no
CUDA, or a recording fails, the same buffers go through the same code unrecorded (`OUTRIDER_GRAPHS=0`: no graphs at
all). Knows a network and places; nothing of drafts.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from outrider.core.engine.network import Network, Places

if TYPE_CHECKING:
    from outrider.core.engine.kv_cache.cache import Cache
    from outrider.core.protocol import Rule

_MOST = 96  # recorded shapes; the one unused for longest is let go
_LOGITS = 1 << 23  # up to so many are computed within the pass
_STORES = 2  # that nobody uses at the moment, and that are kept
_VIEWS = 8  # of a network whose recordings are kept
_WARM = 2  # runs ahead of a recording, in which libraries set themselves up

Inputs = Sequence[Tensor | None]
Replay = Callable[[], object]
Out = TypeVar("Out")
Recorder = Callable[
    [Callable[[], Any]], tuple[Any, Replay]
]  # work -> its outputs, and what computes them anew in place
Found = tuple[Tensor, Tensor | None, dict[str, Tensor]]


def wanted(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get("OUTRIDER_GRAPHS", "1") != "0"


def served(network: Network) -> Network:
    """The network, its passes captured where that is wanted."""
    if wanted(network.device) and network.graphs is None:  # pragma: CUDA
        network.graphs = Graphs(network)
    return network


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

    def serve(self, cache: Cache) -> None:
        cache.keeper = self

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


class Graphs:
    """A network's passes by shape. `record`: how, where it is not for the device to say."""

    def __init__(self, network: Network, *, record: Recorder | None = None) -> None:
        if record is None and wanted(network.device):  # pragma: CUDA
            record = Cuda(network.device)
        self.network, self.stills = network, GraphPool(network.device, record)
        self.rules = self.beside()  # verdicts
        self.views: dict[object, Network] = {}  # the network seen cheaper
        self.spare: list[Network] = []  # variants of the network that nobody runs at the moment, with their recordings

    def beside(self) -> GraphPool:
        """For what drafts for this network, perhaps while it computes: recordings that share no memory with its own."""
        return GraphPool(self.network.device, _apart(self.stills.record))

    def of(self, network: Network) -> Network:
        """Another network that drafts for this one, its passes recorded likewise."""
        network.graphs = Graphs(network, record=_apart(self.stills.record))
        return network

    def seen(self, how: object, make: Callable[[], Network]) -> Network:
        """The network seen cheaper, as `how` says, its passes recorded likewise: made once, so that recordings last."""
        if how not in self.views:
            while len(self.views) >= _VIEWS:
                self.views.pop(next(iter(self.views)))
            self.views[how] = self.of(make())
        return self.views[how]

    def judge(self, rule: Rule) -> Rule:
        """A rule whose verdicts are recorded, where they can be."""
        from outrider.core.engine.captured_rules import CapturedRule

        return rule if isinstance(rule, CapturedRule) else CapturedRule(rule, self.rules)

    def run(self, ids: Tensor, store: Tensor, places: Places, taps: Collection[str], *, speaks: bool = True) -> Found:
        """Ids [B, Q] -> normed states [B, Q, D], logits [B, Q, V] unless they are very many or nobody asks, and the
        states at taps; "stream" is what leaves the last layer, as it is."""
        angles = self.network.angles
        key = (store.data_ptr(), *store.shape, places.columns, angles[0].data_ptr(), speaks, *sorted(taps))
        inputs = (ids, places.positions, places.mask, places.slots)
        work = partial(self._compute, store, places.columns, frozenset(taps), speaks)
        return self.stills.run(key, inputs, work, angles)

    def _compute(self, store: Tensor, columns: int, taps: Collection[str], speaks: bool, inputs: Inputs) -> Found:
        ids, positions, mask, slots = inputs
        assert ids is not None and positions is not None
        network, found = self.network, {tap: list[Tensor]() for tap in taps}
        rows, count = ids.shape
        x = network.run(network.embed(ids), store, Places(positions, columns, mask, None, slots), found)
        states = network.finish(x, rows, found)
        few = rows * count * network.config.vocabulary <= _LOGITS
        if "stream" in found:
            found["stream"].append(x.view(rows, count, -1))
        return states, network.logits(states) if speaks and few else None, {tap: one[0] for tap, one in found.items()}


def _apart(record: Recorder | None) -> Recorder | None:
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
