"""Exact acceptance rules in CUDA graphs (outrider.core.engine.cuda_graphs), one per shape of draft.

A rule is a pure function of draft, scores and random numbers, so all its inputs go into fixed buffers; its uniforms are
drawn before. Static trees, chains above all, are captured as they are; the depth and width of a dynamic tree are
rounded up to powers of two. Other rules, stateful penalties and other generators run without a graph. Independent of
networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.core.distribution import Distribution, LogitsPipeline
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.cuda_graphs import GraphPool
from outrider.core.protocol import Rule, Scores
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.rules.exact import Block, Exact, SampleMatch, Token
from outrider.core.tree import Tree

_PURPOSES = {  # the random numbers that each rule reads
    Exact: (Purpose.NEXT, Purpose.ACCEPT),
    Token: (Purpose.NEXT, Purpose.ACCEPT),
    Block: (Purpose.NEXT, Purpose.ACCEPT),
    SampleMatch: (Purpose.MATCH,),
}


class _Predrawn(CounterRNG):
    """A generator that returns uniforms [B, N + 1] drawn before, one table per purpose. The rule runs as its reference,
    on a CPU too: that is what a graph captures."""

    feeds_native = False

    def __init__(self, tables: dict[Purpose, Tensor], rows: int, device: torch.device) -> None:
        super().__init__([0] * rows, device)
        self._tables = tables

    def table(self, purpose: Purpose) -> Tensor:
        return self._tables[purpose]


class CapturedRule:
    """An acceptance rule that runs from a CUDA graph where it can."""

    def __init__(self, rule: Rule, graph_pool: GraphPool) -> None:
        self.rule, self.graph_pool = rule, graph_pool

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        purposes = _PURPOSES.get(type(self.rule))
        logits = scores.whole
        capturable = logits is not None and not scores.sampling.remembers and draft.rows
        if purposes is None or type(rng) is not CounterRNG or not capturable:
            return self.rule(draft, scores, rng)
        assert logits is not None
        tree = draft.tree
        bounds = _rounded(tree.depth, draft.size), _rounded(tree.width, draft.size)
        # greedy decoding reads neither draft distributions nor random numbers
        greedy = scores.sampling.greedy and isinstance(self.rule, Exact | SampleMatch)
        distributions = None if greedy else draft.distributions
        nodes = torch.arange(draft.size + 1, device=logits.device).expand(draft.rows, -1)
        inputs = [
            logits,
            draft.tokens,
            draft.live,
            draft.probe,
            tree.parents,
            None if distributions is None else distributions.probs,
            None if distributions is None else distributions.tokens,
            None if distributions is None else draft.source,
            None if distributions is None else draft.fresh,
            *(() if greedy else (rng.uniform(purpose, nodes) for purpose in purposes)),
        ]
        empty = draft.tokens[:0], Tree.chain(0), draft.live[:0]
        template = Draft(*empty, replacement=draft.replacement, mixed=draft.mixed)
        key = self.rule, scores.sampling, logits.shape, bounds, draft.replacement, draft.mixed
        work = partial(self._apply, template, bounds, scores.sampling, purposes)
        parts = self.graph_pool.run(("verdict", *key), inputs, work)
        return Verdict.of((parts[0][:, : tree.depth], *parts[1:]))

    def _apply(
        self,
        template: Draft,
        bounds: tuple[int, int],
        sampling: Any,
        purposes: Sequence[Purpose],
        inputs: Sequence[Tensor | None],
    ) -> tuple[Tensor, ...]:
        logits, tokens, live, probe, parents, probs, support, source, fresh, *uniforms = inputs
        assert logits is not None and tokens is not None and live is not None and parents is not None
        draft = replace(
            template,
            tokens=tokens,
            live=live,
            probe=probe,
            tree=Tree(parents, *bounds),
            distributions=None if probs is None else Distribution(probs, support, logits.shape[-1]),
            source=source,
            fresh=fresh,
        )
        pipeline = LogitsPipeline(sampling, [], logits.shape[-1], logits.device)
        lengths = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)  # read by no capturable sampling
        tables = {purpose: table for purpose, table in zip(purposes, uniforms, strict=False) if table is not None}
        rng = _Predrawn(tables, len(tokens), tokens.device)
        return self.rule(draft, Scores(draft, pipeline, lengths, logits), rng).parts


def _rounded(bound: int, size: int) -> int:
    """The next power of two, at most `size`, so that few shapes are captured."""
    return min(1 << max(bound - 1, 0).bit_length(), max(size, 1))
