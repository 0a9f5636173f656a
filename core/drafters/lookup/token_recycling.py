"""Token recycling: for every token the successors it was last seen with, kept from what the target scored anyway.

Luo et al., "Turning trash into treasure: accelerating inference of large language models with token recycling" (arXiv
2408.08696): a table of vocabulary x k, renewed by every row of every verification, accepted or not, from which a
static tree is read breadth first. Ours keeps one table a row of the batch, so that rows never see each other, and
joins them when a generation ends; it notes how likely each successor is to come again, so that besides the static tree
(`tree`) there is one that grows best first. Successors read off the prompt start it. Knows token ids only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from outrider.core.device import fetch
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Grower, Trie
from outrider.core.drafters.per_row import IndependentRows
from outrider.core.drafters.tree_shapes import ranks, sequoia, validate
from outrider.core.errors import InvalidOption, unknown
from outrider.core.kernels.topk import largest
from outrider.core.protocol import Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG

Successors = tuple[list[int], list[float]]  # token ids, the likeliest first, and the chance of each
# the chance that a successor comes next again, for its share of the k last time, on the built-in prompts
_LEAST_TRUST, _TRUST = 0.03, 0.55
_RANKS = (0.33, 0.10, 0.065, 0.045, 0.035, 0.03, 0.025, 0.02)  # ... and for its rank, likewise
STATIC = "static"
_NOBODY = -1  # the last token of a hole
_ROWS = 64  # of a pass that are recycled: the first so many


class TokenRecycling(IndependentRows, Grower):
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
            tree = sequoia(_RANKS[:successors], nodes, depth).shape(nodes, depth)
        self.tree = None if tree is None else validate(tree)
        self._ranks = () if self.tree is None else ranks(self.tree)
        self.remember = remember
        self.initial_table: Mapping[int, Successors] = {} if initial_table is None else initial_table
        self.table: dict[int, Successors] = {}  # what generations before this one left
        self._rows: list[dict[int, Successors]] = []

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._rows = [self._read(prompt) for prompt in prompts]
        self._last = [prompt[-1] for prompt in prompts]
        self._batched = False

    # ---- rows that come and go

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._rows = [self._rows[row] if row >= 0 else {} for row in order]
        self._last = [self._last[row] if row >= 0 else _NOBODY for row in order]

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        self._rows[row], self._last[row] = self._read(prompt), prompt[-1]

    def leave(self, row: int) -> None:
        self._rows[row], self._last[row] = {}, _NOBODY

    def observe_committed(self, row: int, tokens: Sequence[int]) -> None:
        """Only which token followed which is known of these."""
        table = self._rows[row]
        for token, after in pairwise([self._last[row], *tokens]):
            known, shares = table.get(token, ([], []))
            if after not in known:
                first = _shares(1)[0]
                kept = self.successors - 1
                table[token] = [after, *known[:kept]], [first, *((1 - first) * share for share in shares[:kept])]
        self._last[row] = tokens[-1]

    # ----

    def _read(self, prompt: Sequence[int]) -> dict[int, Successors]:
        """What follows each token of a prompt, the latest first."""
        found: dict[int, list[int]] = {}
        for token, after in zip(reversed(prompt[:-1]), reversed(prompt[1:]), strict=True):
            known = found.setdefault(token, [])
            if after not in known and len(known) < self.successors:
                known.append(after)
        return {token: (known, _shares(len(known))) for token, known in found.items()}

    def tries(self, room: Sequence[int]) -> list[Trie]:
        grow = self._grow if self.tree is None else self._fill
        return [grow(row, last, left) for row, last, left in zip(self._rows, self._last, room, strict=True)]

    def _after(self, row: dict[int, Successors], token: int) -> Successors:
        return row.get(token) or self.table.get(token) or self.initial_table.get(token) or ([], [])

    def _fill(self, row: dict[int, Successors], last: int, room: int) -> Trie:
        """The static tree, as far as successors are known."""
        trie, place = Trie(), {-1: -1}
        assert self.tree is not None
        for node, (parent, rank) in enumerate(zip(self.tree, self._ranks, strict=True)):
            above = place.get(parent)
            if above is None or (trie.depths[above] if above >= 0 else 0) >= room:
                continue
            known, shares = self._after(row, trie.tokens[above] if above >= 0 else last)
            if rank < len(known):
                place[node] = trie.at(above, known[rank])
                trie.weights[place[node]] = shares[rank] * (trie.weights[above] if above >= 0 else 1.0)
        return trie

    def _grow(self, row: dict[int, Successors], last: int, room: int) -> Trie:
        """Best first."""
        trie, heap, deepest = Trie(), list[tuple[float, int, int, int]](), min(self.depth, room)
        node, chance, number = -1, 1.0, 0
        while deepest > 0:
            if node < 0 or trie.depths[node] < deepest:
                known, shares = self._after(row, trie.tokens[node] if node >= 0 else last)
                for token, share in zip(known, shares, strict=True):
                    if chance * share >= self.min_probability:
                        heapq.heappush(heap, (-chance * share, number, node, token))
                        number += 1
            if not heap or len(trie) >= self.nodes:
                break
            less, _, parent, token = heapq.heappop(heap)
            node, chance = trie.at(parent, token), -less
            trie.weights[node] = chance
        return trie

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        count = min(draft.size + 1, _ROWS)
        values, ids = largest(scores.leading(count), min(self.successors, scores.vocabulary))
        parts = (ids, values.float(), draft.tokens, draft.live, verdict.path)
        best, logits, tokens, live, paths = (part.tolist() for part in fetch(*parts))
        for row, emitted in enumerate(verdict.rows(draft)):
            if self._last[row] == _NOBODY:
                continue
            said = zip(tokens[row][: count - 1], live[row], strict=False)
            names = [self._last[row], *(token if one and token < scores.vocabulary else _NOBODY for token, one in said)]
            taken = [node + 1 for node in paths[row] if 0 <= node < count - 1]
            for place in (*range(1, count), 0, *taken):  # what was accepted has the last word
                if names[place] != _NOBODY:
                    self._rows[row][names[place]] = best[row][place], _chances(logits[row][place])
            if emitted:
                self._last[row] = emitted[-1]

    def end(self) -> None:
        if self.remember and not self._batched:
            for row in self._rows:
                self.table.update(row)
        self._rows = []


def _chances(logits: Sequence[float]) -> list[float]:
    """That each comes again, of the largest logits, the largest first."""
    weights = [math.exp(one - logits[0]) for one in logits]
    total = sum(weights)
    return [_LEAST_TRUST + _TRUST * weight / total for weight in weights]


def _shares(count: int) -> list[float]:
    """Of successors that nothing is known about but which was the latest."""
    return [0.4 * 0.5**rank for rank in range(count)]
