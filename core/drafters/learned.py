"""Drafters that were trained on their target: what they read of it, and how their guesses become drafts.

What they guess with (a pupil: heads, a feature-level decoder, a block drafter) is read like a small target of its own
beside the big one: `Follower` feeds it each committed token with the target's state behind the token before, and cuts
its cache back as the target's is cut. Chains, sampled trees and dynamic trees are then those of any draft model.
Knows states, tokens and laws; nothing of how a pupil computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.core.dice import Dice
from outrider.core.draft import Draft, Tree, Verdict
from outrider.core.drafters.model import DraftModel, DynamicTree, SampledTree, TopKTree
from outrider.core.engine.block import Angles, Sight, Words, settled
from outrider.core.engine.cache import Cache, Rows
from outrider.core.engine.graphs import Stills
from outrider.core.engine.network import Config, Places
from outrider.core.engine.views import furthest
from outrider.core.errors import InvalidOption, unknown
from outrider.core.laws import Law, Lawmaker, Sampling, to_law
from outrider.core.policies import Policy, Risk
from outrider.core.shapes import chain, depths, rerank, sequoia
from outrider.core.target import Itself, Prefill, Prompts, Scores

GROWTHS = ("chain", "tree", "dynamic", "sampled")
_PIECE = 512  # prompt tokens a pass
_TYPICAL = (0.5, 0.13, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)  # acceptance by place among siblings, until it is measured


class Mind(Protocol):
    """What a pupil offers to draft with. S is as wide as it likes."""

    needs: frozenset[str]
    taps: tuple[str, ...]  # in the order in which it reads them, side by side
    words: Words
    grow: str  # how its paper drafts: one of GROWTHS
    depth: int | None  # how far it can guess; None: as far as one likes
    once: bool  # are all its guesses made in one go, whatever is drafted?
    cached: int  # layers that attend to what was read before
    form: Config  # of their heads
    pass_bytes: int  # of weights, that one pass reads

    def open(self, features: Tensor, tokens: Tensor, sight: Sight) -> Tensor: ...  # [B,P,F], [B,P] -> [B,P,S]
    def logits(self, states: Tensor) -> Tensor: ...  # [..., S] -> [..., R] about the token that follows


class Sequel(Mind, Protocol):
    """Guesses token after token: states [B,n,S] of parents and their children's tokens [B,n] on a level -> [B,n,S]."""

    def step(self, states: Tensor, tokens: Tensor, sight: Sight, level: int) -> Tensor: ...


class Ahead(Mind, Protocol):
    """Guesses several places at once: the state [B,S] of the root and what it can see -> [B,K,S'], whose logits are
    about places 1 to K; if they are not all made at once, [B,1,S'] to step on from."""

    def ahead(self, state: Tensor, sight: Sight) -> Tensor: ...


class _Reduced(Lawmaker):
    """Makes laws over the whole vocabulary of logits over some ids."""

    ids: Tensor | None = None

    def law(self, logits: Tensor, path: Tensor | None = None) -> Law:
        if self.ids is None:
            return super().law(logits, path)
        if self.sampling.remembers:
            whole = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
            return super().law(whole.index_copy_(-1, self.ids, logits), path)
        law = to_law(logits, self.sampling)
        tokens = self.ids.expand_as(law.probs) if law.tokens is None else self.ids[law.tokens]
        return Law(law.probs, tokens, self.vocabulary)


def reduced(
    sampling: Sampling, prompts: Prompts, vocabulary: int, device: torch.device, ids: Tensor | None
) -> Lawmaker:
    """Laws of logits over some ids; None: over all."""
    made = _Reduced(sampling, prompts, vocabulary, device)
    made.ids = ids
    return made


class Follower:
    """A pupil as a target that drafts: it reads what was committed together with the target's states, and guesses on
    from its own. `listen` brings it the states; nodes are scored level by level, as they are grown."""

    rollback = True

    def __init__(self, pupil: Any) -> None:
        self.pupil = pupil
        self.vocabulary = pupil.words.known
        weights = pupil.words.embedding
        self.dtype, self.device = weights.dtype, weights.device
        self.weight_bytes = pupil.pass_bytes
        form: Config = pupil.form
        self.cache = Cache((pupil.cached, 2 * form.kv_heads, form.head_dim), self.dtype, self.device)
        self.angles = Angles(form)
        self._stills: Stills | None = getattr(pupil, "stills", None)
        if self._stills is not None:
            self._stills.serve(self.cache)
        self._heard: Mapping[str, Tensor] = {}
        self.whole: Itself | None = None  # the target itself, where it can be seen cheaper

    def listen(self, hidden: Mapping[str, Tensor]) -> None:
        """The states of a prefill before `begin`, of scores before `keep`."""
        self._heard = hidden

    def _features(self) -> Tensor:
        """What was heard, taps side by side [B, R, F]."""
        taps = [self._heard[tap] for tap in self.pupil.taps]
        return (taps[0] if len(taps) == 1 else torch.cat(taps, -1)).to(self.dtype)

    @torch.no_grad()
    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        """Read the prompts. The first token has no state before it: it is left out, unless it is all there is."""
        self._lawmaker = reduced(sampling, prompts, self.vocabulary, self.device, self.pupil.words.vocabulary)
        read = [list(prompt[1:]) or list(prompt) for prompt in prompts]
        features = self._features()
        features = torch.nn.functional.pad(features, (0, 0, 0, max(1 - features.shape[1], 0)))
        lengths = torch.tensor([len(one) for one in prompts], device=self.device)
        features = features * (lengths > 1)[:, None, None]
        self.cache.begin(read)
        if self.pupil.cached:
            longest = max(map(len, read))
            for start in range(0, longest - 1, _PIECE):
                stop = min(start + _PIECE, longest - 1)
                ids, places = self.cache.chunk(start, stop)
                self.pupil.open(features[:, start:stop], ids, self._sight(places, longest))
        self.cache.prefilled(read)
        last = (lengths - 2).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
        self._pending = features.gather(1, last)  # [B, P, F], beside the cache's own pending tokens
        self._states = features.new_zeros(0)
        return Prefill()

    def _sight(self, places: Places, bound: int) -> Sight:
        cos, sin = self.angles(places.positions, bound, self.dtype)
        return Sight(cos, sin, places.mask, self.cache.store, places)

    def _still(
        self, name: str, work: Callable[..., Tensor], given: Sequence[Tensor], sight: Sight, *more: int
    ) -> Tensor:
        """What the pupil makes of tensors in a sight: as one launch, where the device has recordings."""
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
            return work(*first, Sight(cos, sin, mask, sight.store, where, context=context), *more)

        return self._stills.run((name, *more, store.data_ptr(), *store.shape, columns), inputs, still, store)

    def _open(self) -> None:
        """Read what waits; the root's state is the first."""
        nothing = Draft.empty(len(self.cache.rows.host), self.device)
        ids, places = self.cache.plan(nothing, None)
        sight = self._sight(places, furthest(self.cache, nothing))
        states = self._still("open", self.pupil.open, (self._pending, ids), sight)
        root = (self.cache.rows.waiting - 1)[:, None, None]
        self._states = states[:, -1:] if ids.shape[1] == 1 else states.gather(1, root.expand(-1, 1, states.shape[2]))
        if ahead := getattr(self.pupil, "ahead", None):
            self._states = self._still("ahead", ahead, (self._states[:, 0],), self._outlook(places, root))
        self.cache.scored, self.cache.writer = 0, self

    def _outlook(self, places: Places, root: Tensor) -> Sight:
        """What the root sees of all that was read; angles of its own place and of those ahead."""
        positions, mask = places.positions.expand(len(root), -1).gather(1, root[..., 0]), places.mask
        if mask is not None:
            mask = mask.expand(len(root), -1, -1).gather(1, root.expand(-1, 1, mask.shape[2]))
        if self.pupil.cached:
            count = (self.pupil.depth or 0) + 1
            positions = positions + torch.arange(count, device=self.device)
        cos, sin = self.angles(positions, positions.shape[1] + max(self.cache.rows.host) + 64, self.dtype)
        seen = self.cache.store[:, :, :, : places.columns]
        kv = seen.shape[2] // 2
        return Sight(cos, sin, mask, context=[(one[:, :kv], one[:, kv:]) for one in seen.unbind()])

    def _extend(self, draft: Draft, since: int, level: int) -> None:
        """Read the nodes of one level."""
        ids, places = self.cache.plan(draft, since)
        above = draft.tree.parents[:, since:].expand(draft.rows, -1) + 1
        states = self._states.gather(1, above[..., None].expand(-1, -1, self._states.shape[2]))
        sight = self._sight(places, furthest(self.cache, draft))
        grown = self._still("step", self.pupil.step, (states, ids), sight, level)
        self._states = torch.cat([self._states, grown], 1)
        self.cache.scored = draft.size

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        """With `since`, the nodes from there are one level; without it, all are read one by one."""
        first = 0 if since is None else since + 1
        if since is None or since > self.cache.scored:
            self._open()
            if not self.pupil.once:
                for node in range(draft.size):
                    part = Tree(draft.tree.parents[:, : node + 1])
                    self._extend(Draft.guess(draft.tokens[:, : node + 1], part, draft.live), node, part.depth - 1)
        elif not self.pupil.once:
            self._extend(draft, since, draft.tree.depth - 1)
        if self.pupil.once:
            self.cache.scored = draft.size
        levels = torch.nn.functional.pad(draft.tree.depths + 1, (1, 0)).expand(draft.rows, -1)

        @torch.no_grad()
        def some(rows: Tensor) -> Tensor:
            rows = levels.gather(1, rows) if self.pupil.once else rows
            logits: Tensor = self.pupil.logits(self._states.gather(1, rows[..., None].expand(-1, -1, self._width)))
            return logits

        hidden = {} if self.pupil.once else {"states": self._states[:, first:]}
        return Scores(draft, self._lawmaker, self.cache.rows.committed, some, hidden, first)

    @property
    def _width(self) -> int:
        return self._states.shape[2]

    @torch.no_grad()
    def said(self) -> Tensor:
        """The logits of the next places, of a pupil that guesses at once: [B, K, R]."""
        self._open()
        logits: Tensor = self.pupil.logits(self._states)
        return logits

    def upcoming(self) -> Law:
        """The laws of the next places, likewise: [B, K, S]."""
        return self._lawmaker.law(self.said())

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        """What was committed waits to be read with the target's own states; nothing that was guessed stays."""
        before, heard = self.cache.rows, self._features()
        self.cache.scored = min(self.cache.scored, 0)
        self._lawmaker.commit(self.cache.keep(draft, verdict, count))
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
    index = (after.entries - before.entries)[:, None] + torch.arange(width, device=features.device)
    index = torch.where(index < before.waiting[:, None], index, index + (wait - before.waiting)[:, None])
    index = index.clamp(max=features.shape[1] - 1)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))


class FixedChain(DraftModel):
    """A chain of likeliest tokens, as fixed guesses; the policy sees the law of each."""

    def propose(self, room: Tensor, dice: Dice) -> Draft:
        longest = min(self.policy.longest, int(room.max()))
        wanted = torch.minimum(self.policy.start(), self._start(room, dice))
        draft = Draft.empty(len(room), dice.device)
        tokens, belief, live = draft.tokens, draft.tokens.double(), draft.live
        going = wanted > 0
        for depth in range(longest):
            scores = self.score(draft, depth - 1 if depth else None)
            law = scores.laws(torch.full_like(wanted, depth)[:, None])
            if self._tap:
                self.policy.see(scores.hidden[self._tap][:, -1])  # type: ignore[attr-defined]
            going = going & (wanted > depth) & self.policy.more(law.column(0), depth)
            if dice.device.type == "cpu" and not bool(going.any()):
                break
            ids, probs = law.column(0).top(1)
            tokens, belief = torch.cat([tokens, ids], 1), torch.cat([belief, probs.double()], 1)
            live = torch.cat([live, going[:, None]], 1)
            draft = Draft.guess(tokens, Tree.chain(depth + 1, dice.device), live, belief.cumprod(1))
        self._drafted = draft.live.sum(1)
        return draft


class AtOnceTree(TopKTree):
    """A tree of the likeliest tokens of laws that are all known at once: node after node the Cartesian product of
    Medusa (arXiv 2401.10774), or with `nodes` those of the shape that are likeliest together."""

    def __init__(
        self, model: Any, *, shape: Sequence[int], sampling: Sampling | None, nodes: int | None = None
    ) -> None:
        super().__init__(model, shape=shape, sampling=sampling)
        self.nodes = nodes

    def propose(self, room: Tensor, dice: Dice) -> Draft:
        left = self._start(room, dice)
        levels = self.levels(room, dice)
        if not levels:
            return Draft.empty(len(room), dice.device)
        follower: Any = self.model
        self.bytes_read += follower.weight_bytes
        tree = Tree.of(self.parents[: levels[-1][1]], dice.device)
        ids, probs = follower.upcoming().top(tree.width)  # [B, K, W]
        place = (tree.depths * tree.width + tree.ranks).expand(len(room), -1)
        tokens, single = ids.flatten(1).gather(1, place), probs.flatten(1).gather(1, place)
        fits = (tree.depths < left[:, None]) & (tokens >= 0)
        live = (fits[:, None] | ~tree.ancestors).all(-1)
        logs = single.double().clamp(min=1e-30).log()
        value = (tree.ancestors.double() @ logs[..., None])[..., 0]
        if self.nodes is None or self.nodes >= tree.size:
            return Draft.guess(tokens.clamp(min=0), tree, live, value.exp())
        parents = tree.parents.expand(len(room), -1)
        kept, shape = rerank(torch.where(live, value, -torch.inf), parents, self.nodes)
        best = Tree(shape, tree.depth, tree.width)
        return Draft.guess(tokens.gather(1, kept).clamp(min=0), best, live.gather(1, kept), value.gather(1, kept).exp())


class Learned:
    """A trained drafter. `grow` says what it makes of its guesses: a "chain" (drawn, or at temperature 0 the likeliest
    tokens) as long as a policy says; a static "tree" of the likeliest tokens of a `shape`, or of the best shape of so
    many `nodes`; a "dynamic" tree of the `nodes` that are likeliest together, growing from the `width` best of each of
    `depth` levels; or a "sampled" tree of draws. Left out, it is what the pupil's paper does. The policy "confident"
    ends a chain where the pupil itself sees a `risk` of rejection."""

    def __init__(
        self,
        pupil: Any,
        *,
        grow: str | None = None,
        length: int = 5,
        policy: Policy | str = "fixed",
        nodes: int = 16,
        width: int = 4,
        depth: int = 5,
        shape: Sequence[int] | None = None,
        replacement: bool = False,
        sampling: Sampling | None = None,
        risk: float = 0.6,
    ) -> None:
        self.pupil = pupil
        self.grow = pupil.grow if grow is None else grow
        if self.grow not in GROWTHS:
            raise unknown("way to grow drafts", self.grow, GROWTHS)
        if min(length, nodes, width, depth) < 1:
            raise InvalidOption(f"length={length}, nodes={nodes}, width={width}, depth={depth}: each must be 1 or more")
        most = pupil.depth or max(length, depth)
        if policy == "confident":
            if not hasattr(pupil, "confident"):
                raise InvalidOption(f"a {type(pupil).__name__} has no confidence of its own; take policy='confidence'")
            policy = Risk(min(length, most), pupil.confident, risk, tap="states")
        self.model: Any = getattr(pupil, "reader", Follower)(pupil)
        self.vocabulary: int | None = self.model.vocabulary
        self.needs: frozenset[str] = frozenset(getattr(pupil, "reads", pupil.needs))
        soft = sampling or Sampling()  # fixed guesses go by the pupil's own law, whatever the target's temperature is
        self._fixed: Any
        self._drawn: Any = None
        if grower := getattr(pupil, "grower", None):  # has a way of its own
            self._fixed = grower(self.model, nodes=nodes, depth=min(depth, most), sampling=soft)
        elif self.grow == "chain":
            self._fixed = FixedChain(self.model, length=min(length, most), policy=policy, sampling=soft)
            self._drawn = DraftModel(self.model, length=min(length, most), policy=policy, sampling=sampling)
        elif self.grow == "dynamic" and not pupil.once:
            self._fixed = DynamicTree(self.model, nodes=nodes, width=width, depth=min(depth, most), sampling=soft)
        elif self.grow == "dynamic":
            wide = best_shape(6 * nodes, min(depth, most))
            self._fixed = AtOnceTree(self.model, shape=wide, sampling=soft, nodes=nodes)
        else:
            shape = best_shape(nodes, min(depth, most)) if shape is None else shallow(shape, most)
            tree = AtOnceTree if pupil.once else TopKTree
            self._fixed = tree(self.model, shape=shape, sampling=soft)
            if self.grow == "sampled":
                self._drawn = SampledTree(self.model, shape=shape, replacement=replacement, sampling=sampling)
        self._inner = self._fixed

    @property
    def bytes_read(self) -> int:
        return int(self._fixed.bytes_read) + (0 if self._drawn is None else int(self._drawn.bytes_read))

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._inner = self._fixed if self._drawn is None or sampling.greedy else self._drawn
        self.model.listen(prefill.hidden)
        self.model.whole = prefill.itself
        self._inner.begin(prefill, prompts, sampling)

    def propose(self, room: Tensor, dice: Dice) -> Draft:
        draft: Draft = self._inner.propose(room, dice)
        if self.grow != "dynamic" and (carry := getattr(self.model, "carry", None)):  # nodes stand as they were read
            return replace(draft, carry=carry())
        return draft

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, dice: Dice) -> None:
        self.model.listen(scores.hidden)
        self._inner.observe(draft, scores, verdict, dice)

    def end(self) -> None:
        self._inner.end()


@lru_cache
def best_shape(nodes: int, depth: int, acceptance: tuple[float, ...] = _TYPICAL) -> tuple[int, ...]:
    """The tree of so many nodes that is best for an acceptance by place among siblings (Sequoia, arXiv 2402.12374)."""
    return sequoia(acceptance, nodes, depth).shape(nodes, depth) or chain(1)


def shallow(shape: Sequence[int], depth: int) -> tuple[int, ...]:
    """A shape without the nodes below a depth."""
    kept = [node for node, level in enumerate(depths(shape)) if level < depth]
    place = {node: index for index, node in enumerate(kept)} | {-1: -1}
    return tuple(place[shape[node]] for node in kept)


def ready(pupil: Any, target: Any) -> Any:
    """The pupil ready to draft for a target: a copy in its precision, laid out for the machine. The pupil can go on
    learning."""
    module: nn.Module = type(pupil)(target, **pupil.config)
    weights = {name: weight.clone() for name, weight in pupil.state_dict().items()}
    module.load_state_dict(weights, assign=True)  # in the precision they are in
    network = target.network
    made: Any = settled(module, network.dtype, network.device)
    made.stills = None if network.graphs is None else network.graphs.beside()
    return made
