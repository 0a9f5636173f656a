"""Exact acceptance rules in CUDA graphs (outrider.core.engine.cuda_graphs), one per shape of draft.

A rule is a pure function of draft, scores and random numbers, so all its inputs go into fixed buffers; its uniforms are
drawn before. Chains are recorded as they are; the parents of other trees are inputs, their depth and width rounded up
to powers of two. Other rules, stateful penalties and other generators run without a graph. Independent of networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from outrider.core.distribution import Distribution, LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.cuda_graphs import GraphPool
from outrider.core.protocol import Rule, Scores
from outrider.core.rng import CounterRNG, PredrawnRNG
from outrider.core.rules.exact import Block, Exact, SampleMatch, Token
from outrider.core.tree import Tree

Key = tuple[object, ...]


def recordable(rule: Rule, sampling: Sampling, rng: CounterRNG, draft: Draft) -> bool:
    """Whether a recording of the rule's verdict holds for later drafts of this shape."""
    known = isinstance(rule, Exact | Token | Block | SampleMatch) and type(rng) is CounterRNG
    return known and not sampling.remembers and draft.rows > 0


@dataclass(frozen=True, eq=False)
class RecordedDraft:
    """A draft, and the uniforms of its round, as inputs of a recording; and how to make a draft of the inputs again."""

    template: Draft
    tree: Tree | None  # static; None: the parents are an input
    bounds: tuple[int, int]  # the rounded depth and width of other trees
    vocabulary: int
    inputs: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, draft: Draft, rule: Rule, scoring: Sampling, rng: CounterRNG, vocabulary: int) -> RecordedDraft:
        tree = draft.tree
        # greedy decoding reads neither draft distributions nor random numbers
        greedy = scoring.greedy and isinstance(rule, Exact | SampleMatch)
        distributions = None if greedy else draft.distributions
        kept = tree if tree.static and tree.is_chain else None
        inputs = (
            draft.tokens,
            draft.live,
            draft.probe,
            None if kept is not None else tree.parents,
            draft.positions,
            None if distributions is None else distributions.probs,
            None if distributions is None else distributions.tokens,
            draft.source,
            None if distributions is None else draft.fresh,
            None if greedy else rng.tables(),
        )
        template = Draft(
            draft.tokens[:0], Tree.chain(0), draft.live[:0], replacement=draft.replacement, mixed=draft.mixed
        )
        # matching looks at all children of a node at once, rejection at one after the other
        matched = isinstance(rule, SampleMatch) or (isinstance(rule, Exact) and distributions is None)
        wide = draft.size if matched and tree.width > 1 else _rounded(tree.width, draft.size)
        bounds = _rounded(tree.depth, draft.size), wide
        return cls(template, kept, bounds, vocabulary, inputs)

    @property
    def key(self) -> Key:
        return (
            self.tree is None or self.tree.size,
            *self.bounds,
            self.template.replacement,
            self.template.mixed,
            self.vocabulary,
        )

    def made(self, inputs: Sequence[Tensor | None]) -> tuple[Draft, CounterRNG]:
        """The draft and its random numbers from the inputs' buffers."""
        tokens, live, probe, parents, positions, probs, support, source, fresh, tables = inputs
        assert tokens is not None and live is not None
        tree = self.tree
        if tree is None:
            assert parents is not None
            tree = Tree(parents, *self.bounds)
        draft = replace(
            self.template,
            tokens=tokens,
            live=live,
            probe=probe,
            tree=tree,
            positions=positions,
            distributions=None if probs is None else Distribution(probs, support, self.vocabulary),
            source=source,
            fresh=fresh,
        )
        return draft, PredrawnRNG(tables, len(tokens), tokens.device)


class CapturedRule:
    """An acceptance rule that runs from a CUDA graph where it can."""

    def __init__(self, rule: Rule, graph_pool: GraphPool) -> None:
        self.rule, self.graph_pool = rule, graph_pool

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        logits = scores.whole
        if logits is None or not recordable(self.rule, scores.sampling, rng, draft):
            return self.rule(draft, scores, rng)
        drafted = RecordedDraft.of(draft, self.rule, scores.sampling, rng, logits.shape[-1])
        key = "verdict", self.rule, scores.sampling, logits.shape, *drafted.key
        work = partial(self._apply, drafted, scores.sampling)
        parts = self.graph_pool.run(key, (logits, *drafted.inputs), work)
        return Verdict.of((parts[0][:, : draft.tree.depth], *parts[1:]))

    def _apply(self, drafted: RecordedDraft, sampling: Sampling, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        logits, *rest = inputs
        assert logits is not None
        draft, rng = drafted.made(rest)
        return self.rule(draft, scores_of(draft, sampling, logits), rng).parts


def scores_of(draft: Draft, sampling: Sampling, logits: Tensor) -> Scores:
    """Scores from logits alone, for a sampling that remembers nothing and a rule that reads no positions."""
    pipeline = LogitsPipeline(sampling, [], logits.shape[-1], logits.device)
    lengths = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return Scores(draft, pipeline, lengths, logits)


def _rounded(bound: int, size: int) -> int:
    """The next power of two, at most `size`, so that few shapes are captured."""
    return min(1 << max(bound - 1, 0).bit_length(), max(size, 1))
