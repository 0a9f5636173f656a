"""Input-guided aggressive decoding: the input is the draft, for outputs that mostly repeat it.

Sun et al., "Instantaneous grammatical error correction with shallow aggressive decoding" (arXiv 2106.04970): the draft
is the rest of the input. After a mismatch tokens are decoded one by one until the last ones occur in the input again,
and copying continues there. The paper requires a unique match; ours takes the nearest after the mismatch, and also
drafts a few tokens from the next best matches. Ours drafts more tokens the longer copying has gone well, and right
after a mismatch drafts as if a token had been replaced or inserted. Works on token ids alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Trie, TrieDrafter
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG

_PACE = 4  # draft length per token copied since the last anchor
_NEAR = 12  # a single token is a sufficient anchor within this many tokens after a mismatch
_OTHERS = 2  # alternative positions that are drafted too, until a token contradicts them


class _Copy:
    """One row: the input, and the output's position in it."""

    def __init__(self, source: Sequence[int], anchor: int, position: int | None) -> None:
        self.source, self.anchor = list(source), anchor
        self.position = position  # of the next token to copy; None: unknown
        self.others: list[int] = []  # alternative positions
        self.mismatch: int | None = None  # position of the last mismatch
        self.mismatched = False  # whether the last token was the mismatch
        self.copied = 1 << 20  # tokens copied in a row; large at first: the output is expected to start as a copy
        self._output: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> positions after its occurrences
        for length in {1, anchor}:
            for end in range(length, len(self.source)):
                self._ends.setdefault(tuple(self.source[end - length : end]), []).append(end)

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._output.append(token)
            self.mismatched = False
            if self.position is not None:
                positions = (self.position, *self.others)
                matching = [position + 1 for position in positions if self.source[position : position + 1] == [token]]
                if matching:
                    self.position, *self.others = matching
                    self.copied += 1
                    continue
                self.mismatch, self.mismatched = self.position, True
            anchors = self._anchors()
            self.position, self.others = (anchors[0], anchors[1 : _OTHERS + 1]) if anchors else (None, [])
            self.copied, self.mismatched = 1, self.mismatched and not anchors

    def _anchors(self) -> list[int]:
        """Positions after occurrences of the output's last tokens: the nearest after the mismatch first, then the
        latest before it."""
        ends, mismatch = self._occurrences(self.anchor), -1 if self.mismatch is None else self.mismatch
        near = [end for end in self._occurrences(1) if self.mismatch is not None and mismatch < end <= mismatch + _NEAR]
        later = [end for end in ends if self.mismatch is not None and end > mismatch]
        return list(dict.fromkeys([*near, *later, *reversed(ends)]))

    def _occurrences(self, length: int) -> list[int]:
        """Positions after the occurrences of the output's last `length` tokens."""
        if len(self._output) < length:
            return []
        return self._ends.get(tuple(self._output[-length:]), [])

    def guess(self, max_tokens: int, hedge: int) -> Trie:
        """The rest of the input; right after a mismatch, the rest as if a token had been replaced, and as if one had
        been inserted."""
        trie = Trie()
        if max_tokens < 1:
            return trie
        if self.position is not None:
            trie.add(self.source[self.position :][: min(max_tokens, _PACE * (self.copied + 1))])
            for other in self.others if hedge else ():
                trie.add(self.source[other:][: min(hedge, max_tokens)], 0.3)
        elif self.mismatched and hedge and self.mismatch is not None:
            trie.add(self.source[self.mismatch + 1 :][: min(hedge, max_tokens)], 0.5)
            trie.add(self.source[self.mismatch :][: min(hedge, max_tokens)], 0.3)
        return trie


class InputGuided(WeightFree, TrieDrafter):
    """Drafts up to `length` tokens of `source` (default: the prompt). After a mismatch, copying continues after an
    occurrence of the last `anchor` tokens; alternatives are drafted for `hedge` tokens (0: not at all)."""

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
