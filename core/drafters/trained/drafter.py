"""The drafter of all trained draft heads: turns a head's guesses into drafts.

A head runs like a small target (`outrider.core.drafters.trained.head_runner`), so chains, sampled trees and dynamic
trees are those of draft models. Independent of how a draft head computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.drawn_trees import drawn_at_once
from outrider.core.drafters.draft_model.model import DraftModel, DynamicTree, SampledTree, TopKTree
from outrider.core.drafters.length_policies import Budget, Confidence, Policy, Risk
from outrider.core.drafters.trained.head_runner import HeadRunner
from outrider.core.drafters.tree_shapes import by_accuracy, chain, depths, rerank, sequoia
from outrider.core.errors import InvalidOption, unknown
from outrider.core.protocol import Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG
from outrider.core.training.draft_head import ConfidentHead
from outrider.core.tree import Tree

_PRICE = 0.05  # of verifying a drafted token, in target passes
_RISK = 0.95  # that a token of a chain is rejected, at which the policy "confident" stops
DRAFT_KINDS = ("chain", "tree", "dynamic", "sampled")
_TYPICAL = (0.5, 0.13, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)  # acceptance by rank among siblings, for default shapes


class FixedChain(DraftModel):
    """A chain of the likeliest tokens, as fixed guesses."""

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        longest = min(self.policy.max_length, int(room.max()))
        wanted = torch.minimum(self.policy.start(), self._start(room, rng))
        draft = Draft.empty(len(room), rng.device)
        tokens, belief, live = draft.tokens, draft.tokens.double(), draft.live
        going = wanted > 0
        for depth in range(longest):
            scores = self.score(draft, depth - 1 if depth else None)
            row = torch.full_like(wanted, depth)[:, None]
            distribution = scores.distributions(row)
            going = going & (wanted > depth) & self._more(scores, row, distribution, depth)
            if rng.device.type == "cpu" and not bool(going.any()):
                break
            ids, probs = distribution.column(0).top(1)
            tokens, belief = torch.cat([tokens, ids], 1), torch.cat([belief, probs.double()], 1)
            live = torch.cat([live, going[:, None]], 1)
            draft = Draft.guess(tokens, Tree.chain(depth + 1, rng.device), live, belief.cumprod(1))
        self._drafted = draft.live.sum(1)
        return draft


class ParallelTree(TopKTree):
    """A tree of the likeliest tokens of distributions that are known for all levels: Medusa's Cartesian product (arXiv
    2401.10774) in a static shape, or with `nodes` the most probable nodes of that shape, if they reach
    `min_probability`."""

    def __init__(
        self,
        model: Any,
        *,
        tree: Sequence[int],
        sampling: Sampling | None,
        nodes: int | None = None,
        min_probability: float = 0.0,
    ) -> None:
        super().__init__(model, tree=tree, sampling=sampling)
        self.nodes, self.min_probability = nodes, min_probability

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        depth = self._depth(len(self.starts) - 1, room, rng)
        levels = self.levels(torch.tensor(depth))
        if not levels:
            self._start(room, rng)
            return Draft.empty(len(room), rng.device)
        shape, read = self.parents[: levels[-1][1]], self.bytes_read
        if rng.device.type == "cpu" and self.nodes is None and not self.min_probability:
            left = self._start(room, rng)
            if (drawn := drawn_at_once(self.model, tuple(shape), left, rng, sampled=False)) is not None:
                self.bytes_read = read + self.model.weight_bytes
                paths = drawn[0].tree.ancestors.double() @ drawn[1].double().clamp(min=1e-30).log()[..., None]
                return replace(drawn[0], belief=paths[..., 0].exp())
        growth = partial(self._grown, shape)
        draft = self._recorded(room, rng, 0, (shape, self.nodes), len(levels), growth)
        if draft is None:
            draft = self._grown(shape, self._start(room, rng), rng)
        self.bytes_read = read + self.model.weight_bytes
        return draft

    def _grown(self, shape: Sequence[int], left: Tensor, rng: CounterRNG) -> Draft:
        """The draft in this shape for `left` [B] tokens in each row."""
        runner: Any = self.model
        tree = Tree.of(tuple(shape), rng.device)
        ids, probs = runner.future_distributions().top(tree.width)  # [B, K, W]
        place = (tree.depths * tree.width + tree.ranks).expand(len(left), -1)
        tokens, single = ids.flatten(1).gather(1, place), probs.flatten(1).gather(1, place)
        fits = (tree.depths < left[:, None]) & (tokens >= 0)
        live = (fits[:, None] | ~tree.ancestors).all(-1)
        logs = single.double().clamp(min=1e-30).log()
        value = (tree.ancestors.double() @ logs[..., None])[..., 0]
        live = live & (value.exp() >= self.min_probability)  # a node's value is at most its parent's
        if self.nodes is None or self.nodes >= tree.size:
            return Draft.guess(tokens.clamp(min=0), tree, live, value.exp())
        parents = tree.parents.expand(len(left), -1)
        kept, above = rerank(torch.where(live, value, -torch.inf), parents, self.nodes)
        best = Tree(above, tree.depth, tree.width)
        return Draft.guess(tokens.gather(1, kept).clamp(min=0), best, live.gather(1, kept), value.gather(1, kept).exp())


class Learned:
    """A drafter with a trained draft head. `draft_kind` (default: the one in the head's paper) is one of

    - "chain": drawn tokens (at temperature 0 the likeliest), as many as `policy` decides (default: the one in the
      head's paper, else "fixed"). The policy "confidence" stops where the highest probability is below `threshold`
      (default: the paper's, else 0.4), "confident" where the head itself predicts a `risk` of rejection (default 0.95),
      "budget" where a token's expected gain is below the `price` of verifying it, in target passes (default 0.05).
    - "tree": the likeliest tokens in the static shape `tree` (default: the best with `nodes` nodes, by the head's own
      measured accuracy if it has one).
    - "dynamic": the `nodes` most probable nodes of a tree of `depth` levels that expands the `width` most probable
      nodes of each level; their probability is at least `min_probability`.
    - "sampled": draws in the shape `tree`."""

    def __init__(
        self,
        head: Any,
        *,
        draft_kind: str | None = None,
        length: int = 5,
        policy: Policy | str | None = None,
        threshold: float | None = None,
        nodes: int = 16,
        width: int = 4,
        depth: int = 5,
        min_probability: float = 0.0,
        tree: Sequence[int] | None = None,
        replacement: bool = False,
        sampling: Sampling | None = None,
        risk: float | None = None,
        price: float | None = None,
    ) -> None:
        self.draft_head = head
        self.draft_kind = head.draft_kind if draft_kind is None else draft_kind
        if self.draft_kind not in DRAFT_KINDS:
            raise unknown("draft_kind", self.draft_kind, DRAFT_KINDS)
        if min(length, nodes, width, depth) < 1:
            raise InvalidOption(f"length={length}, nodes={nodes}, width={width}, depth={depth}: each must be 1 or more")
        deepest = head.depth or max(length, depth)
        stops = {"threshold": threshold, "risk": risk, "price": price}
        policy = _policy(head, self.draft_kind, policy, min(length, deepest), stops)
        self.model: Any = (head.runner or HeadRunner)(head)
        self.vocabulary: int | None = self.model.vocabulary
        reads = head.needs if head.drafting_needs is None else head.drafting_needs
        self.needs: frozenset[str] = frozenset(reads)
        soft = sampling or Sampling()  # fixed guesses rank tokens by the head's distribution at any temperature
        self._fixed: Any
        self._drawn: Any = None
        if head.drafter_class is not None:
            self._fixed = head.drafter_class(self.model, nodes=nodes, depth=min(depth, deepest), sampling=soft)
        elif self.draft_kind == "chain":
            longest = min(length, deepest)
            if policy == "fixed" and not head.parallel:  # a tree of width 1, which can grow in one native call
                self._fixed = DynamicTree(self.model, nodes=longest, width=1, depth=longest, sampling=soft)
            else:
                self._fixed = FixedChain(self.model, length=longest, policy=policy, sampling=soft)
            self._drawn = DraftModel(self.model, length=longest, policy=policy, sampling=sampling)
        elif self.draft_kind == "dynamic" and not head.parallel:
            depth = min(depth, deepest)
            self._fixed = DynamicTree(
                self.model, nodes=nodes, width=width, depth=depth, min_probability=min_probability, sampling=soft
            )
        elif self.draft_kind == "dynamic":
            wide = best_shape(6 * nodes, min(depth, deepest))
            self._fixed = ParallelTree(
                self.model, tree=wide, sampling=soft, nodes=nodes, min_probability=min_probability
            )
        else:
            measured = by_accuracy(getattr(head, "config", {}).get("accuracy", ()), nodes, min(depth, deepest))
            usual = measured or best_shape(nodes, min(depth, deepest))
            shape = usual if tree is None else shallow(tree, deepest)
            kind = ParallelTree if head.parallel else TopKTree
            self._fixed = kind(self.model, tree=shape, sampling=soft)
            if self.draft_kind == "sampled":
                self._drawn = SampledTree(self.model, tree=shape, replacement=replacement, sampling=sampling)
        self._inner = self._fixed

    @property
    def bytes_read(self) -> int:
        return int(self._fixed.bytes_read) + (0 if self._drawn is None else int(self._drawn.bytes_read))

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._inner = self._fixed if self._drawn is None or sampling.greedy else self._drawn
        self.model.set_hidden(prefill.hidden)
        self.model.self_draftable = prefill.self_draftable
        self._inner.begin(prefill, prompts, sampling)

    # ---- continuous batching (outrider.core.protocol.BatchedDrafter)

    def supports_batching(self) -> bool:
        """Not where the target's own layers draft, which a row alone does not give."""
        kinds = [self._fixed] + [self._drawn] * (self._drawn is not None)
        return type(self.model) is HeadRunner and all(each.supports_batching() for each in kinds)

    def open(self, sampling: Sampling) -> None:
        self._inner = self._fixed if self._drawn is None or sampling.greedy else self._drawn
        self._inner.open(sampling)

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._inner.arrange(order, width)

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        self.model.set_hidden(prefill.hidden)
        self._inner.enter(row, prefill, prompt)

    def leave(self, row: int) -> None:
        self._inner.leave(row)

    # ----

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        draft: Draft = self._inner.propose(room, rng)
        # a dynamic tree's nodes were computed in another order, so there is no state to continue from
        carry = None if self.draft_kind == "dynamic" else self.model.carry()
        return draft if carry is None else replace(draft, carry=carry)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self.model.set_hidden(scores.hidden)
        self._inner.observe(draft, scores, verdict, rng)

    def end(self) -> None:
        self._inner.end()


def _policy(
    head: Any, draft_kind: str, policy: Policy | str | None, length: int, stops: Mapping[str, float | None]
) -> Policy | str:
    """The policy that ends a chain; options that do not apply are refused."""
    if draft_kind != "chain" and policy not in (None, "fixed"):
        raise InvalidOption(
            f"policy={policy!r} ends chains, and the draft is of kind '{draft_kind}'; give "
            "draft_kind='chain', or leave policy out"
        )
    chosen = (head.policy if draft_kind == "chain" else "fixed") if policy is None else policy
    for name, needed in (("threshold", "confidence"), ("risk", "confident"), ("price", "budget")):
        if stops[name] is not None and chosen != needed:
            raise InvalidOption(f"{name}={stops[name]} needs policy='{needed}' and draft_kind='chain'; leave it out")
    given = {name: value for name, value in stops.items() if value is not None}
    if chosen == "confident":
        if not isinstance(head, ConfidentHead):
            raise InvalidOption(f"{type(head).__name__} does not predict its confidence; use policy='confidence'")
        return Risk(length, given.get("risk", _RISK), head.acceptance, tap="states")
    if chosen == "confidence":
        return Confidence(length, given.get("threshold", head.threshold), last=True)
    if chosen == "budget":
        estimate = (head.acceptance, "states") if isinstance(head, ConfidentHead) else (None, None)
        return Budget(length, given.get("price", _PRICE), *estimate)
    return chosen


@lru_cache
def best_shape(nodes: int, depth: int, acceptance: tuple[float, ...] = _TYPICAL) -> tuple[int, ...]:
    """The best tree of `nodes` nodes for an acceptance by rank among siblings (Sequoia, arXiv 2402.12374)."""
    return sequoia(acceptance, nodes, depth).shape(nodes, depth) or chain(1)


def shallow(shape: Sequence[int], depth: int) -> tuple[int, ...]:
    """A shape without the nodes below a depth."""
    nodes = [node for node, level in enumerate(depths(shape)) if level < depth]
    index = {node: number for number, node in enumerate(nodes)} | {-1: -1}
    return tuple(index[shape[node]] for node in nodes)
