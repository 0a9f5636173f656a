"""A smaller model as the drafter: chains, trees of draws, and trees of its likeliest tokens.

The independent draft model of speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)
and its trees. The draft model is any Target: a language model, a table or a cheaper view of the target itself. Over 400
lines, since all these drafters keep the model's cache in step with the target in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outrider.core.device import constant, upload
from outrider.core.distribution import Distribution, Sampling, concatenated
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.drawn_trees import drawn_at_once
from outrider.core.drafters.length_policies import (
    Best,
    Confidence,
    Fixed,
    Policy,
    StatePolicy,
    Window,
    make_policy,
)
from outrider.core.drafters.lookup.trie import Trie, to_draft
from outrider.core.drafters.tree_shapes import branching, depths, rerank, validate
from outrider.core.errors import InvalidOption
from outrider.core.protocol import (
    BatchedTarget,
    ChainDrawing,
    Prefill,
    PrefixSharing,
    Prompts,
    RecordingModel,
    Scores,
    Target,
    TreeGrowing,
)
from outrider.core.rng import CounterRNG, PredrawnRNG, Purpose
from outrider.core.tree import Tree

_IN_ONE_CALL = (Fixed, Confidence, Window, Best)  # policies whose chains the compiled kernels can draw
Growth = Callable[[Tensor, CounterRNG], Draft]  # the room of each row [B], random numbers -> the draft


class _ModelDrafter:
    """Base: a draft model, its sampling settings, and the rows that are still open."""

    needs: frozenset[str] = frozenset()
    _taps = frozenset[str]()  # the hidden states of the model that are read
    _batches = False  # whether rows can enter and leave: not where a row has a state of its own here

    def __init__(self, model: Target, sampling: Sampling | None) -> None:
        self.model, self._sampling = model, sampling
        self.vocabulary: int | None = model.vocabulary
        self.bytes_read = 0

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.model.begin(prompts, self._drafting(sampling), self._taps)
        self._open = torch.ones(len(prompts), dtype=torch.bool, device=self.model.device)

    def _drafting(self, sampling: Sampling) -> Sampling:
        """The settings at which the model drafts for a target that samples like this."""
        return self._sampling or sampling

    # ---- continuous batching (outrider.core.protocol.BatchedDrafter)

    def supports_batching(self) -> bool:
        return self._batches and isinstance(self.model, BatchedTarget)

    def open(self, sampling: Sampling) -> None:
        self._batched().open(self._drafting(sampling), frozenset())
        if isinstance(self.model, PrefixSharing):
            self.model.prefixes.restrict(0)  # rows in use share what they have read

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._batched().arrange(order, width)

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        for _ in self._batched().enter(lambda: row, prompt):
            pass

    def leave(self, row: int) -> None:
        self._batched().leave(row)

    def _batched(self) -> BatchedTarget:
        assert isinstance(self.model, BatchedTarget)
        return self.model

    # ----

    def score(self, draft: Draft, since: int | None) -> Scores:
        self.bytes_read += self.model.weight_bytes
        return self.model.score(draft, since)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self.model.keep(draft, verdict, verdict.kept(self._open))

    def discard_draft(self) -> None:
        self.model.rewind(self.model.mark())

    def end(self) -> None:
        self.model.end()

    def _start(self, room: Tensor, rng: CounterRNG) -> Tensor:
        """Record which rows are open -> room [B] on the random generator's device."""
        room = upload(room, rng.device)
        self._open = room >= 0
        return room

    def _depth(self, most: int, room: Tensor, rng: CounterRNG) -> int:
        """How many levels to draft. On a GPU all, if any row has room for one, so that the end of a text needs no
        recordings of its own; in rows with less room the deeper nodes are dead."""
        longest = max(int(room.max()), 0)
        return most if longest and rng.device.type != "cpu" else min(most, longest)

    def _recorded(
        self, room: Tensor, rng: CounterRNG, scratch: int, settings: tuple[object, ...], depth: int, grow: Growth
    ) -> Draft | None:
        """The draft that `grow` makes of the room [B], at most `depth`, and of random numbers, from one recording of
        all its passes; None where the model makes none."""
        model = self.model
        if (
            rng.device.type == "cpu"
            or depth < 1
            or type(rng) is not CounterRNG
            or not isinstance(model, RecordingModel)
        ):
            return None
        spent = self.bytes_read
        left = constant(tuple(min(count, depth) for count in room.tolist()), rng.device)

        def work(given: Sequence[Tensor | None]) -> Draft:
            assert given[0] is not None
            return grow(given[0], PredrawnRNG(given[1], len(room), rng.device))

        draft = model.record((type(self).__name__, *settings, depth), scratch, (left, rng.tables()), work)
        if draft is not None:
            self.bytes_read = spent + model.weight_bytes * depth
            self._open = constant(tuple(int(count >= 0) for count in room.tolist()), rng.device)
        return draft


class DraftModel(_ModelDrafter):
    """A chain, drawn token by token. A policy decides its length; `threshold`, `last`, `joint`, `max_length`, `cost`
    and `verify` are the policy's settings. The policy "risk" (SpecDec++) applies a trained `head` to the draft model's
    hidden state `tap` (None: to features of the distribution). `sampling` lets the model draw at other settings than
    the target's, which changes the acceptance rate and never the distribution of the output."""

    _batches = True

    def __init__(
        self,
        model: Target,
        *,
        length: int = 5,
        policy: Policy | str = "fixed",
        threshold: float | None = None,
        last: bool | None = None,
        joint: bool | None = None,
        max_length: int | None = None,
        cost: float | None = None,
        verify: Sequence[float] | None = None,
        head: Callable[[Tensor], Tensor] | Mapping[str, Tensor] | None = None,
        tap: str | None = "last",
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(model, sampling)
        stops = {"threshold": threshold, "last": last, "joint": joint}
        settings = {**stops, "max_length": max_length, "cost": cost, "verify": verify}
        reading = {} if head is None else {"head": head, "tap": tap}
        given = {name: value for name, value in settings.items() if value is not None}
        self.policy = make_policy(policy, length, **given, **reading)
        self._drawer = model if isinstance(model, ChainDrawing) and type(self.policy) in _IN_ONE_CALL else None

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._state_policy = self.policy if isinstance(self.policy, StatePolicy) and self.policy.tap else None
        self._taps = frozenset({self._state_policy.tap} if self._state_policy and self._state_policy.tap else ())
        super().begin(prefill, prompts, sampling)
        self.policy.begin(len(prompts), self.model.device)
        self._drafted = constant((0,) * len(prompts), self.model.device)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        max_length = self._depth(self.policy.max_length, room, rng)
        rng.reserve(max_length)
        if type(self.policy) is Fixed and self._state_policy is None:
            growth = partial(self._grown, max_length)
            if (draft := self._recorded(room, rng, max_length, (), max_length, growth)) is not None:
                self._drafted = constant((max_length,) * len(room), rng.device)
                return draft
        wanted = torch.minimum(self.policy.start(), self._start(room, rng))
        if rng.device.type == "cpu":
            max_length = min(max_length, int(wanted.max()))
        if (chain := self._draw_chain(max_length, rng)) is not None:
            return chain
        draft = self._grown(max_length, wanted, rng)
        self._drafted = draft.live.sum(1)
        return draft

    def _grown(self, max_length: int, wanted: Tensor, rng: CounterRNG) -> Draft:
        """A chain of at most `wanted` [B] tokens, drawn one by one."""
        draft = Draft.empty(len(wanted), rng.device)
        tokens: list[Tensor] = []
        distributions: list[Distribution] = []
        live: list[Tensor] = []
        going = wanted > 0
        for depth in range(max_length):
            scores = self.score(draft, depth - 1 if depth else None)
            row = torch.full_like(wanted, depth)[:, None]
            drawn = self._draw_rows(scores, row, rng, depth)
            distribution = scores.distributions(row) if drawn is None else drawn[1]  # [B, 1, S]
            going = going & (wanted > depth) & self._more(scores, row, distribution, depth)
            if rng.device.type == "cpu" and not bool(going.any()):
                break
            sample = rng.sample(distribution.column(0), depth, Purpose.DRAW, going) if drawn is None else drawn[0]
            tokens.append(sample)
            distributions.append(distribution)
            live.append(going)
            draft = Draft.guess(torch.stack(tokens, 1), Tree.chain(depth + 1, rng.device), torch.stack(live, 1))
        return Draft.drawn(draft.tokens, concatenated(distributions), draft.live) if distributions else draft

    def _more(self, scores: Scores, row: Tensor, distribution: Distribution, depth: int) -> Tensor:
        """The policy's decision [B] for a row [B, 1] of the scores, whose tokens are drawn from `distribution`."""
        if self._state_policy is not None:
            assert self._state_policy.tap is not None
            self._state_policy.see(scores.hidden[self._state_policy.tap][:, -1])
        read = distribution
        if self.policy.reads_distribution:
            sure = None if self._drawer is None else self._drawer.confidence(scores.logits(row)[:, 0])
            read = scores.softmax(row) if sure is None else Distribution(sure[:, None, None], None, 1)
        return self.policy.more(read.column(0), depth)

    def _draw_chain(self, length: int, rng: CounterRNG) -> Draft | None:
        """A single row's chain in one call, if the model supports that; else None."""
        single = rng.has_tables and rng.device.type == "cpu" and len(rng.seeds) == 1 and length > 0
        if self._drawer is None or not single:
            return None
        policy = self.policy if isinstance(self.policy, Confidence) else Confidence(threshold=0.0)
        last, numbers = policy.last, rng.table(Purpose.DRAW)[0, :length].numpy()
        chain = self._drawer.draw_chain(numbers, policy.threshold, last, policy.joint)
        if chain is None:
            return None
        tokens, distributions = chain
        count = tokens.shape[1]
        passes = count if last or count == length else count + 1  # the last one's distribution was not drawn from
        self.bytes_read += self.model.weight_bytes * passes
        self._drafted = torch.tensor([count])
        if not count:
            return Draft.empty(1, rng.device)
        return Draft.drawn(tokens, distributions, torch.ones(1, count, dtype=torch.bool))

    def _draw_rows(
        self, scores: Scores, row: Tensor, rng: CounterRNG, depth: int
    ) -> tuple[Tensor, Distribution] | None:
        """The next token of each row [B] and the distributions [B, 1, V], as a chain alone would draw it."""
        if self._drawer is None or not rng.has_tables or rng.device.type != "cpu":
            return None
        drawn = self._drawer.draw_rows(scores.logits(row)[:, 0], rng.table(Purpose.DRAW)[:, depth])
        if drawn is None:
            return None
        tokens, found = drawn
        ids = None if found.tokens is None else found.tokens[:, None]
        return tokens, Distribution(found.probs[:, None], ids, found.vocabulary)

    # ---- continuous batching (outrider.core.protocol.BatchedDrafter)

    def supports_batching(self) -> bool:
        """Not with policies that keep a state per row."""
        return type(self.policy) in (Fixed, Confidence) and super().supports_batching()

    def open(self, sampling: Sampling) -> None:
        self._state_policy = None
        super().open(sampling)

    def arrange(self, order: Sequence[int], width: int) -> None:
        super().arrange(order, width)
        self.policy.begin(len(order), self.model.device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        super().observe(draft, scores, verdict, rng)
        self.policy.learn(self._drafted, verdict.accepted)
        self._drafted = constant((0,) * len(self._drafted), self.model.device)  # a combination may not ask every round


class _Tree(_ModelDrafter):
    """Base: a static tree, filled level by level; `parents` is sorted by level, level i starts at node `starts[i]`."""

    _batches = True

    def __init__(self, model: Target, tree: Sequence[int] | None, sampling: Sampling | None) -> None:
        super().__init__(model, sampling)
        parents = validate(branching((3, 2, 1)) if tree is None else tree)
        if not parents:
            raise InvalidOption("the tree has no nodes; give parents such as (-1, -1, 0), or drafter=None")
        levels = depths(parents)
        order = sorted(range(len(parents)), key=levels.__getitem__)  # stable: siblings stay in order
        index = {node: number for number, node in enumerate(order)} | {-1: -1}
        self.parents = tuple(index[parents[node]] for node in order)
        self.starts = [sum(level < depth for level in levels) for depth in range(min(levels), max(levels) + 2)]

    def levels(self, room: Tensor) -> list[tuple[int, int]]:
        """(first node, last node + 1) of each level that some row has room for."""
        depth = min(len(self.starts) - 1, max(int(room.max()), 0))
        return [(self.starts[level], self.starts[level + 1]) for level in range(depth)]

    def _at_once(self, room: Tensor, left: Tensor, rng: CounterRNG, *, sampled: bool) -> tuple[Draft, Tensor] | None:
        """The draft and each node's probability given its parent, drawn in one call a row where the model can."""
        levels = self.levels(room)  # on the host, unlike `left`
        drawn = drawn_at_once(self.model, self.parents[: levels[-1][1]] if levels else (), left, rng, sampled=sampled)
        if drawn is not None:
            self.bytes_read += self.model.weight_bytes * len(levels)
        return drawn


class SampledTree(_Tree):
    """A tree whose siblings are drawn from the model's distribution: without replacement (recursive rejection sampling,
    arXiv 2402.14160; Sequoia, arXiv 2402.12374), or with `replacement`, independently (SpecInfer, arXiv 2305.09781)."""

    def __init__(
        self,
        model: Target,
        *,
        tree: Sequence[int] | None = None,
        replacement: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(model, tree, sampling)
        self.replacement = replacement

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = self._start(room, rng)
        if not self.replacement and (at_once := self._at_once(room, left, rng, sampled=True)) is not None:
            return at_once[0]
        rng.reserve(len(self.parents))
        rows = len(room)
        draft = Draft.empty(rows, rng.device)
        tokens = torch.zeros(rows, len(self.parents), dtype=torch.long, device=rng.device)
        live = torch.zeros_like(tokens, dtype=torch.bool)
        distributions: list[Distribution] = []
        inner: list[int] = []  # the node each distribution follows
        for level, (start, stop) in enumerate(self.levels(room)):
            scores = self.score(draft, self.starts[level - 1] if level else None)
            parents = sorted({self.parents[node] for node in range(start, stop)})
            above = constant(tuple(parents), rng.device)
            distribution = scores.distributions((above + 1).expand(rows, -1))  # [B, P, S]
            alive = (left > level)[:, None] & (live.index_select(1, above.clamp(min=0)) | (above < 0))
            distributions.append(distribution)
            inner += parents
            families = [[node for node in range(start, stop) if self.parents[node] == parent] for parent in parents]
            for rank in range(max(map(len, families))):
                incomplete = [index for index, family in enumerate(families) if len(family) > rank]
                if len(incomplete) < len(families):  # drop families that have all their children
                    families = [families[index] for index in incomplete]
                    columns = constant(tuple(incomplete), rng.device)
                    distribution, alive = distribution.select(columns), alive.index_select(1, columns)
                nodes = constant(tuple(family[rank] for family in families), rng.device).expand(rows, -1)
                alive = alive & (distribution.probs.sum(-1) > 0)
                drawn = rng.sample(distribution, nodes, Purpose.DRAW, alive)
                tokens = tokens.scatter(1, nodes, drawn)
                live = live.scatter(1, nodes, alive)
                if not self.replacement:
                    distribution = distribution.without(drawn, alive)
            draft = Draft.guess(tokens[:, :stop], Tree.of(self.parents[:stop], rng.device), live[:, :stop])
        if not distributions:
            return draft
        source = constant(tuple(inner.index(parent) for parent in self.parents[: draft.size]), rng.device)
        return replace(
            draft,
            distributions=concatenated(distributions),
            source=source.expand(rows, -1),
            replacement=self.replacement,
            mixed=False,
        )


def softened(sampling: Sampling) -> Sampling:
    """The sampling settings for trees of fixed guesses, which rank tokens: temperature 1 instead of 0, at which a
    distribution has a single entry."""
    return sampling.unscaled if sampling.greedy else sampling


class TopKTree(_Tree):
    """A static tree of the model's likeliest tokens, as fixed guesses: child r of a node is its r-th likeliest
    successor (the static trees of Medusa, arXiv 2401.10774, and EAGLE, arXiv 2401.15077)."""

    def __init__(self, model: Target, *, tree: Sequence[int] | None = None, sampling: Sampling | None = None) -> None:
        super().__init__(model, tree, sampling)

    def _drafting(self, sampling: Sampling) -> Sampling:
        return super()._drafting(softened(sampling))

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = self._start(room, rng)
        if (at_once := self._at_once(room, left, rng, sampled=False)) is not None:
            return replace(at_once[0], belief=at_once[1].double())
        draft = Draft.empty(len(room), rng.device)
        tokens, belief = draft.tokens, draft.tokens.double()
        for level, (start, stop) in enumerate(self.levels(room)):
            before = self.starts[level - 1] if level else None
            scores = self.score(draft, before)
            tree = Tree.of(self.parents[:stop], rng.device)
            parents = tree.parents[:, start:].expand(len(room), -1)
            ranks = tree.ranks[:, start:].expand(len(room), -1)
            ids, probs = scores.distributions(parents + 1).top(tree.width)
            tokens = torch.cat([tokens, ids.gather(2, ranks[..., None])[..., 0]], 1)
            belief = torch.cat([belief, probs.gather(2, ranks[..., None])[..., 0].double()], 1)
            fits = (tree.depths < left[:, None]) & (tokens >= 0)
            live = (fits[:, None, :] | ~tree.ancestors).all(-1)
            draft = Draft.guess(tokens.clamp(min=0), tree, live, belief)
        return draft


class DynamicTree(_ModelDrafter):
    """A tree that grows where the model is confident (EAGLE-2, arXiv 2406.16858). Each level expands the `width` most
    probable nodes; of all candidates the `nodes` most probable are kept, if their probability reaches
    `min_probability`. Probabilities are the model's at temperature 1, or at the settings `sampling`, however the target
    samples. Its nodes are fixed guesses, so the shape may depend on them."""

    _batches = True

    def __init__(
        self,
        model: Target,
        *,
        nodes: int = 16,
        width: int = 4,
        depth: int = 5,
        min_probability: float = 0.0,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(model, None if sampling is None else softened(sampling))
        if min(nodes, width, depth) < 1 or not 0 <= min_probability < 1:
            raise InvalidOption(
                f"nodes={nodes}, width={width}, depth={depth}, min_probability={min_probability}: the first three must "
                "be 1 or more, min_probability at least 0 and below 1"
            )
        self.nodes, self.width, self.depth = nodes, width, depth
        self._floor = math.log(min_probability) if min_probability else -math.inf
        self._grower = model if isinstance(model, TreeGrowing) else None

    def _drafting(self, sampling: Sampling) -> Sampling:
        return super()._drafting(sampling.unscaled)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        depth = self._depth(self.depth, room, rng)
        settings, scratch = (self.nodes, self.width, self._floor), self.width * max(depth - 1, 0)
        growth = partial(self._grown, depth)
        if (draft := self._recorded(room, rng, scratch, settings, depth, growth)) is not None:
            return draft
        left = self._start(room, rng)
        if rng.device.type == "cpu" and (tries := self._row_by_row(room.tolist())) is not None:
            return to_draft(tries, rng.device)
        return self._grown(depth, left, rng)

    def _grown(self, depth: int, left: Tensor, rng: CounterRNG) -> Draft:
        """The tree of at most `depth` levels, and of `left` [B] in each row, grown with tensors."""
        committed = self.model.mark()
        rows, width = len(left), self.width
        grown = Draft.empty(rows, rng.device)  # the expanded nodes, the only ones that the model reads
        value = torch.zeros(rows, 1, dtype=torch.float64, device=rng.device)
        origin = torch.full((rows, 1), -1, device=rng.device)  # expanded node -> its index among the candidates
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        values: list[Tensor] = []
        for level in range(depth):
            since = None if not level else grown.size - width
            ids, probs = self.score(grown, since).distributions().top(width)  # [B, expanded, width]
            total = (value[..., None] + probs.double().log()).flatten(1)
            start = sum(part.shape[1] for part in tokens)
            tokens.append(ids.flatten(1))
            parents.append(origin[..., None].expand_as(ids).flatten(1))
            fits = (level < left[:, None]) & (total >= self._floor)
            values.append(torch.where(fits, total, -torch.inf))
            if rng.device.type == "cpu" and not bool(fits.any()):
                break
            value, best = (part[:, :width] for part in values[-1].sort(descending=True, stable=True))
            origin = start + best
            first = grown.size - width if level else -1  # first node of the level just expanded
            new = (best // width) + first if level else torch.full_like(best, -1)
            grown = Draft.guess(
                torch.cat([grown.tokens, tokens[-1].gather(1, best).clamp(min=0)], 1),
                Tree(torch.cat([grown.tree.parents.expand(rows, -1), new], 1), level + 1, width),
                torch.cat([grown.live, value > -torch.inf], 1),
            )
        self.model.rewind(committed)  # accepted tokens are read again in one pass with the next root
        if not tokens:
            return grown
        scores, flat, above = torch.cat(values, 1), torch.cat(tokens, 1), torch.cat(parents, 1)
        kept, shape = rerank(scores, above, self.nodes)
        score = scores.gather(1, kept)
        tree = Tree(shape, len(tokens), width)
        return Draft.guess(flat.gather(1, kept).clamp(min=0), tree, score > -torch.inf, score.exp())

    def _row_by_row(self, room: Sequence[int]) -> list[Trie] | None:
        """The same on the host: for a single row, since the overhead of tensor operations dominates, and for rows whose
        trees grow in one call each, whose rounding differs from that of batched operations; else None."""
        committed, tries = self.model.mark(), list[Trie]()
        for row, left in enumerate(room):
            trie, depth = Trie(), min(self.depth, left)
            grown = self._grower.grow_tree(row, depth, self.width, self._floor) if self._grower and depth > 0 else None
            if grown is None and depth > 0 and len(room) > 1:
                return None
            if grown is None:
                logs = self._scored(trie, depth)
            else:
                tokens, parents, logs = grown
                for parent, token in zip(parents, tokens, strict=True):
                    trie.grow(parent, token)
                self.bytes_read += self.model.weight_bytes * min(max(trie.depths, default=0) + 1, depth)
            trie.weights = [math.exp(log) for log in logs]
            tries.append(trie.best(self.nodes))
        self.model.rewind(committed)
        return tries

    def _scored(self, trie: Trie, depth: int) -> list[float]:
        """Add candidates to the trie level by level from the model's scores -> the log-probabilities of their paths."""
        logs: list[float] = []
        expanded: list[int] = []  # candidates in the order in which the model reads them
        index = {-1: -1}  # expanded candidate -> index in that order
        latest, start = [-1], 0
        for _ in range(depth):
            read = torch.tensor([[trie.tokens[node] for node in expanded]], dtype=torch.long)
            tree = Tree.of(tuple(index[trie.parents[node]] for node in expanded))
            draft = Draft.guess(read, tree, torch.ones_like(read, dtype=torch.bool))
            ids, probs = self.score(draft, start if start < len(expanded) else None).distributions().top(self.width)
            first, logarithms = len(trie), probs[0].double().log().tolist()
            for parent, ids_below, logs_below in zip(latest, ids[0].tolist(), logarithms, strict=True):
                for token, log in zip(ids_below, logs_below, strict=True):
                    total = log + (logs[parent] if parent >= 0 else 0.0)
                    if total >= self._floor and total > -math.inf:
                        trie.grow(parent, token)
                        logs.append(total)
            latest = sorted(range(first, len(trie)), key=lambda node: -logs[node])[: self.width]
            if not latest:
                break
            start = len(expanded)
            for node in latest:
                index[node] = len(expanded)
                expanded.append(node)
        return logs
