"""Token recycling: a table of each token's likeliest successors, updated from every distribution the target computes.

Luo et al., "Turning trash into treasure: accelerating inference of large language models with token recycling" (arXiv
2408.08696): every row of a target pass, accepted or not, updates a table of vocabulary x k, from which a static tree is
read breadth first. Ours has a table per batch row, so that rows are independent, and merges them when a generation
ends. It also estimates each successor's probability, so a tree can grow best first instead. Tables start with the
successors in the prompt. Works on token ids alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Trie, TrieDrafter
from outrider.core.drafters.per_row import IndependentRows
from outrider.core.drafters.tree_shapes import ranks, sequoia, validate
from outrider.core.errors import InvalidOption, unknown
from outrider.core.kernels.topk import largest
from outrider.core.protocol import Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG

Successors = tuple[list[int], list[float]]  # token ids, the likeliest first, and the probability of each
# Measured on the built-in prompts: a successor with the share s of the k largest probabilities comes next again with
# probability _BASE + _SLOPE * s, and the successor of rank r with probability _BY_RANK[r].
_BASE, _SLOPE = 0.03, 0.55
_BY_RANK = (0.33, 0.10, 0.065, 0.045, 0.035, 0.03, 0.025, 0.02)
STATIC = "static"
_NO_TOKEN = -1  # the last token of an empty row
_MAX_RECYCLED = 64  # rows of a target pass


@dataclass(frozen=True)
class _Likeliest:
    """The target's `count` likeliest tokens after the root and each node [B, R, K] and their logits; the nodes' tokens
    [B, N], and which are live."""

    count: int
    parts: ClassVar[int] = 4

    def __call__(self, draft: Draft, scores: Scores) -> Sequence[Tensor]:
        logits = scores.leading(min(draft.size + 1, _MAX_RECYCLED))
        values, ids = largest(logits, min(self.count, scores.vocabulary))
        return ids, values, draft.tokens, draft.live


class TokenRecycling(IndependentRows, TrieDrafter):
    """`tree` is a static tree, given by the parents of its nodes; "static" is the best tree of `nodes` nodes for the
    measured acceptance by rank. By default the tree grows best first to `nodes` nodes, each with an estimated
    probability of at least `min_probability`. `initial_table` is the table at the start, such as the target's
    bigrams."""

    def __init__(
        self,
        *,
        nodes: int = 16,
        depth: int = 6,
        min_probability: float = 0.05,
        successors: int = 8,
        tree: Sequence[int] | str | None = None,
        initial_table: Mapping[int, Successors] | None = None,
        remember: bool = True,
    ) -> None:
        if min(nodes, depth, successors) < 1 or not 0 <= min_probability <= 1:
            raise InvalidOption(
                f"nodes={nodes}, depth={depth}, successors={successors}, min_probability={min_probability}: the first "
                "three must be 1 or more, min_probability from 0 to 1"
            )
        self.nodes, self.depth, self.min_probability, self.successors = nodes, depth, min_probability, successors
        if isinstance(tree, str):
            if tree != STATIC:
                raise unknown("tree", tree, (STATIC,))
            tree = sequoia(_BY_RANK[:successors], nodes, depth).shape(nodes, depth)
        self.tree = None if tree is None else validate(tree)
        self._ranks = () if self.tree is None else ranks(self.tree)
        self.readings = (_Likeliest(successors),)
        self.remember = remember
        self.initial_table: Mapping[int, Successors] = {} if initial_table is None else initial_table
        self.table: dict[int, Successors] = {}  # of earlier generations
        self._rows: list[dict[int, Successors]] = []

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._rows = [self._read(prompt) for prompt in prompts]
        self._last = [prompt[-1] for prompt in prompts]
        self._batched = False

    # ---- continuous batching

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._rows = [self._rows[row] if row >= 0 else {} for row in order]
        self._last = [self._last[row] if row >= 0 else _NO_TOKEN for row in order]

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        self._rows[row], self._last[row] = self._read(prompt), prompt[-1]

    def leave(self, row: int) -> None:
        self._rows[row], self._last[row] = {}, _NO_TOKEN

    def observe_committed(self, row: int, tokens: Sequence[int]) -> None:
        """Add tokens without the target's distributions: each becomes the first successor of the one before it."""
        table = self._rows[row]
        for token, successor in pairwise([self._last[row], *tokens]):
            known, shares = table.get(token, ([], []))
            if successor not in known:
                first, older = _shares(1)[0], self.successors - 1
                table[token] = [successor, *known[:older]], [first, *((1 - first) * share for share in shares[:older])]
        self._last[row] = tokens[-1]

    # ----

    def _read(self, prompt: Sequence[int]) -> dict[int, Successors]:
        """The successors of each token in a prompt, the latest first."""
        table: dict[int, list[int]] = {}
        for token, successor in zip(reversed(prompt[:-1]), reversed(prompt[1:]), strict=True):
            known = table.setdefault(token, [])
            if successor not in known and len(known) < self.successors:
                known.append(successor)
        return {token: (known, _shares(len(known))) for token, known in table.items()}

    def tries(self, room: Sequence[int]) -> list[Trie]:
        grow = self._grow if self.tree is None else self._fill
        return [grow(row, last, left) for row, last, left in zip(self._rows, self._last, room, strict=True)]

    def _after(self, row: dict[int, Successors], token: int) -> Successors:
        return row.get(token) or self.table.get(token) or self.initial_table.get(token) or ([], [])

    def _fill(self, row: dict[int, Successors], last: int, room: int) -> Trie:
        """The nodes of the static tree whose tokens are known."""
        trie, in_trie = Trie(), {-1: -1}  # node of the static tree -> node of the trie
        assert self.tree is not None
        for node, (parent, rank) in enumerate(zip(self.tree, self._ranks, strict=True)):
            above = in_trie.get(parent)
            if above is None or (trie.depths[above] if above >= 0 else 0) >= room:
                continue
            known, shares = self._after(row, trie.tokens[above] if above >= 0 else last)
            if rank < len(known):
                in_trie[node] = trie.at(above, known[rank])
                trie.weights[in_trie[node]] = shares[rank] * (trie.weights[above] if above >= 0 else 1.0)
        return trie

    def _grow(self, row: dict[int, Successors], last: int, room: int) -> Trie:
        """A tree that grows best first."""
        trie, max_depth = Trie(), min(self.depth, room)
        heap: list[tuple[float, int, int, int]] = []  # -probability, a running number to break ties, parent, token
        node, probability, number = -1, 1.0, 0
        while max_depth > 0:
            if node < 0 or trie.depths[node] < max_depth:
                known, shares = self._after(row, trie.tokens[node] if node >= 0 else last)
                for token, share in zip(known, shares, strict=True):
                    if probability * share >= self.min_probability:
                        heapq.heappush(heap, (-probability * share, number, node, token))
                        number += 1
            if not heap or len(trie) >= self.nodes:
                break
            negative, _, parent, token = heapq.heappop(heap)
            node, probability = trie.at(parent, token), -negative
            trie.weights[node] = probability
        return trie

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        count = min(draft.size + 1, _MAX_RECYCLED)
        best, logits, tokens, live = (part.tolist() for part in scores.read(self.readings[0]))
        paths = verdict.path.tolist() if verdict.outcome is None else verdict.outcome.paths
        for row, emitted in enumerate(verdict.rows(draft)):
            if self._last[row] == _NO_TOKEN:
                continue
            drafted = zip(tokens[row][: count - 1], live[row], strict=False)  # in a batch, the row's nodes come first
            contexts = [  # the token each score row follows
                self._last[row],
                *(token if alive and token < scores.vocabulary else _NO_TOKEN for token, alive in drafted),
            ]
            accepted = [node + 1 for node in paths[row] if 0 <= node < count - 1]
            for index in (*range(1, count), 0, *accepted):  # accepted nodes last: they overwrite rejected ones
                if contexts[index] != _NO_TOKEN:
                    self._rows[row][contexts[index]] = best[row][index], _probabilities(logits[row][index])
            if emitted:
                self._last[row] = emitted[-1]

    def end(self) -> None:
        if self.remember and not self._batched:
            for row in self._rows:
                self.table.update(row)
        self._rows = []


def _probabilities(logits: Sequence[float]) -> list[float]:
    """The estimated probability that each successor comes next again, from its logits, the largest first."""
    weights = [math.exp(logit - logits[0]) for logit in logits]
    total = sum(weights)
    return [_BASE + _SLOPE * weight / total for weight in weights]


def _shares(count: int) -> list[float]:
    """The estimated probabilities of successors in a prompt, the latest first."""
    return [0.4 * 0.5**rank for rank in range(count)]
