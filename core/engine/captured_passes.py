"""The captured passes of a network (CUDA graphs), its views and its rules. Independent of what a pass computes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from outrider.core.engine.cuda_graphs import (
    CudaRecorder,
    GraphPool,
    Inputs,
    Recorder,
    graphs_enabled,
    separate_recorder,
)
from outrider.core.engine.kv_cache import buckets
from outrider.core.engine.network import Network
from outrider.core.engine.types import PassLayout

_MAX_GRAPH_LOGITS = 1 << 23  # up to this many logits are computed within the captured pass
_MAX_VIEWS = 8  # views of a network whose captures are kept
PassResult = tuple[Tensor, Tensor | None, dict[str, Tensor]]  # normed states, logits, states at taps


def pass_inputs(ids: Tensor, layout: PassLayout) -> Inputs:
    """What a recorded pass reads, as `Graphs.compute` takes it."""
    return ids, layout.positions, layout.mask, layout.slots, layout.keys, layout.entries, layout.table


class Graphs:
    """The captured passes of a network, its views and its rules. `record` replaces the device's own recorder."""

    def __init__(self, network: Network, *, record: Recorder | None = None) -> None:
        if record is None and graphs_enabled(network.device):  # pragma: CUDA
            record = CudaRecorder(network.device)
        self.network, self.pool = network, GraphPool(network.device, record)
        self.rules = self.separate_pool()  # acceptance rules
        self.views: dict[object, Network] = {}  # cheaper variants, by their settings
        self.idle: list[Network] = []  # conditioned variants not in use, kept with their captures

    def separate_pool(self) -> GraphPool:
        """A pool that shares no memory with this one, for a drafter that may run at the same time."""
        return GraphPool(self.network.device, separate_recorder(self.pool.record))

    def attach(self, network: Network) -> Network:
        """Capture the passes of a network that drafts for this one, in a pool of its own."""
        network.graphs = Graphs(network, record=separate_recorder(self.pool.record))
        return network

    def view(self, settings: object, make: Callable[[], Network]) -> Network:
        """The view of the network with these settings, made once so that its captures are reused."""
        if settings not in self.views:
            while len(self.views) >= _MAX_VIEWS:
                self.views.pop(next(iter(self.views)))
            self.views[settings] = self.attach(make())
        return self.views[settings]

    def run(
        self, ids: Tensor, store: Tensor, layout: PassLayout, taps: Collection[str], *, with_logits: bool = True
    ) -> PassResult:
        """Ids [B, Q] -> normed states [B, Q, D], logits [B, Q, V] (None if too many or not wanted), and the states at
        taps; the tap "stream" is the residual stream after the last layer."""
        with self.pool.lock:
            angles = self.network.angles

            def at(columns: int) -> tuple[tuple[object, ...], Inputs, Callable[[Inputs], PassResult]]:
                more = columns - layout.columns
                mask, keys = (
                    part if part is None or not more else F.pad(part, (0, more)) for part in (layout.mask, layout.keys)
                )
                inputs = pass_inputs(ids, replace(layout, mask=mask, keys=keys))
                key = (store.data_ptr(), *store.shape, columns, angles[0].data_ptr(), with_logits, *sorted(taps))
                return key, inputs, partial(self.compute, store, columns, frozenset(taps), with_logits)

            longer = buckets.larger(layout.columns, layout.size(store)[1])
            return self.pool.run(*at(layout.columns), angles, lambda: map(at, longer))

    def compute(
        self, store: Tensor, columns: int, taps: Collection[str], with_logits: bool, inputs: Inputs
    ) -> PassResult:
        """The pass that `run` records, of ids and the parts of their layout."""
        ids, positions, mask, slots, keys, entries, table = inputs
        assert ids is not None and positions is not None
        network, tapped = self.network, {tap: list[Tensor]() for tap in taps}
        rows, count = ids.shape
        layout = PassLayout(positions, columns, mask, None, slots, keys, entries, table)
        x = network.run(network.embed(ids), store, layout, tapped)
        states = network.final_norm(x, rows, tapped)
        if "stream" in tapped:
            tapped["stream"].append(x.view(rows, count, -1))
        few = rows * count * network.config.vocabulary <= _MAX_GRAPH_LOGITS
        logits = network.logits(states) if with_logits and few else None
        return states, logits, {tap: chunks[0] for tap, chunks in tapped.items()}


def with_graphs(network: Network) -> Network:
    """The network, set to capture its passes where graphs are enabled."""
    if graphs_enabled(network.device) and network.graphs is None:  # pragma: CUDA
        network.graphs = Graphs(network)
    return network
