"""Cheaper variants of a model that draft for it: without some sublayers (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv
2410.06916), up to an early exit (LayerSkip, arXiv 2404.16710), over a window of its cache (MagicDec, arXiv 2408.11049),
with quantized weights (QSpec, arXiv 2410.11305), or several of these combined.

A view reads its model's cache and writes only scratch slots, so it has no prefill and nothing to commit or undo.
Independent of drafters and rules.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.cuda_graphs import GraphPool
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.rows import Rows
from outrider.core.engine.kv_cache.windowed import windowed
from outrider.core.engine.kv_retrieval import root_queries, top_chunks
from outrider.core.engine.layer_subset import reread
from outrider.core.engine.native.chain_drawing import DrawsChains
from outrider.core.engine.network import Network
from outrider.core.engine.quantization.quantize import quantize
from outrider.core.engine.types import Layer
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, committed

_MAX_LOGITS = 1 << 23  # up to this many logits are computed in the pass; beyond, only requested rows are


@dataclass(frozen=True, eq=False)
class Carry:
    """The states of an early-exit view, from which the whole model continues: a drafter sets Draft.carry to
    `view.carry()`."""

    owner: View
    rows: Rows  # that it was computed for
    layer: int  # the first layer still to run
    states: Tensor  # [B, P + nodes, D] entering that layer, of the pending tokens and the nodes read

    def usable(self, cache: Cache, taps: Collection[str]) -> bool:
        """Whether the cache still holds the view's scratch and no tap before `layer` is needed."""
        return cache.rows is self.rows and cache.scratch_owner is self.owner and all(tap == "last" for tap in taps)


class View(DrawsChains):
    """A cheaper variant of a model on the model's own cache. It is a target itself; `begin` it after the model, on the
    same prompts.

    `skip`: sublayers to leave out, such as {"attention.3", "mlp.3"}. `exit`: the number of layers to run. `window`: how
    many of the first and of the last cache entries to read. `chunks`: how many chunks of how many entries to read in
    between, those with the highest attention scores, selected again every `refresh` drafts. `bits`: 8 or 4.
    """

    rollback = True

    def __init__(
        self,
        network: Network,
        cache: Cache,
        *,
        skip: Collection[str] = (),
        exit: int | None = None,
        window: tuple[int, int] | None = None,
        chunks: tuple[int, int] | None = None,
        refresh: int = 16,
        bits: int | None = None,
    ) -> None:
        depth = len(network.layers)
        if exit is not None and not 1 <= exit <= depth:
            raise InvalidOption(f"exit is {exit}; it must be 1 to {depth}, the number of layers")
        if window is not None and (len(window) != 2 or min(window) < 0 or window[1] < 1):
            raise InvalidOption(f"window is {window}; give (first, last): 0 or more entries, and 1 or more")
        if chunks is not None and (window is None or len(chunks) != 2 or min(*chunks, refresh) < 1):
            raise InvalidOption(
                f"chunks is {chunks}, refresh is {refresh}; give (number of chunks, entries in each), all 1 or more, "
                "together with a window"
            )

        def make() -> Network:
            whole = network if bits is None else quantized(network, bits)
            return whole.map_linears(lambda linear: linear, _skip(whole.layers, skip)[:exit])

        _skip(network.layers, skip)  # checks the names

        graphs = network.graphs
        self.network = make() if graphs is None else graphs.view((frozenset(skip), exit, bits), make)
        self._model_network, self._model_cache = network, cache
        self._window, self._chunks, self._refresh = window, chunks, refresh
        self._between: Tensor | None = None  # the slots of the selected chunks
        self._drafts = 0
        self.cache_passes = 0  # passes of the model over its cache, to select chunks
        self._cache = cache  # the model's, or a copy of its window
        self._only_exits = not skip and window is None and bits is None
        self.vocabulary, self.device = network.config.vocabulary, network.device
        self.weight_bytes = self.network.weight_bytes
        self.mute = False  # return the states at the exit instead of logits

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        if needs:
            raise InvalidOption(
                f"a view does not read prompts, so it has no states at {', '.join(sorted(needs))}; tap the model"
            )
        rows = len(self._model_cache.rows.host)
        if rows != len(prompts):
            raise Incompatible(
                f"a view got {len(prompts)} prompts and its model is decoding {rows} rows; begin the model first, then "
                "the view, on the same prompts"
            )
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._between, self._drafts = None, 0
        self._reset()
        return Prefill()

    def _select(self, sinks: int, recent: int) -> tuple[tuple[int, int], Tensor | None]:
        """The window, and the slots of the chunks in between, selected again every `refresh` drafts. While the cache is
        too short for a choice, the window has that many more recent entries instead."""
        if self._chunks is None:
            return (sinks, recent), None
        count, size = self._chunks
        due, self._drafts = self._drafts % self._refresh == 0, self._drafts + 1
        if max(self._model_cache.rows.host) < sinks + recent + (count + 1) * size:
            return (sinks, recent + count * size), None
        if due or self._between is None:
            self.cache_passes += 1
            queries = root_queries(self._model_network, self._model_cache)
            self._between = top_chunks(self._model_cache, queries, sinks, recent, count, size)
        return (sinks, recent), self._between

    @property
    def layer_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.network.layers)

    @property
    def cache_bytes(self) -> int:
        """The size of the copied window; 0 without one."""
        return 0 if self._cache is self._model_cache else self._cache.bytes

    def _reset(self) -> None:
        self._read: Rows | None = None  # the rows that the scratch belongs to; None: it is empty
        self._scored = -1
        self._states: list[Tensor] = []

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        first = 0 if since is None else since + 1
        model, rows = self._model_cache, self._model_cache.rows
        valid = self._read is rows and self._cache.scratch_owner is self
        if since is not None and (not valid or since > self._scored):
            since = None
        if since is None:
            self._states = []
            self._gap = 0
            if self._window is not None:
                window, between = self._select(*self._window)
                self._release()
                self._cache, self._left_out = windowed(model, *window, len(self.network.layers), between)
                if (graphs := self.network.graphs) is not None:
                    self._cache.exact = model.exact
                    _use_pooled_store(self._cache, graphs.pool)
            elif model.scored >= 0 and model.scratch_owner is not self:  # the model may still keep what it has scored
                self._gap = rows.pending.shape[1] + model.scored
        cache = self._cache
        ids, layout = cache.plan(draft, since, self._gap, lengths=self.network.reads_lengths(cache.store.dtype))
        if self._window is not None:
            shift = self._left_out[:, None]
            keys = None if layout.keys is None else layout.keys + shift
            layout = replace(layout, positions=layout.positions + shift, keys=keys)
        self.network.ensure_positions(position_bound(model, draft), model.long)
        graphs, logits = self.network.graphs, None
        if graphs is not None and layout.slots is not None and ids.numel():
            states, logits, hidden = graphs.run(ids, cache.store, layout, {"stream"}, with_logits=not self.mute)
            stream = hidden["stream"]
        else:
            x = self.network.run(self.network.embed(ids), cache.store, layout)
            states, stream = self.network.final_norm(x, len(ids)), x.view(*ids.shape, x.shape[1])
        if not self._gap:
            cache.scratch_owner = self
        self._read, self._scored = rows, draft.size
        self._states.append(stream)
        if self.mute:  # a head of the drafter's reads the states at the exit
            tap = f"layer.{len(self.network.layers) - 1}"
            hidden = {tap: at_nodes(stream.to(self.network.dtype), rows, draft, first, since)}
            return Scores(draft, self._pipeline, rows.committed, stream[:, :0], hidden, first)
        if logits is not None:
            logits = at_nodes(logits, rows, draft, first, since)
            return Scores(draft, self._pipeline, rows.committed, logits, {}, first)
        states = at_nodes(states, rows, draft, first, since)
        return make_scores(self.network, states, draft, self._pipeline, rows.committed, {}, first)

    def _draws_chains(self) -> bool:
        """Not early exits, whose states are kept, and not while the model may still keep what it has scored."""
        model = self._model_cache
        free = model.scored < 0 or model.scratch_owner is self
        whole = self._window is None and not self._only_exits and not self.mute
        return whole and free and model.store.dtype == self.network.dtype

    def _written(self) -> Cache:
        return self._model_cache

    def _drew(self, scored: int) -> None:
        self._model_cache.scratch_owner, self._gap, self._states = self, 0, []
        self._read, self._scored = self._model_cache.rows, scored

    @torch.no_grad()
    def recall(self, texts: Prompts, count: int) -> Tensor:
        """The logits with which it predicts each of the last `count` committed tokens; see outrider.core.protocol."""
        if self._window is not None:
            raise Incompatible("recall needs a view of the whole cache; this one has a window, drop it")
        self._reset()
        with reread(self._model_cache, texts, count) as (ids, layout):
            self.network.ensure_positions(max(map(len, texts)) + 1, self._model_cache.long)
            x = self.network.run(self.network.embed(ids), self._model_cache.store, layout)
            return self.network.logits(self.network.final_norm(x, len(ids)))

    def carry(self) -> Carry | None:
        """The states from which the model can continue; None unless this view is the model's first layers."""
        if not self._only_exits or not self._states or self._gap or self._read is None:
            return None
        return Carry(self, self._read, len(self.network.layers), torch.cat(self._states, 1))

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        """Update the penalties; the model moves the rows of the shared cache."""
        self._pipeline.commit(committed(draft, verdict, count), verdict.known(count))
        self._reset()

    def mark(self) -> object:
        return copy.copy(self._pipeline)

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, LogitsPipeline)
        self._pipeline = copy.copy(mark)
        self._reset()

    def end(self) -> None:
        self._reset()
        self._release()

    def _release(self) -> None:
        """Drop the copy of the window."""
        if self._cache is not self._model_cache:
            self._cache.end()
        self._cache = self._model_cache


def _use_pooled_store(cache: Cache, pool: GraphPool) -> None:
    """Move the cache's store to a pooled one, whose address is the same each time, so that passes can be captured."""
    store = pool.borrow(tuple(cache.store.shape), cache.dtype)
    store[:, :, :, : cache.store.shape[3]] = cache.store
    cache.store, cache.pool = store, pool


def quantized(network: Network, bits: int) -> Network:
    """The network in fewer bits: loaded or quantized once and kept with it, so that only the first request waits. What
    the network keeps as ("stored", bits) loads it from a file; None: the file has other bits."""
    key = "quantized", bits
    if key not in network.kept:
        stored = network.kept.get(("stored", bits), lambda: None)()
        if stored is not None:
            stored = Network(network.config, network.embedding, stored.layers, stored.norm, stored.head)
        network.kept[key] = quantize(network, bits) if stored is None else stored
    copy_of: Network = network.kept[key]
    return copy_of


def _skip(layers: Collection[Layer], skip: Collection[str]) -> list[Layer]:
    """The layers with the named sublayers switched off."""
    remaining = list(layers)
    last = len(remaining) - 1
    for name in skip:
        match = re.fullmatch(r"(attention|mlp)\.(\d+)", name)
        if match is None or int(match[2]) > last:
            raise InvalidOption(
                f"there is no sublayer '{name}' to skip; they are attention.0, mlp.0 to attention.{last}, mlp.{last}"
            )
        index = int(match[2])
        layer = remaining[index]
        attention = match[1] == "attention"
        remaining[index] = replace(layer, use_attention=False) if attention else replace(layer, use_mlp=False)
    return remaining


def position_bound(cache: Cache, draft: Draft) -> int:
    """An upper bound on the positions in a pass over this draft."""
    bound = max(cache.rows.host) + cache.rows.pending.shape[1] + 1
    if draft.positions is None or not draft.size:
        return bound + draft.tree.depth
    return bound + (int(draft.positions.max()) if cache.exact else 1024)


def at_nodes(states: Tensor, rows: Rows, draft: Draft, first: int, since: int | None) -> Tensor:
    """States [B, Q, D] of all tokens in a pass -> [B, R, D] at the root and the nodes, from row `first` on."""
    wait = rows.pending.shape[1]
    if since is not None:
        return states
    if wait == 1:
        return states[:, first:]
    nodes = torch.arange(wait, wait + draft.size, device=states.device).expand(len(states), -1)
    index = torch.cat([rows.pending_count[:, None] - 1, nodes], 1)[:, first:]
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[2]))


def make_scores(
    network: Network,
    states: Tensor,
    draft: Draft,
    pipeline: LogitsPipeline,
    lengths: Tensor,
    hidden: Mapping[str, Tensor],
    first: int,
    live: Tensor | None = None,
) -> Scores:
    """Scores from normed states [B, R, D]: with all logits if they are few, else computed row by row on request. Rows
    that are not `live` [B, R] have logits of 0."""

    def of_live(states: Tensor, live: Tensor | None) -> Tensor:
        if live is None:
            return network.logits(states)
        found = network.logits(states[live])
        return found.new_zeros(*live.shape, found.shape[-1]).index_put_((live,), found)

    if states.shape[0] * states.shape[1] * network.config.vocabulary <= _MAX_LOGITS:
        return Scores(draft, pipeline, lengths, of_live(states, live), hidden, first)

    @torch.no_grad()
    def logits_of(rows: Tensor, only: slice = slice(None)) -> Tensor:
        index = rows - first
        some = None if live is None else live[only].gather(1, index)
        return of_live(states[only].gather(1, index[..., None].expand(-1, -1, states.shape[2])), some)

    return Scores(draft, pipeline, lengths, logits_of, hidden, first)
