"""Our decoder as a target: prompts are read in chunks, a draft in one pass over its whole tree.

Implements the target protocol with a Network (computation) and a Cache (positions and slots). `Decoder.random` makes
one from a seed, for tests and measurements; outrider.core.engine.checkpoints loads weights of others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.device import upload
from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.captured_rounds import Judge
from outrider.core.engine.captured_rules import CapturedRule
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.captured_growth import followed, grown
from outrider.core.engine.kv_cache.int8 import slot_size
from outrider.core.engine.kv_cache.pages import PagedCache
from outrider.core.engine.kv_cache.prefixes import Prefixes
from outrider.core.engine.kv_cache.rows import Rows, live_tokens
from outrider.core.engine.layer_subset import similarity
from outrider.core.engine.linear import fastest
from outrider.core.engine.native.chain_drawing import DrawsChains
from outrider.core.engine.network import Network, random_network
from outrider.core.engine.self_draft_views import Carry, View, at_nodes, make_scores, position_bound
from outrider.core.engine.types import Config, PassLayout
from outrider.core.errors import InvalidOption, unknown
from outrider.core.protocol import PREFILL_CHUNK, Judged, Prefill, Prompts, Reading, Rule, Scores
from outrider.core.rng import CounterRNG

__all__ = ["Config", "Decoder"]

_MAX_PADDING = 1.2  # on a CPU, prompts are read row by row if padding would make the batch larger than this factor


@dataclass(frozen=True, eq=False)
class Mark:
    """A state to rewind to."""

    rows: Rows
    pipeline: LogitsPipeline


class Decoder(DrawsChains):
    """A network with its KV cache.

    Hidden states are available at the taps "embedding", "layer.0" to "layer.{L - 1}" (a layer's output) and "last" (the
    normed input of the output layer). The prefill returns them for all prompt tokens but the last of each row, which is
    the first root and is read together with the first draft."""

    rollback = True
    reads_embeddings = True

    def __init__(self, network: Network, *, cache_bits: int | None = None, paged: bool | None = None) -> None:
        """`cache_bits`: 8, or None to keep keys and values in the weights' precision. `paged`: whether rows of a
        continuous batch share their memory by pages; None: where the passes' kernels read them."""
        if cache_bits not in (None, 8):
            raise InvalidOption(
                f"a cache of {cache_bits} bits is not available; choose 8, or None for the weights' precision"
            )
        self.network, self.config, self.vocabulary = network, network.config, network.config.vocabulary
        self.device, self.weight_bytes = network.device, network.weight_bytes
        cfg = network.config
        size, dtype = (cfg.head_dim, network.dtype) if cache_bits is None else (slot_size(cfg.head_dim), torch.int8)
        made = PagedCache if (network.reads_lengths(dtype) if paged is None else paged) else Cache
        self.cache = made((cfg.layers, 2 * cfg.kv_heads, size), dtype, network.device)
        self.cache.with_keys, self.cache.context = any(cfg.variant.windows), cfg.context
        self.prefixes = Prefixes(self.cache, answers=not network.reads_apart)
        self._reading = False  # whether `score` reads a prompt
        self._taps: frozenset[str] = frozenset()
        self._judge: Judge | None = None
        if network.graphs is not None:
            self.cache.pool = network.graphs.pool

    @classmethod
    def random(
        cls,
        config: Config,
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        gain: float = 4.0,
    ) -> Decoder:
        """Seeded random weights, the same in every precision; logits have a standard deviation of about `gain`."""
        return cls(random_network(config, seed, dtype=dtype, device=device, gain=gain).map_linears(fastest))

    @property
    def taps(self) -> tuple[str, ...]:
        """The names of the hidden states that can be requested."""
        return ("embedding", *(f"layer.{index}" for index in range(self.config.layers)), "last")

    @torch.no_grad()
    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._set_taps(needs)
        longest = max(map(len, prompts))
        self._check_length(longest)
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self.prefixes.open(needs)
        self.cache.begin(prompts)
        self.network.ensure_positions(longest, self.cache.long)
        lengths = [len(prompt) - 1 for prompt in prompts]
        if self.cache.exact and len(prompts) * longest > _MAX_PADDING * sum(map(len, prompts)):
            rows = [self._read(slice(row, row + 1), length) for row, length in enumerate(lengths)]
            padded = {
                tap: [F.pad(row[tap], (0, 0, 0, longest - 1 - row[tap].shape[1])) for row in rows] for tap in needs
            }
            hidden = {tap: torch.cat(states) for tap, states in padded.items()}
        else:
            hidden = self._read(slice(0, len(prompts)), longest - 1)
        self.cache.set_prefilled(prompts)
        return Prefill(hidden, self)

    def _set_taps(self, needs: frozenset[str]) -> None:
        for tap in sorted(needs):
            if tap not in self.taps:
                raise unknown("hidden tap", tap, self.taps)
        self._taps = needs

    def _check_length(self, length: int) -> None:
        if length > self.config.context:
            raise InvalidOption(
                f"a prompt has {length} tokens and the model's context is {self.config.context}; shorten the prompt"
            )

    def _read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """Read the first `length` tokens of these rows' prompts; returns the tapped states [B, length, D]."""
        tapped: dict[str, list[Tensor]] = {tap: [] for tap in self._taps}
        for start in range(0, length, PREFILL_CHUNK):
            self._read_chunk(rows, *self.cache.prompt_chunk(start, min(start + PREFILL_CHUNK, length), rows), tapped)
        return self._joined(tapped, rows.stop - rows.start)

    def _read_chunk(self, rows: slice, ids: Tensor, layout: PassLayout, tapped: dict[str, list[Tensor]]) -> None:
        store, layout = self.cache.part(rows, replace(layout, reading=True))
        x = self.network.run(self.network.embed(ids), store, layout, tapped)
        if "last" in tapped:
            self.network.final_norm(x, len(ids), tapped)

    def _joined(self, tapped: dict[str, list[Tensor]], rows: int) -> dict[str, Tensor]:
        empty = torch.zeros(rows, 0, self.config.hidden_size, dtype=self.network.dtype, device=self.device)
        return {tap: torch.cat(chunks, 1) if chunks else empty for tap, chunks in tapped.items()}

    # ---- continuous batching

    @property
    def slot_bytes(self) -> int:
        return self.cache.slot_bytes

    def open(self, sampling: Sampling, needs: frozenset[str] = frozenset()) -> None:
        """Begin without rows."""
        self._set_taps(needs)
        self._pipeline = LogitsPipeline(sampling, [], self.vocabulary, self.device)
        self.prefixes.open(needs)
        self.cache.open()

    def arrange(self, order: Sequence[int], width: int) -> None:
        """Make row i the former row order[i], or an empty row; see outrider.core.protocol.BatchedTarget."""
        self._pipeline.arrange(order)
        self.prefixes.arrange(order)
        self.cache.arrange(order, width)

    @property
    def page(self) -> int | None:
        return self.cache.page

    def provide(self, rows: int, slots: int | None) -> None:
        self.cache.provide(rows, slots)

    @torch.no_grad()
    def enter(self, row: Callable[[], int], prompt: Sequence[int]) -> Generator[int, None, Prefill]:
        """Read what can't be copied of a prompt (see Prefixes) into a row, in the same chunks as when it is decoded
        alone; yields the size of each before reading it. `row()` returns the current index of the row."""
        self._check_length(len(prompt))
        self.network.ensure_positions(len(prompt), self.cache.long)
        self._pipeline.enter(row(), prompt)
        length = len(prompt) - 1
        conditioned = self.network.conditioning_of(0) is not None
        start, known = (0, {}) if conditioned else self.prefixes.enter(row(), prompt)
        self.cache.hold(row(), len(prompt))
        tapped: dict[str, list[Tensor]] = {tap: [known[tap]] if tap in known else [] for tap in self._taps}
        self.cache.set_row(row(), start, prompt[start])
        while start < length:
            stop = min((start // PREFILL_CHUNK + 1) * PREFILL_CHUNK, length)
            yield stop - start
            index = row()
            ids = upload(prompt[start:stop], self.device, torch.long)[None]
            self._read_chunk(slice(index, index + 1), ids, self.cache.sequential_layout(start, stop), tapped)
            self.cache.set_row(index, stop, prompt[stop])
            self.prefixes.read(index, stop)
            start = stop
        hidden = self._joined(tapped, 1)
        self.prefixes.finish(row(), hidden)
        return Prefill(hidden)

    def leave(self, row: int) -> None:
        self.prefixes.leave(row)
        self.cache.free(row)

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        first = 0 if since is None else since + 1
        cache, network = self.cache, self.network
        if since is not None and (since > cache.scored or cache.scratch_owner is not self):
            since = None  # the scratch was overwritten: read the whole draft again
        carry = draft.carry if since is None else None
        ids, layout = cache.plan(draft, since, lengths=network.reads_lengths(cache.store.dtype))
        network.ensure_positions(position_bound(cache, draft), cache.long)
        live = live_tokens(cache.rows, draft) if since is None else None
        layout = replace(layout, live=live, reading=self._reading)
        resumes = isinstance(carry, Carry) and carry.usable(cache, self._taps)
        graphs = None if resumes or draft.embeddings is not None or network.before_layer is not None else network.graphs
        logits: Tensor | None = None
        if graphs is not None and layout.slots is not None and ids.numel():
            states, logits, hidden = graphs.run(ids, cache.store, layout, self._taps)
        else:
            tapped: dict[str, list[Tensor]] = {tap: [] for tap in self._taps}
            if isinstance(carry, Carry) and resumes:
                x = self._resume(carry, ids, layout)
                x = network.run(x, cache.store, layout, tapped, (carry.layer, self.config.layers))
            else:
                x = network.run(self._embed(ids, draft), cache.store, layout, tapped)
            states = network.final_norm(x, len(ids), tapped)
            hidden = {tap: chunks[0] for tap, chunks in tapped.items()}
        cache.scored, cache.scratch_owner = draft.size, self
        hidden = {tap: at_nodes(states, cache.rows, draft, first, since) for tap, states in hidden.items()}
        if logits is not None:
            logits = at_nodes(logits, cache.rows, draft, first, since)
            return Scores(draft, self._pipeline, cache.rows.committed, logits, hidden, first)
        states = at_nodes(states, cache.rows, draft, first, since)
        if (live := layout.live) is not None:
            live = at_nodes(live[..., None], cache.rows, draft, first, since)[..., 0]
        return make_scores(network, states, draft, self._pipeline, cache.rows.committed, hidden, first, live)

    def read(self, draft: Draft) -> None:
        """Read a chain as tokens of a prompt."""
        self._reading = True
        try:
            self.score(draft)
        finally:
            self._reading = False

    def _draws_chains(self) -> bool:
        return type(self).score is Decoder.score and not self._taps

    def _written(self) -> Cache:
        return self.cache

    def _drew(self, scored: int) -> None:
        self.cache.scored, self.cache.scratch_owner = scored, self

    def _embed(self, ids: Tensor, draft: Draft) -> Tensor:
        """Ids [B, Q], the last of which are the draft's, -> [B Q, D]; ids from the vocabulary's size on are looked up
        in draft.embeddings, if given."""
        x, count = self.network.embed(ids), min(draft.size, ids.shape[1])
        if draft.embeddings is None or not count:
            return x
        index = F.pad(draft.tokens[:, -count:] - self.vocabulary, (ids.shape[1] - count, 0), value=-1).flatten()
        extra = draft.embeddings.to(x.dtype)[index.clamp(0, len(draft.embeddings) - 1)]
        return torch.where((index >= 0)[:, None], extra, x)

    def _resume(self, carry: Carry, ids: Tensor, layout: PassLayout) -> Tensor:
        """The states [B Q, D] after the view's exit layer: those it computed, and new ones for nodes it did not
        read."""
        known = carry.states[:, : ids.shape[1]]
        if known.shape[1] == ids.shape[1]:
            return known.flatten(0, 1)
        unread = ids[:, known.shape[1] :]
        x = self.network.embed(unread)
        states = self.network.run(x, self.cache.store, layout.skip(known.shape[1]), None, (0, carry.layer))
        return torch.cat([known, states.view(*unread.shape, -1)], 1).flatten(0, 1)

    def view(
        self,
        *,
        skip: Collection[str] = (),
        exit: int | None = None,
        window: tuple[int, int] | None = None,
        chunks: tuple[int, int] | None = None,
        refresh: int = 16,
        bits: int | None = None,
    ) -> View:
        """A cheaper variant of this model that shares its weights and cache, to draft for it: see View."""
        return View(
            self.network, self.cache, skip=skip, exit=exit, window=window, chunks=chunks, refresh=refresh, bits=bits
        )

    @property
    def context(self) -> int:
        """The maximum number of tokens in a row."""
        return self.config.context

    @property
    def kept(self) -> dict[object, Any]:
        """What drafters keep of this model between requests: shared by all targets over its weights."""
        return self.network.kept

    @property
    def sublayers(self) -> tuple[str, ...]:
        """The names of the sublayers that a view may skip."""
        return tuple(f"{part}.{index}" for index in range(self.config.layers) for part in ("attention", "mlp"))

    @torch.no_grad()
    def similarity(self, texts: Prompts, count: int) -> Tensor:
        """[B, sublayers] cosine similarity of each one's input and output, averaged over the last `count` tokens."""
        return similarity(self.network, self.cache, texts, count)

    def captured(self, rule: Rule) -> Rule:
        """The rule, captured in CUDA graphs if this model's passes are."""
        graphs = self.network.graphs
        return rule if graphs is None or isinstance(rule, CapturedRule) else CapturedRule(rule, graphs.rules)

    @torch.no_grad()
    def record(
        self,
        key: tuple[object, ...],
        scratch: int,
        given: Sequence[Tensor | None],
        grow: Callable[[Sequence[Tensor | None]], Draft],
    ) -> Draft | None:
        """As outrider.core.protocol.RecordingModel."""
        graphs, sampling, network = self.network.graphs, self._pipeline.sampling, self.network
        if graphs is None or self.device.type == "cpu" or sampling.remembers or network.before_layer is not None:
            return None
        if type(self).score is not Decoder.score:
            return None
        longest = max(self.cache.rows.host) + self.cache.rows.pending.shape[1]
        network.ensure_positions(longest + scratch + 2, self.cache.long)
        with graphs.pool.lock:
            angles = network.angles
            key = (*key, sampling, *sorted(self._taps), angles[0].data_ptr())
            lengths = network.reads_lengths(self.cache.store.dtype)
            return grown(
                graphs.pool, self.cache, key, scratch, given, grow, owner=self, references=angles, lengths=lengths
            )

    @torch.no_grad()
    def judge(
        self, draft: Draft, rule: Rule, rng: CounterRNG, *, nodes: bool, readings: Sequence[Reading] = ()
    ) -> Judged | None:
        graphs, own = self.network.graphs, type(self).score is Decoder.score and type(self).keep is Decoder.keep
        if graphs is None or not own or self.network.before_layer is not None:
            return None
        if self._judge is None or self._judge.graphs is not graphs:
            self._judge = Judge(graphs, self.cache)
        return self._judge.judge(draft, rule, rng, self._pipeline, self._taps, nodes=nodes, readings=readings)

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        if self._judge is not None and self._judge.keep(draft, verdict, count):
            return  # a pipeline that remembers nothing
        if self._updated(draft, verdict, count):
            return
        self._pipeline.commit(self.cache.keep(draft, verdict, count), verdict.known(count))

    def _updated(self, draft: Draft, verdict: Verdict, count: Tensor) -> bool:
        """Whether the cache was updated from a recording."""
        graphs = self.network.graphs
        if graphs is None or self._pipeline.sampling.remembers or type(self).keep is not Decoder.keep:
            return False
        return followed(graphs.pool, self.cache, draft, verdict, count) is not None

    def mark(self) -> object:
        return Mark(self.cache.mark(), copy.copy(self._pipeline))

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, Mark)
        self.cache.rewind(mark.rows)
        self._pipeline = copy.copy(mark.pipeline)

    def end(self) -> None:
        self.prefixes.open(frozenset())
        self.cache.end()
