"""Suffix automata: what followed the longest ends of the text wherever they occurred before, as a tree by frequency.

SAM-Decoding (Hu et al., "SAM Decoding: speculative decoding via suffix automaton", arXiv 2411.10666) keeps an automaton
of the context, grown token by token, and a static one of a corpus; SuffixDecoding (Oliaro et al., arXiv 2411.04975)
suffix trees of the request and of past outputs, with counts, and drafts longer the longer the match. Ours has both of
these in automata: one of the row's own text, and one of past outputs that grows when a generation ends, so that rows
of a batch never see each other. Shorter matches are blended in as prediction by partial matching does, with how far a
match of each length can be trusted learnt from what came out; the tree grows best first until guesses no longer pay.
Knows token ids only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Grower, Trie
from outrider.core.drafters.per_row import IndependentRows
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG


class Automaton:
    """The suffix automaton of a growing text (Blumer et al. 1985): each state is a set of its substrings that end at
    the same places, `length` the longest of them, `count` at how many places, `link` the state of the longest shorter
    suffix. Negative tokens keep texts apart and are never guessed."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.last = 0
        self.size = 0

    def extend(self, token: int) -> None:
        """One more token at the end: a few steps on average, however long the text."""
        self.size += 1
        new = self._state({}, self.length[self.last] + 1, 0)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = 0 if state < 0 else self._split(state, token)
        self.last = new
        while new > 0:  # every suffix of the text ends here once more
            self.count[new] += 1
            new = self.link[new]

    def _state(self, following: dict[int, int], length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1

    def _split(self, state: int, token: int) -> int:
        """The state of the longest suffix before this token, with it: a copy where longer strings must stay apart."""
        there = self.next[state][token]
        if self.length[there] == self.length[state] + 1:
            return there
        copy = self._state(dict(self.next[there]), self.length[state] + 1, self.count[there])
        self.link[copy] = self.link[there]
        self.link[there] = copy
        while state >= 0 and self.next[state].get(token) == there:
            self.next[state][token] = copy
            state = self.link[state]
        return copy

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Where the longest match of another text goes with one more token, and its length."""
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        following = self.next[state].get(token)
        return (0, 0) if following is None else (following, length + 1)


Match = tuple[Automaton, int, int]  # the state of an automaton, and how long the match is

_LONGEST = 16  # longer matches are all trusted alike
_LEVELS = 4  # matches of so many lengths are blended
# how often what followed a match of 1, 2, ... tokens held the token that came, on the built-in prompts
_TRUST = (0.36, 0.53, 0.60, 0.65, 0.75, 0.78, 0.80, 0.82, 0.84, 0.86, 0.88, 0.89, 0.90, 0.91, 0.92, 0.94)
_PRIOR = 16.0  # observations that the table above counts for


class _Row:
    """One row: its own automaton, where it stands in that of past outputs, and how far matches can be trusted."""

    def __init__(self, past: Automaton, prompt: Sequence[int]) -> None:
        self.past, self.own = past, Automaton()
        self.place = (0, 0)
        self.output: list[int] = []
        self.right = [_PRIOR * trust for trust in _TRUST]
        self.seen = [_PRIOR] * _LONGEST
        self._trie = Trie()
        self._asked: dict[int, list[tuple[int, dict[int, int]]]] = {}  # node -> lengths looked at, what followed there
        for token in prompt:
            self.own.extend(token)
        if past.size:
            for token in prompt[-256:]:
                self.place = past.step(*self.place, token)

    def add(self, tokens: Sequence[int]) -> None:
        """Tokens were committed: what was thought to follow them is known to be right or wrong."""
        node: int | None = -1
        for token in tokens:
            for length, following in self._asked.get(-2 if node is None else node, ()):
                self.seen[length] += 1
                if token in following:
                    self.right[length] += 1
                    break
            node = None if node is None else self._trie.nodes.get((node, token))
        for token in tokens:
            self.own.extend(token)
            if self.past.size:
                self.place = self.past.step(*self.place, token)
        self.output += tokens

    def add_undrafted(self, tokens: Sequence[int]) -> None:
        """The same for tokens that nothing was drafted for."""
        self._trie, self._asked = Trie(), {}
        self.add(tokens)

    def guess(self, most: int, deepest: int, min_probability: float) -> Trie:
        """Best first: the likeliest node is taken and what may follow it becomes a candidate, as long as guesses are
        likelier than `min_probability`."""
        trie = self._trie = Trie()
        self._asked = {}
        if most < 1 or deepest < 1:
            return trie
        state = max(self.own.link[self.own.last], 0)
        matches = [(self.own, state, self.own.length[state])]
        if self.past.size:
            matches.append((self.past, *self.place))
        heap: list[tuple[float, int, int, int, list[Match]]] = []  # less the chance, a number, parent, token, matches
        node, chance, number = -1, 1.0, 0
        while True:
            if node < 0 or trie.depths[node] < deepest:
                for after, token, longer in self._after(node, matches, chance, min_probability):
                    heapq.heappush(heap, (-after, number, node, token, longer))
                    number += 1
            if not heap or len(trie) >= most:
                return trie
            less, _, parent, token, matches = heapq.heappop(heap)
            node, chance = trie.at(parent, token), -less
            trie.weights[node] = chance

    def _after(
        self, node: int, matches: list[Match], reach: float, min_probability: float
    ) -> list[tuple[float, int, list[Match]]]:
        """What may follow: chance, token, and the matches then. Longer matches have the first word, shorter ones what
        is left of the trust."""
        found: dict[int, tuple[float, list[Match]]] = {}
        asked = self._asked[node] = []
        left = reach
        matches = [match for match in matches if match[1] > 0]
        while matches and left > min_probability and len(asked) < _LEVELS:
            matches.sort(key=_length)
            automaton, state, length = matches.pop()
            shorter = automaton.link[state]
            if shorter > 0:
                matches.append((automaton, shorter, automaton.length[shorter]))
            following, count = automaton.next[state], automaton.count
            total = sum(count[there] for token, there in following.items() if token >= 0)
            if not total:
                continue
            bucket = min(length, _LONGEST) - 1
            asked.append((bucket, following))
            share = left * self.right[bucket] / self.seen[bucket]
            left -= share
            for token, there in following.items():
                chance = share * count[there] / total
                if token < 0 or chance < min_probability / 4:
                    continue
                if token not in found:
                    found[token] = chance, [(automaton, there, length + 1)]
                else:
                    before, longer = found[token]
                    if all(match[0] is not automaton for match in longer):
                        longer.append((automaton, there, length + 1))
                    found[token] = before + chance, longer
        return [(chance, token, longer) for token, (chance, longer) in found.items() if chance >= min_probability]


def _length(match: Match) -> int:
    return match[2]


class Suffix(IndependentRows, Grower):
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
        self._kept: list[list[int]] = []  # the outputs that `past` is made of
        self._rows: list[_Row | None] = []  # None: a hole

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._rows = [_Row(self.past, list(prompt)) for prompt in prompts]
        self._end = sampling.end
        self._open = [True] * len(prompts)
        self._batched = False

    # ---- rows that come and go

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._rows = [self._rows[row] if row >= 0 else None for row in order]
        self._open = [False] * len(order)

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        self._rows[row] = _Row(Automaton(), prompt)

    def leave(self, row: int) -> None:
        self._rows[row] = None

    def observe_committed(self, row: int, tokens: Sequence[int]) -> None:
        matcher = self._rows[row]
        assert matcher is not None
        matcher.add_undrafted(tokens)

    # ----

    def tries(self, room: Sequence[int]) -> list[Trie]:
        self._open = [one >= 0 for one in room]
        return [
            Trie() if row is None else row.guess(self.nodes, min(self.depth, most), self.min_probability)
            for row, most in zip(self._rows, room, strict=True)
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
        """Add an output, up to its end token, to the past; of too much of it the older half is forgotten."""
        stop = next((place for place, token in enumerate(output) if token in self._end), len(output))
        kept = output[: stop + 1][-self.memory :] if self.memory else []
        if not kept:
            return
        self._kept.append(kept)
        if self.past.size + len(kept) > self.memory:
            while len(self._kept) > 1 and sum(map(len, self._kept)) > self.memory // 2:
                self._kept.pop(0)
            self.past = Automaton()
            for text in self._kept:
                _append(self.past, text)
        else:
            _append(self.past, kept)


def _append(past: Automaton, text: Sequence[int]) -> None:
    for token in (*text, -1 - past.size):
        past.extend(token)
