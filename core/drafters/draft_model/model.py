"""Another, smaller target as the drafter: a chain, a tree of draws, a tree of its likeliest tokens.

Speculative sampling's independent draft model (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318) and
its trees. The model is any Target, so it may be a language model, a table or a cheaper view of the target itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.device import constant, upload
from outrider.core.distribution import Distribution, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.length_policies import Confidence, Fixed, Policy, make_policy
from outrider.core.drafters.lookup.trie import Trie, planted
from outrider.core.drafters.tree_shapes import branching, depths, rerank, validate
from outrider.core.errors import InvalidOption
from outrider.core.protocol import BatchedTarget, Prefill, Prompts, Scores, Target
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.tree import Tree


class _Model:
    """The draft model and its bookkeeping: what it has read, which rows are still open."""

    needs: frozenset[str] = frozenset()

    def __init__(self, model: Target, sampling: Sampling | None) -> None:
        self.model, self._own = model, sampling
        self.vocabulary: int | None = model.vocabulary
        self.bytes_read = 0

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.model.begin(prompts, self._own or sampling, frozenset())
        self._open = torch.ones(len(prompts), dtype=torch.bool, device=self.model.device)

    def score(self, draft: Draft, since: int | None) -> Scores:
        self.bytes_read += self.model.weight_bytes
        return self.model.score(draft, since)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self.model.keep(draft, verdict, torch.where(self._open, verdict.accepted + 1, 0))

    def aside(self) -> None:
        """Somebody else's draft was scored: what the model has read of its own is dropped."""
        self.model.rewind(self.model.mark())

    def end(self) -> None:
        self.model.end()

    def _start(self, room: Tensor, rng: CounterRNG) -> Tensor:
        """Note which rows are finished -> room [B] where the random generator are."""
        room = upload(room, rng.device)
        self._open = room >= 0
        return room


class DraftModel(_Model):
    """A chain, drawn token by token; a policy says how far. `sampling` lets it draw hotter or colder than the target
    (default: alike), which changes how much is accepted and never what comes out."""

    def __init__(
        self,
        model: Target,
        *,
        length: int = 5,
        policy: Policy | str = "fixed",
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(model, sampling)
        self.policy = make_policy(policy, length) if isinstance(policy, str) else policy

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._tap: str | None = getattr(self.policy, "tap", None)
        self.model.begin(prompts, self._own or sampling, frozenset({self._tap} if self._tap else ()))
        self.policy.begin(len(prompts), self.model.device)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        longest = min(self.policy.longest, int(room.max()))
        wanted = torch.minimum(self.policy.start(), self._start(room, rng))
        draft = Draft.empty(len(room), rng.device)
        rng.reserve(longest)
        if (found := self._at_once(longest, rng)) is not None:
            return found
        tokens: list[Tensor] = []
        distributions: list[Distribution] = []
        live: list[Tensor] = []
        going = wanted > 0
        for depth in range(longest):
            scores = self.score(draft, depth - 1 if depth else None)
            distribution = scores.distributions(torch.full_like(wanted, depth)[:, None])  # [B, 1, S]
            if self._tap:
                self.policy.see(scores.hidden[self._tap][:, -1])  # type: ignore[attr-defined]
            going = going & (wanted > depth) & self.policy.more(distribution.column(0), depth)
            if rng.device.type == "cpu" and not bool(going.any()):
                break
            tokens.append(rng.sample(distribution.column(0), depth, Purpose.DRAW, going))
            distributions.append(distribution)
            live.append(going)
            draft = Draft.guess(torch.stack(tokens, 1), Tree.chain(depth + 1, rng.device), torch.stack(live, 1))
        self._drafted = draft.live.sum(1)
        return Draft.drawn(draft.tokens, joined(distributions), draft.live) if distributions else draft

    def _at_once(self, length: int, rng: CounterRNG) -> Draft | None:
        """A lone row's chain, where nobody has to be asked how far it goes and the model can draw it by itself."""
        unroll = getattr(self.model, "unroll", None)
        alone = rng.rolls and rng.device.type == "cpu" and len(rng.seeds) == 1 and length > 0
        if unroll is None or not alone or type(self.policy) is not Fixed:
            return None
        found = unroll(rng.table(Purpose.DRAW)[0, :length].numpy())
        if found is None:
            return None
        self.bytes_read += self.model.weight_bytes * length
        tokens, distributions = found
        self._drafted = torch.tensor([length])
        return Draft.drawn(tokens, distributions, torch.ones(1, length, dtype=torch.bool))

    # ---- rows that come and go (outrider.core.drafters.per_row.Joined)

    def joins(self) -> bool:
        """Not where the policy remembers how each row went."""
        return type(self.policy) in (Fixed, Confidence) and hasattr(self.model, "enter")

    def open(self, sampling: Sampling) -> None:
        self._tap = None
        self._model().open(self._own or sampling, frozenset())

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._model().arrange(order, width)
        self.policy.begin(len(order), self.model.device)

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        for _ in self._model().enter(lambda: row, prompt):
            pass

    def leave(self, row: int) -> None:
        self._model().leave(row)

    def _model(self) -> BatchedTarget:
        return self.model  # type: ignore[return-value]

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        super().observe(draft, scores, verdict, rng)
        self.policy.learn(self._drafted, verdict.accepted)


class _Tree(_Model):
    """A static shape, filled level by level."""

    def __init__(self, model: Target, shape: Sequence[int] | None, sampling: Sampling | None) -> None:
        super().__init__(model, sampling)
        parents = validate(branching((3, 2, 1)) if shape is None else shape)
        if not parents:
            raise InvalidOption("the tree's shape has no nodes; give parents such as (-1, -1, 0), or drafter=None")
        levels = depths(parents)
        order = sorted(range(len(parents)), key=levels.__getitem__)  # stable: siblings stay in order
        place = {node: index for index, node in enumerate(order)} | {-1: -1}
        self.parents = tuple(place[parents[node]] for node in order)
        self.starts = [sum(level < depth for level in levels) for depth in range(min(levels), max(levels) + 2)]

    def levels(self, room: Tensor, rng: CounterRNG) -> list[tuple[int, int]]:
        """(first node, node after the last) of each level that some row has room for."""
        deepest = min(len(self.starts) - 1, max(int(room.max()), 0))
        return [(self.starts[level], self.starts[level + 1]) for level in range(deepest)]


class SampledTree(_Tree):
    """A tree whose siblings are drawn from the model's distribution: without replacement (recursive rejection, arXiv
    2402.14160; Sequoia, arXiv 2402.12374), or with it, each independent of the others (SpecInfer, arXiv 2305.09781)."""

    def __init__(
        self,
        model: Target,
        *,
        shape: Sequence[int] | None = None,
        replacement: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(model, shape, sampling)
        self.replacement = replacement

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = self._start(room, rng)
        rng.reserve(len(self.parents))
        rows = len(room)
        draft = Draft.empty(rows, rng.device)
        tokens = torch.zeros(rows, len(self.parents), dtype=torch.long, device=rng.device)
        live = torch.zeros_like(tokens, dtype=torch.bool)
        distributions: list[Distribution] = []
        inner: list[int] = []  # the node each distribution follows
        for level, (start, stop) in enumerate(self.levels(room, rng)):
            scores = self.score(draft, self.starts[level - 1] if level else None)
            parents = sorted({self.parents[node] for node in range(start, stop)})
            above = constant(tuple(parents), rng.device)
            distribution = scores.distributions((above + 1).expand(rows, -1))  # [B, P, S]
            alive = (left > level)[:, None] & (live.index_select(1, above.clamp(min=0)) | (above < 0))
            distributions.append(distribution)
            inner += parents
            families = [[node for node in range(start, stop) if self.parents[node] == parent] for parent in parents]
            for rank in range(max(map(len, families))):
                having = [place for place, family in enumerate(families) if len(family) > rank]
                if len(having) < len(families):  # the others have all their children
                    families = [families[place] for place in having]
                    places = constant(tuple(having), rng.device)
                    distribution, alive = distribution.select(places), alive.index_select(1, places)
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
            distributions=joined(distributions),
            source=source.expand(rows, -1),
            replacement=self.replacement,
            mixed=False,
        )


def joined(distributions: Sequence[Distribution]) -> Distribution:
    """Batches of distributions [B, P, S], one after the other; dense where their supports differ in size."""
    if len({(distribution.width, distribution.tokens is None) for distribution in distributions}) > 1:
        distributions = [distribution.dense() for distribution in distributions]
    tokens = [distribution.tokens for distribution in distributions if distribution.tokens is not None]
    return Distribution(
        torch.cat([distribution.probs for distribution in distributions], 1),
        torch.cat(tokens, 1) if tokens else None,
        distributions[0].vocabulary,
    )


def softened(sampling: Sampling) -> Sampling:
    """For trees of fixed guesses, of which only the order matters: a model that decodes greedily names one token, so it
    is asked for its distribution at temperature 1 instead."""
    if not sampling.greedy:
        return sampling
    return replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


class TopKTree(_Tree):
    """A tree of the model's likeliest tokens, as fixed guesses: child number r of a node is its r-th likeliest
    successor (the static trees of Medusa, arXiv 2401.10774, and EAGLE, arXiv 2401.15077)."""

    def __init__(self, model: Target, *, shape: Sequence[int] | None = None, sampling: Sampling | None = None) -> None:
        super().__init__(model, shape, sampling)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        super().begin(prefill, prompts, softened(sampling))

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = self._start(room, rng)
        draft = Draft.empty(len(room), rng.device)
        tokens, belief = draft.tokens, draft.tokens.double()
        for level, (start, stop) in enumerate(self.levels(room, rng)):
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


class DynamicTree(_Model):
    """A tree that grows where the model is sure of itself: each level expands the `width` most probable nodes, and of
    all candidates the `nodes` most probable are kept (EAGLE-2, arXiv 2406.16858), as far as they are thought at least
    `least` likely. Fixed guesses, so that the shape may depend on them."""

    def __init__(
        self,
        model: Target,
        *,
        nodes: int = 16,
        width: int = 4,
        depth: int = 5,
        least: float = 0.0,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(model, sampling)
        if min(nodes, width, depth) < 1 or not 0 <= least < 1:
            raise InvalidOption(
                f"nodes={nodes}, width={width}, depth={depth}, least={least}: the first three must be 1 or more, least "
                "from 0 up to, but not, 1"
            )
        self.nodes, self.width, self.depth = nodes, width, depth
        self._floor = math.log(least) if least else -math.inf

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        super().begin(prefill, prompts, softened(sampling))

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = self._start(room, rng)
        if len(room) == 1 and rng.device.type == "cpu":
            return planted([self._grown(int(left))], rng.device)
        committed = self.model.mark()
        rows, width = len(room), self.width
        grown = Draft.empty(rows, rng.device)  # the nodes that are expanded, which are all the model reads
        value = torch.zeros(rows, 1, dtype=torch.float64, device=rng.device)
        origin = torch.full((rows, 1), -1, device=rng.device)  # the candidate each expanded node is
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        values: list[Tensor] = []
        for level in range(min(self.depth, max(int(room.max()), 0))):
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
            value, best = values[-1].topk(width)
            origin = start + best
            within = grown.size - width if level else -1  # where the level just expanded begins
            new = (best // width) + within if level else torch.full_like(best, -1)
            grown = Draft.guess(
                torch.cat([grown.tokens, tokens[-1].gather(1, best).clamp(min=0)], 1),
                Tree(torch.cat([grown.tree.parents.expand(rows, -1), new], 1), level + 1, width),
                torch.cat([grown.live, value > -torch.inf], 1),
            )
        self.model.rewind(committed)  # what is accepted is read again, in one pass with the next root
        if not tokens:
            return grown
        scores, flat, above = torch.cat(values, 1), torch.cat(tokens, 1), torch.cat(parents, 1)
        kept, shape = rerank(scores, above, self.nodes)
        score = scores.gather(1, kept)
        tree = Tree(shape, len(tokens), width)
        return Draft.guess(flat.gather(1, kept).clamp(min=0), tree, score > -torch.inf, score.exp())

    def _grown(self, left: int) -> Trie:
        """The same for one row, on the host: for so few nodes, calling as many operations takes longer."""
        committed, found, depth = self.model.mark(), Trie(), min(self.depth, left)
        logs: list[float] = []  # of every candidate, its ancestors included
        if depth > 0 and getattr(self.model, "quick", False):
            tokens, parents, logs = self.model.tree(depth, self.width, self._floor)  # type: ignore[attr-defined]
            for above, token in zip(parents, tokens, strict=True):
                found.grow(above, token)
            self.bytes_read += self.model.weight_bytes * min(max(found.depths, default=0) + 1, depth)
        else:
            logs = self._scored(found, depth)
        self.model.rewind(committed)
        found.weights = [math.exp(one) for one in logs]
        return found.best(self.nodes)

    def _scored(self, found: Trie, depth: int) -> list[float]:
        """Grow the candidates level by level, as scores have them -> the logarithms of their paths' probabilities."""
        logs: list[float] = []
        expanded: list[int] = []  # candidates, in the order in which the model reads them
        place = {-1: -1}  # of candidates that are expanded: in that order
        latest, start = [-1], 0
        for _ in range(depth):
            read = torch.tensor([[found.tokens[node] for node in expanded]], dtype=torch.long)
            tree = Tree.of(tuple(place[found.parents[node]] for node in expanded))
            draft = Draft.guess(read, tree, torch.ones_like(read, dtype=torch.bool))
            ids, probs = self.score(draft, start if start < len(expanded) else None).distributions().top(self.width)
            first, logarithms = len(found), probs[0].double().log().tolist()
            for above, words, chances in zip(latest, ids[0].tolist(), logarithms, strict=True):
                for token, chance in zip(words, chances, strict=True):
                    total = chance + (logs[above] if above >= 0 else 0.0)
                    if total >= self._floor and total > -math.inf:
                        found.grow(above, token)
                        logs.append(total)
            latest = sorted(range(first, len(found)), key=lambda node: -logs[node])[: self.width]
            if not latest:
                break
            start = len(expanded)
            for node in latest:
                place[node] = len(expanded)
                expanded.append(node)
        return logs
