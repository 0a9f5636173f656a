"""Exact rules as one launch each, recorded like a network's passes (outrider.core.engine.cuda_graphs) for every shape
of draft that comes up.

A rule is a pure function of draft, scores and random generator: what it reads goes into buffers that stay, and its
uniforms are made before. Static shapes, chains above all, are recorded as they are; a tree that was grown is taken for
one as deep and as wide as the next power of two. What a rule can't be recorded with (penalties, which remember; other
rules; generators that do not draw) goes through it as it is. Knows drafts and distributions; nothing of networks.
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

_READS = {  # what numbers each rule draws
    Exact: (Purpose.NEXT, Purpose.ACCEPT),
    Token: (Purpose.NEXT, Purpose.ACCEPT),
    Block: (Purpose.NEXT, Purpose.ACCEPT),
    SampleMatch: (Purpose.MATCH,),
}


class _Drawn(CounterRNG):
    """Uniforms [B, N + 1] that were drawn already, for each purpose."""

    def __init__(self, tables: dict[Purpose, Tensor], rows: int, device: torch.device) -> None:
        super().__init__([0] * rows, device)
        self._drawn = tables

    def table(self, purpose: Purpose) -> Tensor:
        return self._drawn[purpose]


class CapturedRule:
    """A rule, its verdicts recorded where that can be done."""

    def __init__(self, rule: Rule, stills: GraphPool) -> None:
        self.rule, self.stills = rule, stills

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        purposes = _READS.get(type(self.rule))
        logits = scores.whole
        fits = logits is not None and not scores.sampling.remembers and draft.rows
        if purposes is None or type(rng) is not CounterRNG or not fits:
            return self.rule(draft, scores, rng)
        assert logits is not None
        tree, own = draft.tree, draft.tree.static
        bounds = (
            (tree.depth, tree.width) if own else tuple(_rounded(one, draft.size) for one in (tree.depth, tree.width))
        )
        if own:
            _ = tree.ancestors, tree.children, tree.paths  # worked out once, not in every recording
        certain = scores.sampling.greedy and isinstance(
            self.rule, Exact | SampleMatch
        )  # neither distributions nor numbers
        distributions, every = (
            None if certain else draft.distributions,
            torch.arange(draft.size + 1, device=logits.device),
        )
        inputs = [
            logits,
            draft.tokens,
            draft.live,
            draft.probe,
            None if own else tree.parents,
            None if distributions is None else distributions.probs,
            None if distributions is None else distributions.tokens,
            None if distributions is None else draft.source,
            None if distributions is None else draft.fresh,
            *(() if certain else (rng.uniform(one, every.expand(draft.rows, -1)) for one in purposes)),
        ]
        form = replace(draft, tokens=draft.tokens[:0], live=draft.live[:0], distributions=None, note=None, belief=None)
        form = replace(
            form,
            probe=None,
            positions=None,
            tree=tree if own else Tree.chain(0),
            carry=None,
            embeddings=None,
            source=None,
            fresh=None,
        )
        key = (self.rule, scores.sampling, logits.shape, bounds, draft.replacement, draft.mixed, id(tree) if own else 0)
        work = partial(self._judge, form, None if own else bounds, scores.sampling, purposes)
        parts = self.stills.run(("verdict", *key), inputs, work, tree if own else None)
        return Verdict.of((parts[0][:, : tree.depth], *parts[1:]))

    def _judge(
        self, form: Draft, bounds: Any, sampling: Any, purposes: Sequence[Purpose], inputs: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        logits, tokens, live, probe, parents, probs, support, source, fresh, *drawn = inputs
        assert logits is not None and tokens is not None and live is not None
        tree = form.tree if parents is None else Tree(parents, *bounds)
        distributions = None if probs is None else Distribution(probs, support, logits.shape[-1])
        draft = replace(
            form,
            tokens=tokens,
            live=live,
            probe=probe,
            tree=tree,
            distributions=distributions,
            source=source,
            fresh=fresh,
        )
        pipeline = LogitsPipeline(sampling, [], logits.shape[-1], logits.device)
        nothing = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        tables = {one: table for one, table in zip(purposes, drawn, strict=False) if table is not None}
        rng = _Drawn(tables, len(tokens), tokens.device)
        return self.rule(draft, Scores(draft, pipeline, nothing, logits), rng).parts


def _rounded(bound: int, size: int) -> int:
    """Up to the next power of two, so that there are few."""
    return min(1 << max(bound - 1, 0).bit_length(), max(size, 1))
