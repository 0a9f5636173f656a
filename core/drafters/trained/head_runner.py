"""Runs a draft head as a small target.

`HeadRunner` feeds the head each committed token with the target's hidden state of the token before, and rewinds its
cache together with the target's. Independent of how a draft head computes and how its guesses become drafts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.core.distribution import Distribution, LogitsPipeline, Sampling, to_distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.captured_growth import followed, grown
from outrider.core.engine.kv_cache.rows import Rows
from outrider.core.engine.native.draft_tree import Grown
from outrider.core.engine.native.sampled_tree import shape_of
from outrider.core.engine.self_draft_views import position_bound
from outrider.core.engine.trainable.block import Angles, AttentionMask
from outrider.core.engine.trainable.shared_embedding import for_inference
from outrider.core.engine.types import Config, PassLayout
from outrider.core.protocol import DrawnTree, Prefill, Prompts, Scores, SelfDraftable
from outrider.core.training.draft_head import DraftingHead, ParallelHead
from outrider.core.tree import Tree

_PIECE = 512  # prompt tokens per pass


class _Reduced(LogitsPipeline):
    """Distributions over the whole vocabulary from logits over the tokens `ids`."""

    ids: Tensor | None = None

    def distribution(
        self, logits: Tensor, path: Tensor | None = None, bits: Tensor | None = None, *, unscaled: bool = False
    ) -> Distribution:
        if self.ids is None:
            return super().distribution(logits, path, bits, unscaled=unscaled)
        if self.sampling.remembers:
            whole = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
            return super().distribution(whole.index_copy_(-1, self.ids, logits), path, bits, unscaled=unscaled)
        distribution = to_distribution(logits, self.sampling.unscaled if unscaled else self.sampling)
        tokens = (
            self.ids.expand_as(distribution.probs) if distribution.tokens is None else self.ids[distribution.tokens]
        )
        return Distribution(distribution.probs, tokens, self.vocabulary)


def reduced(
    sampling: Sampling, prompts: Prompts, vocabulary: int, device: torch.device, ids: Tensor | None
) -> LogitsPipeline:
    """A pipeline for logits over the tokens `ids`; None: over all."""
    pipeline = _Reduced(sampling, prompts, vocabulary, device)
    pipeline.ids = ids
    return pipeline


class HeadRunner:
    """A draft head as a target: it reads committed tokens together with the target's hidden states, passed by
    `set_hidden`, and draft nodes with its own states, level by level as the draft grows."""

    rollback = True

    def __init__(self, draft_head: DraftingHead) -> None:
        self.draft_head: Any = draft_head  # sequential or parallel, as `parallel` says
        self.vocabulary = draft_head.words.full_vocabulary
        weights = draft_head.words.embedding
        self.dtype, self.device = weights.dtype, weights.device
        self.weight_bytes = draft_head.pass_bytes
        form: Config = draft_head.form
        self.cache = Cache((draft_head.cached_layers, 2 * form.kv_heads, form.head_dim), self.dtype, self.device)
        self.angles = Angles(form)
        self.cache.with_keys, self.cache.context = any(draft_head.windows) and not draft_head.parallel, form.context
        # a captured pass has no positions, from which the mask of a window is made; a parallel head's are in its mask
        self._graph_pool = None if self.cache.with_keys else draft_head.graph_pool
        self.cache.pool = self._graph_pool
        self._native_tree, self._native_heads = draft_head.native_tree(), draft_head.native_heads()
        self._parallel = draft_head if isinstance(draft_head, ParallelHead) else None
        self._hidden: Mapping[str, Tensor] = {}
        self.self_draftable: SelfDraftable | None = None  # the target, if it has views of itself

    def set_hidden(self, hidden: Mapping[str, Tensor]) -> None:
        """The target's hidden states: a prefill's before `begin`, a pass's before `keep`."""
        self._hidden = hidden

    def carry(self) -> object:
        """State for the target to continue from (Draft.carry); None: there is none."""
        return None

    def _features(self) -> Tensor:
        """The taps' hidden states, concatenated [B, R, F]."""
        taps = [self._hidden[tap] for tap in self.draft_head.taps]
        return (taps[0] if len(taps) == 1 else torch.cat(taps, -1)).to(self.dtype)

    @torch.no_grad()
    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        """Read the prompts, without their first tokens, which have no state before them (unless it is the only one)."""
        self._pipeline = reduced(sampling, prompts, self.vocabulary, self.device, self.draft_head.words.vocabulary)
        read = [list(prompt[1:]) or list(prompt) for prompt in prompts]
        width = len(self.draft_head.taps) * self.draft_head.words.hidden_size
        features = (
            self._features()
            if self._hidden
            else torch.zeros(len(prompts), 0, width, dtype=self.dtype, device=self.device)
        )
        features = torch.nn.functional.pad(features, (0, 0, 0, max(1 - features.shape[1], 0)))
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        features = features * (lengths > 1)[:, None, None]
        self.cache.begin(read)
        if self.draft_head.cached_layers:
            longest = max(map(len, read))
            for start in range(0, longest - 1, _PIECE):
                stop = min(start + _PIECE, longest - 1)
                ids, places = self.cache.prompt_chunk(start, stop)
                self.draft_head.open(features[:, start:stop], ids, self._attn_mask(places, longest))
        self.cache.set_prefilled(read)
        last = (lengths - 2).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
        self._pending = features.gather(1, last)  # [B, P, F], beside the cache's own pending tokens
        self._states = features.new_zeros(0)
        return Prefill()

    # ---- continuous batching (outrider.core.protocol.BatchedTarget)

    @property
    def slot_bytes(self) -> int:
        return self.cache.slot_bytes

    def open(self, sampling: Sampling, needs: frozenset[str] = frozenset()) -> None:
        self._pipeline = reduced(sampling, [], self.vocabulary, self.device, self.draft_head.words.vocabulary)
        self.cache.open()
        self._pending = self._states = torch.zeros(0, 0, 0, dtype=self.dtype, device=self.device)

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._pipeline.arrange(order)
        self.cache.arrange(order, width)
        wait, index = self.cache.rows.pending.shape[1], torch.tensor(order, dtype=torch.long, device=self.device)
        more = (0, 0, 0, wait - self._pending.shape[1], 0, 1)  # index -1 selects the padding
        self._pending = torch.nn.functional.pad(self._pending, more)[index]

    @torch.no_grad()
    def enter(self, row: Callable[[], int], prompt: Sequence[int]) -> Generator[int, None, Prefill]:
        """Read a prompt, whose hidden states `set_hidden` was given, into a row at once."""
        place, read = row(), list(prompt[1:]) or list(prompt)
        self._pipeline.enter(place, prompt)
        features, length = self._features(), len(read) - 1
        ids = torch.tensor([read], device=self.device)
        for start in range(0, length if self.draft_head.cached_layers else 0, _PIECE):
            stop = min(start + _PIECE, length)
            places = self.cache.sequential_layout(start, stop)
            attn_mask = replace(self._attn_mask(places, length + 1), store=self.cache.store[:, place : place + 1])
            self.draft_head.open(features[:, start:stop], ids[:, start:stop], attn_mask)
        self.cache.set_row(place, length, read[-1])
        if self._pending.shape[2] != features.shape[2]:  # nothing has been read yet
            self._pending = features.new_zeros(*self.cache.rows.pending.shape, features.shape[2])
        self._pending = self._pending.clone()  # a recording may hold it
        self._pending[place, 0] = features[0, -1] if len(prompt) > 1 else 0.0
        yield from ()
        return Prefill()

    def leave(self, row: int) -> None:
        self.cache.set_row(row, 0, 0)

    # ----

    def _attn_mask(self, places: PassLayout, bound: int) -> AttentionMask:
        cos, sin = self.angles(places.positions, bound, self.dtype)
        return AttentionMask(cos, sin, places.mask, self.cache.store, places, bound=bound)

    def _captured(
        self, name: str, work: Callable[..., Tensor], given: Sequence[Tensor], attn_mask: AttentionMask, *more: int
    ) -> Tensor:
        """A pass of the draft head; replayed as a CUDA graph if there is a graph pool."""
        places, context = attn_mask.layout, attn_mask.context
        if self._graph_pool is None or (places is not None and places.slots is None):
            return work(*given, attn_mask, *more)
        store = self.cache.store
        columns = places.columns if places is not None else context[0][0].shape[2] if context else 0
        inputs = (*given, attn_mask.cos, attn_mask.sin, attn_mask.mask, None if places is None else places.slots)

        def replayed(buffers: Sequence[Tensor | None]) -> Tensor:
            *first, cos, sin, mask, slots = buffers
            assert cos is not None and sin is not None
            where = None if places is None else replace(places, mask=mask, slots=slots)
            return work(*first, AttentionMask(cos, sin, mask, attn_mask.store, where, context=context), *more)

        return self._graph_pool.run((name, *more, store.data_ptr(), *store.shape, columns), inputs, replayed, store)

    def _open(self) -> None:
        """Read the pending tokens; the root's state is the first."""
        nothing = Draft.empty(len(self.cache.rows.host), self.device)
        ids, places = self.cache.plan(nothing, None)
        attn_mask = self._attn_mask(places, position_bound(self.cache, nothing))
        states = self._captured("open", self.draft_head.open, (self._pending, ids), attn_mask)
        root = (self.cache.rows.pending_count - 1)[:, None, None]
        self._states = states[:, -1:] if ids.shape[1] == 1 else states.gather(1, root.expand(-1, 1, states.shape[2]))
        if self._parallel is not None:
            future, root_mask = self._parallel.future_states, self._root_mask(places, root)
            self._states = self._captured("future_states", future, (self._states[:, 0],), root_mask)
        self.cache.scored, self.cache.scratch_owner = 0, self

    def _root_mask(self, places: PassLayout, root: Tensor) -> AttentionMask:
        """What the root attends to, with the rotary angles of its position and of the next ones."""
        positions, mask = places.positions.expand(len(root), -1).gather(1, root[..., 0]), places.mask
        if mask is not None:
            mask = mask.expand(len(root), -1, -1).gather(1, root.expand(-1, 1, mask.shape[2]))
        if self.draft_head.cached_layers:
            count = (self.draft_head.depth or 0) + 1
            positions = positions + self.draft_head.block_offset + torch.arange(count, device=self.device)
        cos, sin = self.angles(positions, positions.shape[1] + max(self.cache.rows.host) + 64, self.dtype)
        seen = self.cache.store[:, :, :, : places.columns]
        kv = seen.shape[2] // 2
        return AttentionMask(cos, sin, mask, context=[(layer[:, :kv], layer[:, kv:]) for layer in seen.unbind()])

    def _extend(self, draft: Draft, since: int, level: int) -> None:
        """Read the nodes of one level."""
        ids, places = self.cache.plan(draft, since)
        above = draft.tree.parents[:, since:].expand(draft.rows, -1) + 1
        states = self._states.gather(1, above[..., None].expand(-1, -1, self._states.shape[2]))
        attn_mask = self._attn_mask(places, position_bound(self.cache, draft))
        grown = self._captured("step", self.draft_head.step, (states, ids), attn_mask, level)
        self._states = torch.cat([self._states, grown], 1)
        self.cache.scored = draft.size

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        """With `since`, the nodes from there on are one level; without it, nodes are read one by one."""
        first = 0 if since is None else since + 1
        if since is None or since > self.cache.scored:
            self._open()
            if not self.draft_head.parallel:
                for node in range(draft.size):
                    part = Tree(draft.tree.parents[:, : node + 1])
                    self._extend(Draft.guess(draft.tokens[:, : node + 1], part, draft.live), node, part.depth - 1)
        elif not self.draft_head.parallel:
            self._extend(draft, since, draft.tree.depth - 1)
        if self.draft_head.parallel:
            self.cache.scored = draft.size
        levels = torch.nn.functional.pad(draft.tree.depths + 1, (1, 0)).expand(draft.rows, -1)

        @torch.no_grad()
        def of_rows(rows: Tensor) -> Tensor:
            rows = levels.gather(1, rows) if self.draft_head.parallel else rows
            logits: Tensor = self.draft_head.logits(self._states.gather(1, rows[..., None].expand(-1, -1, self._width)))
            return logits

        hidden = {} if self.draft_head.parallel else {"states": self._states[:, first:]}
        return Scores(draft, self._pipeline, self.cache.rows.committed, of_rows, hidden, first)

    @torch.no_grad()
    def record(
        self,
        key: tuple[object, ...],
        scratch: int,
        given: Sequence[Tensor | None],
        grow: Callable[[Sequence[Tensor | None]], Draft],
    ) -> Draft | None:
        """As outrider.core.protocol.RecordingModel."""
        pool, cache, sampling = self._graph_pool, self.cache, self._pipeline.sampling
        if pool is None or cache.device.type == "cpu" or sampling.remembers or type(self) is not HeadRunner:
            return None
        bound = max(cache.rows.host) + cache.rows.pending.shape[1] + scratch + (self.draft_head.depth or 0) + 66
        tables = self.angles.tables(bound, self.dtype, self.device)

        def take(state: Sequence[Tensor | None]) -> None:
            assert state[0] is not None
            self._pending = state[0]

        key, state = (*key, sampling, tables[0].data_ptr()), (self._pending,)
        return grown(pool, cache, key, scratch, given, grow, state=state, take=take, owner=self, references=tables)

    @torch.no_grad()
    def grow_tree(self, row: int, depth: int, width: int, floor: float) -> Grown | None:
        """As outrider.core.protocol.TreeGrowing, after reading the row's pending tokens in the same call."""
        tree, cache, sampling = self._native_tree, self.cache, self._pipeline.sampling
        rows, pending = cache.rows, cache.rows.pending_count.tolist()
        if tree is None or sampling != Sampling(end=sampling.end):
            return None
        waiting, behind, block = rows.pending[row, : pending[row]], int(rows.entries[row]), self.draft_head.block
        room = len(waiting) + depth * width
        cache.reserve(room)
        block.ensure_positions(block.runner, behind + room)
        cache.scored, cache.scratch_owner = 0, self
        features, store = self._pending[row, : len(waiting)], cache.store[0, None, row : row + 1]
        return tree.grow(features, waiting, behind, store, depth, width, floor)

    @torch.no_grad()
    def draw_tree(self, row: int, parents: tuple[int, ...], numbers: np.ndarray | None) -> DrawnTree | None:
        """As outrider.core.protocol.TreeDrawing, after reading the row's pending tokens in the same call."""
        tree, heads, cache, sampling = self._native_tree, self._native_heads, self.cache, self._pipeline.sampling
        if (tree is None and heads is None) or not sampling.plain or sampling.greedy or type(self) is not HeadRunner:
            return None
        shape, rows = shape_of(parents), cache.rows
        if shape is None:
            return None
        wait, behind = int(rows.pending_count[row]), int(rows.entries[row])
        if heads is not None:
            drawn = heads.draw(self._pending[row, wait - 1], shape, numbers, sampling.temperature)
        else:
            assert tree is not None
            block, room = self.draft_head.block, wait + shape.inner
            cache.reserve(room)
            block.ensure_positions(block.runner, behind + room)
            features, store = self._pending[row, :wait], cache.store[0, None, row : row + 1]
            waiting = rows.pending[row, :wait]
            drawn = tree.draw(features, waiting, behind, store, shape, numbers, sampling.temperature)
        if drawn is not None:
            cache.scored, cache.scratch_owner = 0, self
        return drawn

    @property
    def _width(self) -> int:
        return self._states.shape[2]

    @torch.no_grad()
    def future_logits(self) -> Tensor:
        """The logits of the next positions [B, K, R], of a draft head that guesses them all at once."""
        self._open()
        logits: Tensor = self.draft_head.logits(self._states)
        return logits

    def future_distributions(self) -> Distribution:
        """The same as distributions [B, K, S]."""
        return self._pipeline.distribution(self.future_logits())

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        """The committed tokens become pending, with the target's hidden states; draft nodes are dropped."""
        self.cache.scored = min(self.cache.scored, 0)
        if (pending := self._followed(draft, verdict, count)) is not None:
            self._pending = pending
            return
        before, features = self.cache.rows, self._features()
        self._pipeline.commit(self.cache.keep(draft, verdict, count), verdict.known(count))
        self._pending = carried(
            before, self.cache.rows, torch.cat([self._pending, _emitting(features, verdict.path)], 1)
        )

    def _followed(self, draft: Draft, verdict: Verdict, count: Tensor) -> Tensor | None:
        """The features of the tokens that are pending after the verdict, and the cache's update, from a recording."""
        if self._graph_pool is None or self._pipeline.sampling.remembers or type(self) is not HeadRunner:
            return None
        taps = [self._hidden[tap] for tap in self.draft_head.taps]

        def work(before: Rows, after: Rows, path: Tensor, more: Sequence[Tensor | None]) -> tuple[Tensor]:
            pending, *states = [each for each in more if each is not None]
            features = (states[0] if len(states) == 1 else torch.cat(states, -1)).to(self.dtype)
            return (carried(before, after, torch.cat([pending, _emitting(features, path)], 1)),)

        made = followed(self._graph_pool, self.cache, draft, verdict, count, more=(self._pending, *taps), work=work)
        return None if made is None else made[0]

    def mark(self) -> object:
        return self.cache.mark()

    def rewind(self, mark: object) -> None:
        """Drop the draft nodes."""
        assert isinstance(mark, Rows) and mark.entries is self.cache.rows.entries
        self.cache.scored = min(self.cache.scored, 0)

    def end(self) -> None:
        self.cache.end()
        self._states = self._pending = torch.zeros(0)
        self._hidden = {}


def _emitting(features: Tensor, path: Tensor) -> Tensor:
    """The features [B, R, F] of the rows after which each token was emitted, along the accepted path [B, D]."""
    rows = torch.nn.functional.pad(path + 1, (1, 0)).clamp(min=0)
    return features.gather(1, rows[..., None].expand(-1, -1, features.shape[2]))


def carried(before: Rows, after: Rows, features: Tensor) -> Tensor:
    """The features of the tokens that are pending now, from those [B, P + D + 1, F] of the formerly pending and of the
    emitted tokens."""
    wait, width = before.pending.shape[1], after.pending.shape[1]
    if len(features) == 1 and before.uniform and after.uniform:
        start = after.host[0] - before.host[0]
        return features[:, start : start + width]
    index = (after.entries - before.entries)[:, None] + torch.arange(width, device=features.device)
    index = torch.where(index < before.pending_count[:, None], index, index + (wait - before.pending_count)[:, None])
    index = index.clamp(max=features.shape[1] - 1)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))


def ready(draft_head: Any, target: Any) -> Any:
    """A copy of the draft head for drafting: in the target's precision, with the fastest weight layout for this
    machine. The original can be trained further."""
    module: nn.Module = type(draft_head)(target, **draft_head.config)
    weights = {name: weight.clone() for name, weight in draft_head.state_dict().items()}
    module.load_state_dict(weights, assign=True)  # in the precision they are in
    network = target.network
    copy: Any = for_inference(module, network.dtype, network.device)
    copy.graph_pool = None if network.graphs is None else network.graphs.separate_pool()
    return copy
