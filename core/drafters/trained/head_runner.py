"""What a trained drafter reads of its target, and how it is read itself.

What it guesses with (a draft head: heads, a feature-level decoder, a block drafter) is read like a small target of its
own beside the big one: `HeadRunner` feeds it each committed token with the target's state behind the token before, and
cuts its cache back as the target's is cut. Knows states, tokens and distributions; nothing of how a draft head
computes, or of what becomes of its guesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.core.distribution import Distribution, LogitsPipeline, Sampling, to_law
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.cuda_graphs import GraphPool
from outrider.core.engine.kv_cache.cache import Cache, Rows
from outrider.core.engine.native.draft_tree import Grown, Levels
from outrider.core.engine.self_draft_views import furthest
from outrider.core.engine.trainable.block import Angles, AttentionMask
from outrider.core.engine.trainable.shared_embedding import Words, settled
from outrider.core.engine.types import Config, Places
from outrider.core.protocol import Prefill, Prompts, Scores, SelfDraftable
from outrider.core.tree import Tree

_PIECE = 512  # prompt tokens a pass


class Mind(Protocol):
    """What a draft head offers to draft with. S is as wide as it likes. Besides, one that guesses token after token has
    `step(states, tokens, sight, level)`: states [B,n,S] of parents and their children's tokens [B,n] on a level ->
    [B,n,S]. One that guesses several places at once has `ahead(state, sight)`: the state [B,S] of the root and what it
    can see -> [B,K,S'], whose logits are about places 1 to K; if they are not all made at once, [B,1,S'] to step on
    from."""

    needs: frozenset[str]
    taps: tuple[str, ...]  # in the order in which it reads them, side by side
    words: Words
    grow: str  # how its paper drafts: one of outrider.core.drafters.trained.drafter.GROWTHS
    depth: int | None  # how far it can guess; None: as far as one likes
    once: bool  # are all its guesses made in one go, whatever is drafted?
    cached: int  # layers that attend to what was read before
    form: Config  # of their heads
    pass_bytes: int  # of weights, that one pass reads

    def open(self, features: Tensor, tokens: Tensor, sight: AttentionMask) -> Tensor: ...  # [B,P,F], [B,P] -> [B,P,S]
    def logits(self, states: Tensor) -> Tensor: ...  # [..., S] -> [..., R] about the token that follows


class _Reduced(LogitsPipeline):
    """Makes distributions over the whole vocabulary of logits over some ids."""

    ids: Tensor | None = None

    def distribution(self, logits: Tensor, path: Tensor | None = None) -> Distribution:
        if self.ids is None:
            return super().distribution(logits, path)
        if self.sampling.remembers:
            whole = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
            return super().distribution(whole.index_copy_(-1, self.ids, logits), path)
        distribution = to_law(logits, self.sampling)
        tokens = (
            self.ids.expand_as(distribution.probs) if distribution.tokens is None else self.ids[distribution.tokens]
        )
        return Distribution(distribution.probs, tokens, self.vocabulary)


def reduced(
    sampling: Sampling, prompts: Prompts, vocabulary: int, device: torch.device, ids: Tensor | None
) -> LogitsPipeline:
    """Distributions of logits over some ids; None: over all."""
    made = _Reduced(sampling, prompts, vocabulary, device)
    made.ids = ids
    return made


class HeadRunner:
    """A draft head as a target that drafts: it reads what was committed together with the target's states, and guesses
    on from its own. `listen` brings it the states; nodes are scored level by level, as they are grown."""

    rollback = True

    def __init__(self, draft_head: Mind) -> None:
        self.draft_head: Any = draft_head  # which of its kinds it is, it says itself
        self.vocabulary = draft_head.words.known
        weights = draft_head.words.embedding
        self.dtype, self.device = weights.dtype, weights.device
        self.weight_bytes = draft_head.pass_bytes
        form: Config = draft_head.form
        self.cache = Cache((draft_head.cached, 2 * form.kv_heads, form.head_dim), self.dtype, self.device)
        self.angles = Angles(form)
        self._stills: GraphPool | None = getattr(draft_head, "stills", None)
        if self._stills is not None:
            self._stills.serve(self.cache)
        levels = getattr(draft_head, "levels", None)
        self._levels: Levels | None = levels() if levels else None
        self._heard: Mapping[str, Tensor] = {}
        self.whole: SelfDraftable | None = None  # the target itself, where it can be seen cheaper

    def listen(self, hidden: Mapping[str, Tensor]) -> None:
        """The states of a prefill before `begin`, of scores before `keep`."""
        self._heard = hidden

    def _features(self) -> Tensor:
        """What was heard, taps side by side [B, R, F]."""
        taps = [self._heard[tap] for tap in self.draft_head.taps]
        return (taps[0] if len(taps) == 1 else torch.cat(taps, -1)).to(self.dtype)

    @torch.no_grad()
    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        """Read the prompts. The first token has no state before it: it is left out, unless it is all there is."""
        self._pipeline = reduced(sampling, prompts, self.vocabulary, self.device, self.draft_head.words.vocabulary)
        read = [list(prompt[1:]) or list(prompt) for prompt in prompts]
        features = self._features()
        features = torch.nn.functional.pad(features, (0, 0, 0, max(1 - features.shape[1], 0)))
        lengths = torch.tensor([len(one) for one in prompts], device=self.device)
        features = features * (lengths > 1)[:, None, None]
        self.cache.begin(read)
        if self.draft_head.cached:
            longest = max(map(len, read))
            for start in range(0, longest - 1, _PIECE):
                stop = min(start + _PIECE, longest - 1)
                ids, places = self.cache.chunk(start, stop)
                self.draft_head.open(features[:, start:stop], ids, self._sight(places, longest))
        self.cache.prefilled(read)
        last = (lengths - 2).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
        self._pending = features.gather(1, last)  # [B, P, F], beside the cache's own pending tokens
        self._states = features.new_zeros(0)
        return Prefill()

    def _sight(self, places: Places, bound: int) -> AttentionMask:
        cos, sin = self.angles(places.positions, bound, self.dtype)
        return AttentionMask(cos, sin, places.mask, self.cache.store, places, bound=bound)

    def _still(
        self, name: str, work: Callable[..., Tensor], given: Sequence[Tensor], sight: AttentionMask, *more: int
    ) -> Tensor:
        """What the draft head makes of tensors in a sight: as one launch, where the device has recordings."""
        places, context = sight.places, sight.context
        if self._stills is None or (places is not None and places.slots is None):
            return work(*given, sight, *more)
        store = self.cache.store
        columns = places.columns if places is not None else context[0][0].shape[2] if context else 0
        inputs = (*given, sight.cos, sight.sin, sight.mask, None if places is None else places.slots)

        def still(buffers: Sequence[Tensor | None]) -> Tensor:
            *first, cos, sin, mask, slots = buffers
            assert cos is not None and sin is not None
            where = None if places is None else replace(places, mask=mask, slots=slots)
            return work(*first, AttentionMask(cos, sin, mask, sight.store, where, context=context), *more)

        return self._stills.run((name, *more, store.data_ptr(), *store.shape, columns), inputs, still, store)

    def _open(self) -> None:
        """Read what waits; the root's state is the first."""
        nothing = Draft.empty(len(self.cache.rows.host), self.device)
        ids, places = self.cache.plan(nothing, None)
        sight = self._sight(places, furthest(self.cache, nothing))
        states = self._still("open", self.draft_head.open, (self._pending, ids), sight)
        root = (self.cache.rows.waiting - 1)[:, None, None]
        self._states = states[:, -1:] if ids.shape[1] == 1 else states.gather(1, root.expand(-1, 1, states.shape[2]))
        if ahead := getattr(self.draft_head, "ahead", None):
            self._states = self._still("ahead", ahead, (self._states[:, 0],), self._outlook(places, root))
        self.cache.scored, self.cache.writer = 0, self

    def _outlook(self, places: Places, root: Tensor) -> AttentionMask:
        """What the root sees of all that was read; angles of its own place and of those ahead."""
        positions, mask = places.positions.expand(len(root), -1).gather(1, root[..., 0]), places.mask
        if mask is not None:
            mask = mask.expand(len(root), -1, -1).gather(1, root.expand(-1, 1, mask.shape[2]))
        if self.draft_head.cached:
            count = (self.draft_head.depth or 0) + 1
            positions = positions + torch.arange(count, device=self.device)
        cos, sin = self.angles(positions, positions.shape[1] + max(self.cache.rows.host) + 64, self.dtype)
        seen = self.cache.store[:, :, :, : places.columns]
        kv = seen.shape[2] // 2
        return AttentionMask(cos, sin, mask, context=[(one[:, :kv], one[:, kv:]) for one in seen.unbind()])

    def _extend(self, draft: Draft, since: int, level: int) -> None:
        """Read the nodes of one level."""
        ids, places = self.cache.plan(draft, since)
        above = draft.tree.parents[:, since:].expand(draft.rows, -1) + 1
        states = self._states.gather(1, above[..., None].expand(-1, -1, self._states.shape[2]))
        sight = self._sight(places, furthest(self.cache, draft))
        grown = self._still("step", self.draft_head.step, (states, ids), sight, level)
        self._states = torch.cat([self._states, grown], 1)
        self.cache.scored = draft.size

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        """With `since`, the nodes from there are one level; without it, all are read one by one."""
        first = 0 if since is None else since + 1
        if since is None or since > self.cache.scored:
            self._open()
            if not self.draft_head.once:
                for node in range(draft.size):
                    part = Tree(draft.tree.parents[:, : node + 1])
                    self._extend(Draft.guess(draft.tokens[:, : node + 1], part, draft.live), node, part.depth - 1)
        elif not self.draft_head.once:
            self._extend(draft, since, draft.tree.depth - 1)
        if self.draft_head.once:
            self.cache.scored = draft.size
        levels = torch.nn.functional.pad(draft.tree.depths + 1, (1, 0)).expand(draft.rows, -1)

        @torch.no_grad()
        def some(rows: Tensor) -> Tensor:
            rows = levels.gather(1, rows) if self.draft_head.once else rows
            logits: Tensor = self.draft_head.logits(self._states.gather(1, rows[..., None].expand(-1, -1, self._width)))
            return logits

        hidden = {} if self.draft_head.once else {"states": self._states[:, first:]}
        return Scores(draft, self._pipeline, self.cache.rows.committed, some, hidden, first)

    @property
    def quick(self) -> bool:
        """Can `tree` be asked?"""
        rows, said = self.cache.rows, self._pipeline.sampling
        return self._levels is not None and rows.even and len(rows.host) == 1 and said == Sampling(end=said.end)

    @torch.no_grad()
    def tree(self, depth: int, breadth: int, floor: float) -> Grown:
        """What waits is read; then as many levels are, each of the likeliest nodes of the level above. All that is
        likely enough behind what was read, as `score` finds it, by one call."""
        levels, cache, block = self._levels, self.cache, self.draft_head.block
        assert levels is not None
        waiting = cache.rows.pending[0]
        room = len(waiting) + depth * breadth
        cache.reserve(room)
        behind = cache.rows.host[0]
        block.reach(block.passes, behind + room)
        cache.scored, cache.writer = 0, self
        return levels.grow(self._pending[0], waiting, behind, cache.store[0, None], depth, breadth, floor)

    @property
    def _width(self) -> int:
        return self._states.shape[2]

    @torch.no_grad()
    def said(self) -> Tensor:
        """The logits of the next places, of a draft head that guesses at once: [B, K, R]."""
        self._open()
        logits: Tensor = self.draft_head.logits(self._states)
        return logits

    def upcoming(self) -> Distribution:
        """The distributions of the next places, likewise: [B, K, S]."""
        return self._pipeline.distribution(self.said())

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        """What was committed waits to be read with the target's own states; nothing that was guessed stays."""
        before, heard = self.cache.rows, self._features()
        self.cache.scored = min(self.cache.scored, 0)
        self._pipeline.commit(self.cache.keep(draft, verdict, count))
        rows = torch.nn.functional.pad(verdict.path + 1, (1, 0)).clamp(min=0)  # behind which each token was emitted
        fresh = heard.gather(1, rows[..., None].expand(-1, -1, heard.shape[2]))
        self._pending = carried(before, self.cache.rows, torch.cat([self._pending, fresh], 1))

    def mark(self) -> object:
        return self.cache.mark()

    def rewind(self, mark: object) -> None:
        """Forget the nodes; what was committed stays read."""
        assert isinstance(mark, Rows) and mark is self.cache.rows
        self.cache.scored = min(self.cache.scored, 0)

    def end(self) -> None:
        self.cache.end()
        self._states = self._pending = torch.zeros(0)
        self._heard = {}


def carried(before: Rows, after: Rows, features: Tensor) -> Tensor:
    """Of the features [B, P + D + 1, F] of what waited and of what was emitted, those of what waits now."""
    wait, width = before.pending.shape[1], after.pending.shape[1]
    if len(features) == 1 and before.even and after.even:
        start = after.host[0] - before.host[0]
        return features[:, start : start + width]
    index = (after.entries - before.entries)[:, None] + torch.arange(width, device=features.device)
    index = torch.where(index < before.waiting[:, None], index, index + (wait - before.waiting)[:, None])
    index = index.clamp(max=features.shape[1] - 1)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))


def ready(draft_head: Any, target: Any) -> Any:
    """The draft head ready to draft for a target: a copy in its precision, laid out for the machine. The draft head can
    go on learning."""
    module: nn.Module = type(draft_head)(target, **draft_head.config)
    weights = {name: weight.clone() for name, weight in draft_head.state_dict().items()}
    module.load_state_dict(weights, assign=True)  # in the precision they are in
    network = target.network
    made: Any = settled(module, network.dtype, network.device)
    made.stills = None if network.graphs is None else network.graphs.beside()
    return made
