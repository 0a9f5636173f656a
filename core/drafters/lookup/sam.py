"""SAM Decoding (Hu et al., "SAM Decoding: speculative decoding via suffix automaton", arXiv 2411.10666): copies what
followed the longest match of the text's end, in the text itself or in a corpus; without a long match, another drafter
drafts, here Token Recycling.

The text has a suffix automaton that grows with it. The paper has a static automaton of the corpus too; ours looks the
match up in the suffix array of a datastore (`outrider datastore build`), which answers the same question from a file.
Works on token ids and, as Token Recycling does, on the target's scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.retrieval import Datastore
from outrider.core.drafters.lookup.suffix import Automaton
from outrider.core.drafters.lookup.token_recycling import TokenRecycling
from outrider.core.drafters.lookup.trie import Trie, TrieDrafter
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG

_REACH = 32  # tokens of the text's end that are looked up in a corpus, and what a datastore is sorted by
_PLACES = 16  # of a match in the corpus that vote on what follows


class SamDecoding(WeightFree, TrieDrafter):
    """A chain of up to `length` tokens after the longest match. A match in `corpus`, a datastore, its path or texts as
    lists of token ids, counts if it is more than `bias` tokens longer than that in the text, which is nearer to the
    topic. If the match is shorter than `threshold`, a tree of `nodes` tokens by Token Recycling, which learns in every
    round."""

    def __init__(
        self,
        *,
        corpus: Datastore | Path | str | Sequence[Sequence[int]] | None = None,
        length: int = 16,
        threshold: int = 5,
        bias: int = 5,
        nodes: int = 16,
    ) -> None:
        if min(length, threshold, nodes) < 1 or bias < 0:
            raise InvalidOption(
                f"length={length}, threshold={threshold}, bias={bias}, nodes={nodes}: bias must be 0 or more, the "
                "others 1 or more"
            )
        if isinstance(corpus, str | Path):
            corpus = Datastore.load(Path(corpus))
        self.corpus = corpus if corpus is None or isinstance(corpus, Datastore) else Datastore.build(corpus)
        self.length, self.threshold, self.bias = length, threshold, bias
        self.otherwise = TokenRecycling(nodes=nodes)
        self.readings = self.otherwise.readings
        self.sources: list[str] = []  # of the last draft of each row: text, corpus or recycling

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.otherwise.begin(prefill, prompts, sampling)
        self._texts = [Automaton() for _ in prompts]
        self._tails: list[list[int]] = [[] for _ in prompts]
        self._open = [True] * len(prompts)
        for row, prompt in enumerate(prompts):
            self._read(row, prompt)

    def _read(self, row: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._texts[row].extend(token)
        self._tails[row] = [*self._tails[row], *tokens][-_REACH:]

    def tries(self, room: Sequence[int]) -> list[Trie]:
        self._open = [left >= 0 for left in room]
        recycled, found = self.otherwise.tries(room), list[Trie]()
        self.sources = []
        for row, left in enumerate(room):
            source, chain = self._longest(row, min(self.length, left))
            trie = Trie()
            trie.add(chain)
            found.append(trie if chain else recycled[row])
            self.sources.append(source if chain else "recycling")
        return found

    def _longest(self, row: int, count: int) -> tuple[str, list[int]]:
        """Where the longest match is, and up to `count` tokens that followed it; none if it is short."""
        text = self._texts[row]
        state = max(text.link[text.last], 0)
        inside, match = text.length[state], (0, 0, 0)
        if self.corpus is not None and count > 0:
            match = self.corpus.find(self._tails[row], _REACH, self.threshold)
        if match[0] >= self.threshold and match[0] > inside + self.bias:
            return "corpus", self._after(match, count)
        return "text", _most_frequent(text, state, count) if inside >= self.threshold else []

    def _after(self, match: tuple[int, int, int], count: int) -> list[int]:
        """What followed a match in the corpus most often, token by token."""
        assert self.corpus is not None
        places, chain = self.corpus.continuations(match, _PLACES, count), list[int]()
        while places := [place for place in places if len(place) > len(chain)]:
            following = [place[len(chain)] for place in places]
            chain.append(max(following, key=following.count))
            places = [place for place in places if place[len(chain) - 1] == chain[-1]]
        return chain

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self.otherwise.observe(draft, scores, verdict, rng)
        for row, (tokens, going) in enumerate(zip(verdict.rows(draft), self._open, strict=True)):
            if going:
                self._read(row, tokens)

    def end(self) -> None:
        self.otherwise.end()
        self._texts, self._tails = [], []


def _most_frequent(text: Automaton, state: int, count: int) -> list[int]:
    """What followed a state's strings most often, token by token; of equals what came first."""
    chain: list[int] = []
    while len(chain) < count and text.next[state]:
        token, state = max(text.next[state].items(), key=lambda each: text.count[each[1]])
        chain.append(token)
    return chain
