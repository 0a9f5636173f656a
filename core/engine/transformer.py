"""A small decoder of our own as a target: prompts are read in pieces, drafts in one pass over their whole tree.

Knows drafts and distributions through the protocol; where things stand is the cache's affair, what is computed the
network's. `Decoder.random` makes one out of a seed, for tests and for measuring; weights of others come through
outrider.core.engine.checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.device import upload
from outrider.core.distribution import Distribution, LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.captured_rules import CapturedRule
from outrider.core.engine.kv_cache.cache import Cache, Rows
from outrider.core.engine.kv_cache.int8 import slot
from outrider.core.engine.layer_subset import likeness
from outrider.core.engine.linear import fastest
from outrider.core.engine.network import Network, random_network
from outrider.core.engine.self_draft_views import Carry, View, behind, furthest, scores
from outrider.core.engine.types import Config, PassLayout
from outrider.core.errors import InvalidOption, unknown
from outrider.core.protocol import PREFILL_CHUNK, Prefill, Prompts, Rule, Scores

__all__ = ["Config", "Decoder"]

_PADDED = 1.2  # how much of a batch may be padding before rows are read one by one, on a CPU


@dataclass(frozen=True, eq=False)
class Mark:
    """A place to rewind to."""

    rows: Rows
    pipeline: LogitsPipeline


class Decoder:
    """A network with its cache. Hidden states can be tapped at "embedding", "layer.0" to "layer.{L - 1}" (what leaves
    that layer) and "last" (normed, what the output layer reads); the prefill holds them for all prompt tokens but the
    last of each row, which is the first root and is read with the first draft."""

    rollback = True
    reads_embeddings = True

    def __init__(self, network: Network, *, cache_bits: int | None = None) -> None:
        """Keys and values are kept in the weights' precision, or in 8 bits."""
        if cache_bits not in (None, 8):
            raise InvalidOption(
                f"a cache of {cache_bits} bits is not to be had; there are those of 8, and of the weights'"
            )
        self.network = network
        self.config = network.config
        self.vocabulary = network.config.vocabulary
        self.device = network.device
        self.weight_bytes = network.weight_bytes
        cfg = network.config
        wide, kept = (cfg.head_dim, network.dtype) if cache_bits is None else (slot(cfg.head_dim), torch.int8)
        self.cache = Cache((cfg.layers, 2 * cfg.kv_heads, wide), kept, network.device)
        self._taps: frozenset[str] = frozenset()
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
        """Seeded random weights, the same in every precision; logits have a spread of `gain`."""
        return cls(random_network(config, seed, dtype=dtype, device=device, gain=gain).map_linears(fastest))

    @property
    def taps(self) -> tuple[str, ...]:
        """The names of hidden states that can be asked for."""
        return ("embedding", *(f"layer.{index}" for index in range(self.config.layers)), "last")

    @torch.no_grad()
    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._tapped(needs)
        longest = max(map(len, prompts))
        self._fits(longest)
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self.cache.begin(prompts)
        self.network.ensure_positions(longest)
        lengths = [len(prompt) - 1 for prompt in prompts]
        if self.cache.exact and len(prompts) * longest > _PADDED * sum(map(len, prompts)):
            read = [self._read(slice(row, row + 1), length) for row, length in enumerate(lengths)]
            whole = {
                tap: [F.pad(one[tap], (0, 0, 0, longest - 1 - one[tap].shape[1])) for one in read] for tap in needs
            }
            hidden = {tap: torch.cat(parts) for tap, parts in whole.items()}
        else:
            hidden = self._read(slice(0, len(prompts)), longest - 1)
        self.cache.prefilled(prompts)
        return Prefill(hidden, self)

    def _tapped(self, needs: frozenset[str]) -> None:
        for tap in sorted(needs):
            if tap not in self.taps:
                raise unknown("hidden tap", tap, self.taps)
        self._taps = needs

    def _fits(self, length: int) -> None:
        if length > self.config.context:
            raise InvalidOption(
                f"a prompt has {length} tokens and the model's context is {self.config.context}; shorten the prompt"
            )

    def _read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """The first tokens of some rows' prompts -> the hidden states asked for, [B, length, D]."""
        found: dict[str, list[Tensor]] = {tap: [] for tap in self._taps}
        for start in range(0, length, PREFILL_CHUNK):
            self._piece(rows, *self.cache.chunk(start, min(start + PREFILL_CHUNK, length), rows), found)
        return self._joined(found, rows.stop - rows.start)

    def _piece(self, rows: slice, ids: Tensor, places: PassLayout, found: dict[str, list[Tensor]]) -> None:
        """Read ids [B, Q] of some rows' prompts."""
        x = self.network.run(self.network.embed(ids), self.cache.store[:, rows], places, found)
        if "last" in found:
            self.network.final_norm(x, len(ids), found)

    def _joined(self, found: dict[str, list[Tensor]], rows: int) -> dict[str, Tensor]:
        nothing = torch.zeros(rows, 0, self.config.hidden_size, dtype=self.network.dtype, device=self.device)
        return {tap: torch.cat(parts, 1) if parts else nothing for tap, parts in found.items()}

    # ---- rows that come and go

    @property
    def slot_bytes(self) -> int:
        return self.cache.slot_bytes

    def open(self, sampling: Sampling, needs: frozenset[str] = frozenset()) -> None:
        """Begin with no rows."""
        self._tapped(needs)
        self._pipeline = LogitsPipeline(sampling, [], self.vocabulary, self.device)
        self.cache.open()

    def arrange(self, order: Sequence[int], width: int) -> None:
        """Row i is from now on what row order[i] was, or an empty one; see outrider.core.protocol.BatchedTarget."""
        self._pipeline.arrange(order)
        self.cache.arrange(order, width)

    @torch.no_grad()
    def enter(self, row: Callable[[], int], prompt: Sequence[int]) -> Generator[None, None, Prefill]:
        """Read a prompt into a row, in the pieces that it would be read in alone."""
        self._fits(len(prompt))
        self.network.ensure_positions(len(prompt))
        self._pipeline.enter(row(), prompt)
        found: dict[str, list[Tensor]] = {tap: [] for tap in self._taps}
        length = len(prompt) - 1
        for start in range(0, length, PREFILL_CHUNK):
            if start:
                yield
            stop, here = min(start + PREFILL_CHUNK, length), row()
            ids = upload(prompt[start:stop], self.device, torch.long)[None]
            self._piece(slice(here, here + 1), ids, self.cache.stretch(start, stop), found)
            self.cache.stand(here, stop, prompt[stop])
        self.cache.stand(row(), length, prompt[-1])
        return Prefill(self._joined(found, 1))

    def leave(self, row: int) -> None:
        self.cache.stand(row, 0, 0)

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        first = 0 if since is None else since + 1
        cache, network = self.cache, self.network
        if since is not None and (since > cache.scored or cache.writer is not self):
            since = None  # somebody else has written there: read it again
        carry = draft.carry if since is None else None
        ids, places = cache.plan(draft, since)
        network.ensure_positions(furthest(cache, draft))
        resumes = isinstance(carry, Carry) and carry.fits(cache, self._taps)
        graphs = None if resumes or draft.embeddings is not None or network.before_layer is not None else network.graphs
        logits: Tensor | None = None
        if graphs is not None and places.slots is not None and ids.numel():
            states, logits, hidden = graphs.run(ids, cache.store, places, self._taps)
        else:
            found: dict[str, list[Tensor]] = {tap: [] for tap in self._taps}
            if isinstance(carry, Carry) and resumes:
                x = self._resume(carry, ids, places)
                x = network.run(x, cache.store, places, found, (carry.layer, self.config.layers))
            else:
                x = network.run(self._embed(ids, draft), cache.store, places, found)
            states = network.final_norm(x, len(ids), found)
            hidden = {tap: parts[0] for tap, parts in found.items()}
        cache.scored, cache.writer = draft.size, self
        hidden = {tap: behind(part, cache.rows, draft, first, since) for tap, part in hidden.items()}
        if logits is not None:
            logits = behind(logits, cache.rows, draft, first, since)
            return Scores(draft, self._pipeline, cache.rows.committed, logits, hidden, first)
        states = behind(states, cache.rows, draft, first, since)
        return scores(network, states, draft, self._pipeline, cache.rows.committed, hidden, first)

    @torch.no_grad()
    def draw_chain(self, numbers: np.ndarray) -> tuple[Tensor, Distribution] | None:
        """A chain behind the root of a single row, in one call: tokens [1, N], each drawn with one of the uniform
        numbers [N], and their distributions. All tokens but the last are then scored. None: one pass per token is
        needed."""
        rows, chains, sampling = self.cache.rows, self.network.native_chain, self._pipeline.sampling
        usual = type(self._pipeline) is LogitsPipeline and sampling.plain and type(self).score is Decoder.score
        if chains is None or not usual or self._taps or len(rows.host) > 1:
            return None
        wait, steps = rows.pending.shape[1], len(numbers)
        self.cache.reserve(wait + steps)
        self.network.ensure_positions(rows.host[0] + wait + steps)
        by, told = None if sampling.greedy else numbers, self.network.conditioning_of(0)
        tokens, distributions = chains.draw(
            rows.pending[0], rows.host[0], self.cache.store, steps, told, by, sampling.temperature
        )
        self.cache.scored, self.cache.writer = steps - 1, self
        if distributions is None:
            return tokens[None], Distribution.point(tokens[None], self.vocabulary)
        return tokens[None], Distribution(distributions[None], None, self.vocabulary)

    def _embed(self, ids: Tensor, draft: Draft) -> Tensor:
        """Ids [B, Q], the last of which are the draft's, -> [B Q, D]; a draft may bring what some of them stand for."""
        x, count = self.network.embed(ids), min(draft.size, ids.shape[1])
        if draft.embeddings is None or not count:
            return x
        place = F.pad(draft.tokens[:, -count:] - self.vocabulary, (ids.shape[1] - count, 0), value=-1).flatten()
        brought = draft.embeddings.to(x.dtype)[place.clamp(0, len(draft.embeddings) - 1)]
        return torch.where((place >= 0)[:, None], brought, x)

    def _resume(self, carry: Carry, ids: Tensor, places: PassLayout) -> Tensor:
        """States behind the layer that a view left off at: its own, and those of nodes that it has not read."""
        known = carry.states[:, : ids.shape[1]]
        if known.shape[1] == ids.shape[1]:
            return known.flatten(0, 1)
        rest, where = ids[:, known.shape[1] :], places.skip(known.shape[1])
        states = self.network.run(self.network.embed(rest), self.cache.store, where, None, (0, carry.layer))
        return torch.cat([known, states.view(*rest.shape, -1)], 1).flatten(0, 1)

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
        """The same model seen cheaper, as a drafter for itself: see View."""
        return View(
            self.network, self.cache, skip=skip, exit=exit, window=window, chunks=chunks, refresh=refresh, bits=bits
        )

    @property
    def context(self) -> int:
        """Tokens that a row may have."""
        return self.config.context

    @property
    def sublayers(self) -> tuple[str, ...]:
        """The names of what a view may skip."""
        return tuple(f"{part}.{index}" for index in range(self.config.layers) for part in ("attention", "mlp"))

    @torch.no_grad()
    def likeness(self, texts: Prompts, count: int) -> Tensor:
        """[B, sublayers] cosine of what enters and what leaves each, averaged over the last `count` tokens read."""
        return likeness(self.network, self.cache, texts, count)

    def captured(self, rule: Rule) -> Rule:
        """The rule, recorded if passes are."""
        graphs = self.network.graphs
        return rule if graphs is None or isinstance(rule, CapturedRule) else CapturedRule(rule, graphs.rules)

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        self._pipeline.commit(self.cache.keep(draft, verdict, count))

    def mark(self) -> object:
        return Mark(self.cache.mark(), copy.copy(self._pipeline))

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, Mark)
        self.cache.rewind(mark.rows)
        self._pipeline = copy.copy(mark.pipeline)

    def end(self) -> None:
        self.cache.end()
