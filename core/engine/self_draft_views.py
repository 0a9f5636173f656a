"""A model seen cheaper, to draft for itself: without some sublayers (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv
2410.06916), up to an early exit (LayerSkip, arXiv 2404.16710), through a window of its own cache (MagicDec, arXiv
2408.11049), in fewer bits (QSpec, arXiv 2410.11305), or several of these at once.

A view reads what its model has committed and writes scratch alone, so it has nothing to prefill, to keep or to undo.
Knows nothing of drafters or rules.
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
from outrider.core.engine.kv_cache.cache import Cache, Rows
from outrider.core.engine.kv_retrieval import asked, most_asked
from outrider.core.engine.layer_subset import replayed
from outrider.core.engine.network import Network
from outrider.core.engine.quantization.quantize import quantised
from outrider.core.engine.types import Layer
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, committed

_DENSE = 1 << 23  # logits a pass: up to so many are computed at once, beyond that only the rows asked for


@dataclass(frozen=True, eq=False)
class Carry:
    """What a view that only left layers off its end has computed, for the whole model to go on from: a drafter puts
    `view.carry()` into Draft.carry."""

    owner: View
    rows: Rows  # that it was computed for
    layer: int
    states: Tensor  # [B, P + nodes, D] behind that layer, of the waiting tokens and the nodes read

    def fits(self, cache: Cache, taps: Collection[str]) -> bool:
        """Is it about what this cache holds, and does nobody ask for states before it?"""
        return cache.rows is self.rows and cache.writer is self.owner and all(tap == "last" for tap in taps)


class View:
    """Some of a model's weights over its cache; a target itself, to be begun after the model on the same prompts.

    `skip` names sublayers, such as {"attention.3", "mlp.3"}; `exit` is how many layers are run; `window` is how many
    of the first and of the last entries are looked at, and `chunks` how many chunks in between and of which size, those
    that are asked for most, chosen anew every `refresh` drafts; `bits` is 8 or 4. Rows move on when the model keeps.
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
            raise InvalidOption(f"exit is {exit}; the model has layers 1 to {depth} to leave after")
        if window is not None and (len(window) != 2 or min(window) < 0 or window[1] < 1):
            raise InvalidOption(f"window is {window}; give (first, last): 0 or more entries, and 1 or more")
        if chunks is not None and (window is None or len(chunks) != 2 or min(*chunks, refresh) < 1):
            raise InvalidOption(
                f"chunks is {chunks}, refresh {refresh}; give (how many, of how many entries), each 1 or more, and the "
                "window around them"
            )
        layers = _without(network.layers, skip)[:exit]

        def made() -> Network:
            seen = network.map_linears(lambda linear: linear, layers)
            return seen if bits is None else quantised(seen, bits)

        graphs = network.graphs
        self.network = made() if graphs is None else graphs.view((frozenset(skip), exit, bits), made)
        self._model, self._window = cache, window
        self._whose, self._chunks, self._refresh = network, chunks, refresh
        self._between: Tensor | None = None  # the slots of the chunks
        self._drafts = 0
        self.cache_passes = 0  # of the model over its cache, to choose chunks
        self._cache = cache  # the model's, or a copy of what is within the window
        self._whole = not skip and window is None and bits is None
        self.vocabulary, self.device = network.config.vocabulary, network.device
        self.weight_bytes = self.network.weight_bytes
        self.mute = False  # no logits, but the states at the exit

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        if needs:
            raise InvalidOption(
                f"a view reads no prompt, so it has no states {', '.join(sorted(needs))}; tap the model"
            )
        rows = len(self._model.rows.host)
        if rows != len(prompts):
            raise Incompatible(
                f"a view of a model that is decoding {rows} rows was given {len(prompts)} prompts; "
                "it drafts for that very model, on the same prompts, and begins after it"
            )
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._between, self._drafts = None, 0
        self._forget()
        return Prefill()

    def _choose(self, sinks: int, recent: int) -> tuple[tuple[int, int], Tensor | None]:
        """The window, and the slots of chunks in between, chosen anew now and then; while there is not enough to choose
        from, as many more of the latest entries."""
        if self._chunks is None:
            return (sinks, recent), None
        count, size = self._chunks
        due, self._drafts = self._drafts % self._refresh == 0, self._drafts + 1
        if max(self._model.rows.host) < sinks + recent + (count + 1) * size:
            return (sinks, recent + count * size), None
        if due or self._between is None:
            self.cache_passes += 1
            queries = asked(self._whose, self._model)
            self._between = most_asked(self._model, queries, sinks, recent, count, size)
        return (sinks, recent), self._between

    @property
    def layer_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.network.layers)

    @property
    def cache_bytes(self) -> int:
        """Of entries that it holds copies of."""
        return 0 if self._cache is self._model else self._cache.bytes

    def _forget(self) -> None:
        self._read: Rows | None = None  # the rows that the scratch stands behind; None: nothing is in it
        self._scored = -1
        self._states: list[Tensor] = []

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        first = 0 if since is None else since + 1
        model, rows = self._model, self._model.rows
        if since is not None and (self._read is not rows or since > self._scored or self._cache.writer is not self):
            since = None
        if since is None:
            self._states = []
            self._gap = 0
            if self._window is not None:
                window, between = self._choose(*self._window)
                self._let_go()
                self._cache, self._left_out = model.window(*window, len(self.network.layers), between)
                if (graphs := self.network.graphs) is not None:
                    self._cache.exact = model.exact
                    _settle(self._cache, graphs.pool)
            elif model.scored >= 0 and model.writer is not self:  # what the model has scored, it may yet keep
                self._gap = rows.pending.shape[1] + model.scored
        cache = self._cache
        ids, places = cache.plan(draft, since, self._gap)
        if self._window is not None:
            places = replace(places, positions=places.positions + self._left_out[:, None])
        self.network.ensure_positions(furthest(model, draft))
        graphs, logits = self.network.graphs, None
        if graphs is not None and places.slots is not None and ids.numel():
            states, logits, found = graphs.run(ids, cache.store, places, {"stream"}, with_logits=not self.mute)
            left = found["stream"]
        else:
            x = self.network.run(self.network.embed(ids), cache.store, places)
            states, left = self.network.final_norm(x, len(ids)), x.view(*ids.shape, x.shape[1])
        cache.writer, self._read, self._scored = self if not self._gap else cache.writer, rows, draft.size
        self._states.append(left)
        if self.mute:  # somebody else says something from the states that leave here
            tap = f"layer.{len(self.network.layers) - 1}"
            hidden = {tap: behind(left.to(self.network.dtype), rows, draft, first, since)}
            return Scores(draft, self._pipeline, rows.committed, left[:, :0], hidden, first)
        if logits is not None:
            said = behind(logits, rows, draft, first, since)
            return Scores(draft, self._pipeline, rows.committed, said, {}, first)
        states = behind(states, rows, draft, first, since)
        return scores(self.network, states, draft, self._pipeline, rows.committed, {}, first)

    @torch.no_grad()
    def recall(self, texts: Prompts, count: int) -> Tensor:
        """What it would have said ahead of each of the last `count` committed tokens, as in outrider.core.protocol."""
        if self._window is not None:
            raise Incompatible("a view through a window does not look back; recall is for views that see every entry")
        self._forget()
        with replayed(self._model, texts, count) as (ids, places):
            self.network.ensure_positions(max(map(len, texts)) + 1)
            x = self.network.run(self.network.embed(ids), self._model.store, places)
            return self.network.logits(self.network.final_norm(x, len(ids)))

    def carry(self) -> Carry | None:
        """For the model to go on from; None where this view computes something else than its first layers."""
        if not self._whole or not self._states or self._gap or self._read is None:
            return None
        return Carry(self, self._read, len(self.network.layers), torch.cat(self._states, 1))

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        """The rows are the model's to move; only what penalties remember is noted."""
        self._pipeline.commit(committed(draft, verdict, count))
        self._forget()

    def mark(self) -> object:
        return copy.copy(self._pipeline)

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, LogitsPipeline)
        self._pipeline = copy.copy(mark)
        self._forget()

    def end(self) -> None:
        self._forget()
        self._let_go()

    def _let_go(self) -> None:
        """Of a copy of what is within the window."""
        if self._cache is not self._model:
            self._cache.end()
        self._cache = self._model


def _settle(cache: Cache, stills: GraphPool) -> None:
    """A cache whose store stands where the last one stood, so that passes over it may be recorded."""
    whole = stills.borrow(tuple(cache.store.shape), cache.dtype)
    whole[:, :, :, : cache.store.shape[3]] = cache.store
    cache.store, cache.pool = whole, stills


def _without(layers: Collection[Layer], skip: Collection[str]) -> list[Layer]:
    """Layers, some of whose halves are left out."""
    found = list(layers)
    for name in skip:
        parts = re.fullmatch(r"(attention|mlp)\.(\d+)", name)
        if parts is None or int(parts[2]) >= len(found):
            raise InvalidOption(
                f"there is no sublayer '{name}' to skip; they are attention.0, mlp.0 to attention.{len(found) - 1}, "
                f"mlp.{len(found) - 1}"
            )
        index = int(parts[2])
        layer = found[index]
        found[index] = replace(layer, use_attention=False) if parts[1] == "attention" else replace(layer, use_mlp=False)
    return found


def furthest(cache: Cache, draft: Draft) -> int:
    """A bound on the positions that a draft asks for."""
    reached = max(cache.rows.host) + cache.rows.pending.shape[1] + 1
    if draft.positions is None or not draft.size:
        return reached + draft.tree.depth
    return reached + (int(draft.positions.max()) if cache.exact else 1024)


def behind(states: Tensor, rows: Rows, draft: Draft, first: int, since: int | None) -> Tensor:
    """States [B, Q, D] of everything fed -> [B, R, D] behind the root and the nodes, from row `first` on."""
    wait = rows.pending.shape[1]
    if since is not None:
        return states
    if wait == 1:
        return states[:, first:]
    nodes = torch.arange(wait, wait + draft.size, device=states.device).expand(len(states), -1)
    index = torch.cat([rows.waiting[:, None] - 1, nodes], 1)[:, first:]
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[2]))


def scores(
    network: Network,
    states: Tensor,
    draft: Draft,
    pipeline: LogitsPipeline,
    lengths: Tensor,
    hidden: Mapping[str, Tensor],
    first: int,
) -> Scores:
    """Scores from normed states [B, R, D]: all logits at once while they are few, else those of the rows asked for."""
    if states.shape[0] * states.shape[1] * network.config.vocabulary <= _DENSE:
        return Scores(draft, pipeline, lengths, network.logits(states), hidden, first)

    @torch.no_grad()
    def some(rows: Tensor, only: slice = slice(None)) -> Tensor:
        index = (rows - first)[..., None].expand(-1, -1, states.shape[2])
        return network.logits(states[only].gather(1, index))

    return Scores(draft, pipeline, lengths, some, hidden, first)
