"""Input-guided aggressive decoding: the input itself is the draft, for outputs that mostly repeat it.

Sun et al., "Instantaneous grammatical error correction with shallow aggressive decoding" (arXiv 2106.04970): all that
is left of the input is guessed at once; after a mismatch tokens are decoded one by one until the last of them are
found in the input again, and copying goes on from there. Ours finds the place nearest behind where copying broke off
(the paper asks for a match that occurs but once) and a few tokens from the next best places beside it, guesses further
the longer it has copied since, and after a mismatch tries at once that a token was replaced or put in (`hedge`).
Without `source` the input is the prompt. Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Grower, Trie
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG

_PACE = 4  # tokens further for each that was copied since an anchor was found
_NEAR = 12  # tokens behind the break within which a single token is anchor enough
_OTHERS = 2  # places besides the best that are tried, until they are seen to be wrong


class _Copy:
    """One row: the input, and where in it the output stands."""

    def __init__(self, source: Sequence[int], anchor: int, place: int | None) -> None:
        self.source, self.anchor = list(source), anchor
        self.place = place  # of the next token to copy; None: not anchored
        self.others: list[int] = []  # where else it may be
        self.broke: int | None = None  # where copying broke off last
        self.just = False  # ... with the very last token
        self.run = 1 << 20  # tokens that were copied in a row; what comes first is trusted to be a copy
        self._output: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # n-gram -> the places behind it
        for length in {1, anchor}:
            for end in range(length, len(self.source)):
                self._places.setdefault(tuple(self.source[end - length : end]), []).append(end)

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._output.append(token)
            self.just = False
            if self.place is not None:
                right = [one + 1 for one in (self.place, *self.others) if self.source[one : one + 1] == [token]]
                if right:
                    self.place, *self.others = right
                    self.run += 1
                    continue
                self.broke, self.just = self.place, True
            found = self._anchors()
            self.place, self.others = (found[0], found[1 : _OTHERS + 1]) if found else (None, [])
            self.run, self.just = 1, self.just and not found

    def _anchors(self) -> list[int]:
        """Where in the input the output's last tokens may be: the nearest behind the break, then the last before it."""
        places, broke = self._behind(self.anchor), -1 if self.broke is None else self.broke
        near = [end for end in self._behind(1) if self.broke is not None and broke < end <= broke + _NEAR]
        later = [end for end in places if self.broke is not None and end > broke]
        return list(dict.fromkeys([*near, *later, *reversed(places)]))

    def _behind(self, length: int) -> list[int]:
        if len(self._output) < length:
            return []
        return self._places.get(tuple(self._output[-length:]), [])

    def guess(self, most: int, hedge: int) -> Trie:
        """What is left of the input; right behind a mismatch, what is if a token was replaced, or one put in."""
        trie = Trie()
        if most < 1:
            return trie
        if self.place is not None:
            trie.add(self.source[self.place :][: min(most, _PACE * (self.run + 1))])
            for other in self.others if hedge else ():
                trie.add(self.source[other:][: min(hedge, most)], 0.3)
        elif self.just and hedge and self.broke is not None:
            trie.add(self.source[self.broke + 1 :][: min(hedge, most)], 0.5)
            trie.add(self.source[self.broke :][: min(hedge, most)], 0.3)
        return trie


class InputGuided(WeightFree, Grower):
    """Copies up to `length` tokens a step. `anchor` tokens in a row show where the output is in the input again."""

    def __init__(
        self, *, source: Sequence[int] | None = None, length: int = 32, anchor: int = 1, hedge: int = 4
    ) -> None:
        if min(length, anchor) < 1 or hedge < 0:
            raise InvalidOption(
                f"length={length}, anchor={anchor}, hedge={hedge}: the first two must be 1 or more, hedge 0 or more"
            )
        self.source, self.length, self.anchor, self.hedge = source, length, anchor, hedge

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        if self.source is None:
            self._rows = [_Copy(prompt, self.anchor, None) for prompt in prompts]
        else:
            self._rows = [_Copy(self.source, self.anchor, 0) for _ in prompts]

    def tries(self, room: Sequence[int]) -> list[Trie]:
        return [row.guess(min(self.length, left), self.hedge) for row, left in zip(self._rows, room, strict=True)]

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for row, tokens in zip(self._rows, verdict.rows(draft), strict=True):
            row.add(tokens)

    def end(self) -> None:
        self._rows = []
