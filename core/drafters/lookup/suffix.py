"""Suffix automata: drafts a tree of what followed the text's longest suffixes wherever they occurred, by frequency.

SAM-Decoding (Hu et al., "SAM Decoding: speculative decoding via suffix automaton", arXiv 2411.10666) has an automaton
of the context and a static one of a corpus; SuffixDecoding (Oliaro et al., arXiv 2411.04975) has suffix trees of the
request and of past outputs. Ours has an automaton per row and one of past outputs, which grows only when a generation
ends, so that rows of a batch are independent. Shorter matches are blended in as in prediction by partial matching, with
learned reliabilities per match length; the tree grows best first. Works on token ids alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Trie, TrieDrafter
from outrider.core.drafters.per_row import IndependentRows
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG


class Automaton:
    """The suffix automaton of a growing text (Blumer et al. 1985). A state is a set of substrings with the same end
    positions: `length` is that of the longest, `count` the number of positions, `link` the state of the longest suffix
    outside the set. Negative tokens separate texts and are never drafted."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.last = 0
        self.size = 0

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        self.size += 1
        new = self._state({}, self.length[self.last] + 1, 0)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = 0 if state < 0 else self._split(state, token)
        self.last = new
        while new > 0:  # every suffix of the text has one more occurrence
            self.count[new] += 1
            new = self.link[new]

    def _state(self, following: dict[int, int], length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1

    def _split(self, state: int, token: int) -> int:
        """The state of `state`'s longest string extended by `token`, cloned if its set also has longer strings."""
        target = self.next[state][token]
        if self.length[target] == self.length[state] + 1:
            return target
        copy = self._state(dict(self.next[target]), self.length[state] + 1, self.count[target])
        self.link[copy] = self.link[target]
        self.link[target] = copy
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = copy
            state = self.link[state]
        return copy

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest match (state, length) of another text after one more token."""
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        following = self.next[state].get(token)
        return (0, 0) if following is None else (following, length + 1)


Match = tuple[Automaton, int, int]  # an automaton, its state, and the length of the match

_BUCKETS = 16  # match lengths from here on share their reliability
_MAX_BLENDED = 4  # matches per node
# how often the next token was among those that followed a match of 1, 2, ... tokens, on the built-in prompts
_RELIABILITY = (0.36, 0.53, 0.60, 0.65, 0.75, 0.78, 0.80, 0.82, 0.84, 0.86, 0.88, 0.89, 0.90, 0.91, 0.92, 0.94)
_PRIOR = 16.0  # weight of the table above, in observations


class _Row:
    """One row: its automaton, its match in the automaton of past outputs, and how reliable matches have been."""

    def __init__(self, past: Automaton, prompt: Sequence[int]) -> None:
        self.past, self.own = past, Automaton()
        self.past_match = (0, 0)  # state, length
        self.output: list[int] = []
        self.right = [_PRIOR * rate for rate in _RELIABILITY]
        self.seen = [_PRIOR] * _BUCKETS
        self._trie = Trie()
        self._used: dict[int, list[tuple[int, dict[int, int]]]] = {}  # node -> (bucket, successors) of its matches
        for token in prompt:
            self.own.extend(token)
        if past.size:
            for token in prompt[-256:]:
                self.past_match = past.step(*self.past_match, token)

    def add(self, tokens: Sequence[int]) -> None:
        """Add committed tokens, and count which of the last draft's matches predicted them."""
        node: int | None = -1
        for token in tokens:
            for bucket, successors in self._used.get(-2 if node is None else node, ()):
                self.seen[bucket] += 1
                if token in successors:
                    self.right[bucket] += 1
                    break
            node = None if node is None else self._trie.nodes.get((node, token))
        for token in tokens:
            self.own.extend(token)
            if self.past.size:
                self.past_match = self.past.step(*self.past_match, token)
        self.output += tokens

    def add_undrafted(self, tokens: Sequence[int]) -> None:
        """Add committed tokens that were not drafted for."""
        self._trie, self._used = Trie(), {}
        self.add(tokens)

    def guess(self, max_nodes: int, max_depth: int, min_probability: float) -> Trie:
        """Grow a tree best first: take the most probable candidate, and make its successors candidates, as long as
        their probability reaches `min_probability`."""
        trie = self._trie = Trie()
        self._used = {}
        if max_nodes < 1 or max_depth < 1:
            return trie
        state = max(self.own.link[self.own.last], 0)
        matches = [(self.own, state, self.own.length[state])]
        if self.past.size:
            matches.append((self.past, *self.past_match))
        # -probability, a running number to break ties, parent, token, matches
        heap: list[tuple[float, int, int, int, list[Match]]] = []
        node, probability, number = -1, 1.0, 0
        while True:
            if node < 0 or trie.depths[node] < max_depth:
                for successor in self._successors(node, matches, probability, min_probability):
                    heapq.heappush(heap, (-successor[0], number, node, *successor[1:]))
                    number += 1
            if not heap or len(trie) >= max_nodes:
                return trie
            negative, _, parent, token, matches = heapq.heappop(heap)
            node, probability = trie.at(parent, token), -negative
            trie.weights[node] = probability

    def _successors(
        self, node: int, matches: list[Match], reach: float, min_probability: float
    ) -> list[tuple[float, int, list[Match]]]:
        """Likely successors of a node whose path has probability `reach`: (probability, token, matches after it). The
        longest match gets a share of the probability, its reliability; shorter matches share the remainder."""
        merged: dict[int, tuple[float, list[Match]]] = {}
        used = self._used[node] = []
        remaining = reach
        matches = [match for match in matches if match[1] > 0]
        while matches and remaining > min_probability and len(used) < _MAX_BLENDED:
            matches.sort(key=_length)
            automaton, state, length = matches.pop()
            shorter = automaton.link[state]
            if shorter > 0:
                matches.append((automaton, shorter, automaton.length[shorter]))
            successors, count = automaton.next[state], automaton.count
            total = sum(count[after] for token, after in successors.items() if token >= 0)
            if not total:
                continue
            bucket = min(length, _BUCKETS) - 1
            used.append((bucket, successors))
            share = remaining * self.right[bucket] / self.seen[bucket]
            remaining -= share
            for token, after in successors.items():
                probability = share * count[after] / total
                if token < 0 or probability < min_probability / 4:
                    continue
                if token not in merged:
                    merged[token] = probability, [(automaton, after, length + 1)]
                else:
                    before, extended = merged[token]
                    if all(match[0] is not automaton for match in extended):
                        extended.append((automaton, after, length + 1))
                    merged[token] = before + probability, extended
        return [
            (probability, token, extended)
            for token, (probability, extended) in merged.items()
            if probability >= min_probability
        ]


def _length(match: Match) -> int:
    return match[2]


class Suffix(IndependentRows, TrieDrafter):
    """A tree of at most `nodes` guesses with an estimated probability of at least `min_probability` each. The drafter
    remembers up to `memory` tokens of its past outputs, none if 0."""

    def __init__(
        self, *, nodes: int = 16, depth: int = 16, min_probability: float = 0.05, memory: int = 100_000
    ) -> None:
        if min(nodes, depth) < 1 or not 0 < min_probability <= 1 or memory < 0:
            raise InvalidOption(
                f"nodes={nodes}, depth={depth}, min_probability={min_probability}, memory={memory}: nodes and depth "
                "must be 1 or more, min_probability above 0 and at most 1, memory 0 or more"
            )
        self.nodes, self.depth, self.min_probability, self.memory = nodes, depth, min_probability, memory
        self.past = Automaton()
        self._outputs: list[list[int]] = []  # those in `past`
        self._rows: list[_Row | None] = []  # None: an empty row

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._rows = [_Row(self.past, list(prompt)) for prompt in prompts]
        self._end = sampling.end
        self._open = [True] * len(prompts)
        self._batched = False

    # ---- continuous batching

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._rows = [self._rows[row] if row >= 0 else None for row in order]
        self._open = [False] * len(order)

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        self._rows[row] = _Row(Automaton(), prompt)

    def leave(self, row: int) -> None:
        self._rows[row] = None

    def observe_committed(self, row: int, tokens: Sequence[int]) -> None:
        own = self._rows[row]
        assert own is not None
        own.add_undrafted(tokens)

    # ----

    def tries(self, room: Sequence[int]) -> list[Trie]:
        self._open = [left >= 0 for left in room]
        return [
            Trie() if row is None else row.guess(self.nodes, min(self.depth, left), self.min_probability)
            for row, left in zip(self._rows, room, strict=True)
        ]

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for row, tokens, open_ in zip(self._rows, verdict.rows(draft), self._open, strict=True):
            if open_ and row is not None:
                row.add(tokens)

    def end(self) -> None:
        for row in self._rows:
            if row is not None and not self._batched:
                self._remember(row.output)
        self._rows = []

    def _remember(self, output: list[int]) -> None:
        """Add an output, up to its end token, to the past. If that exceeds `memory`, drop the oldest outputs until at
        most half of it is used."""
        stop = next((position for position, token in enumerate(output) if token in self._end), len(output))
        text = output[: stop + 1][-self.memory :] if self.memory else []
        if not text:
            return
        self._outputs.append(text)
        if self.past.size + len(text) > self.memory:
            while len(self._outputs) > 1 and sum(map(len, self._outputs)) > self.memory // 2:
                self._outputs.pop(0)
            self.past = Automaton()
            for remembered in self._outputs:
                _append(self.past, remembered)
        else:
            _append(self.past, text)


def _append(past: Automaton, text: Sequence[int]) -> None:
    for token in (*text, -1 - past.size):
        past.extend(token)
