"""`drafter="auto"`: which drafters guess, and how much of it is drafted, decided in every round by what rounds cost on
this machine and by how often such guesses were right.

The drafters, training-free ones unless others are named, guess side by side; as many of their guesses are scored as are
predicted to be fastest. The decisions depend on the costs (outrider.core.drafters.combined.round_costs) and on the
tokens so far alone, so that a seed with the same costs gives the same output. Where no guess is predicted to pay,
decoding is plain. Knows drafters through the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from outrider.core.cost.break_even import Costs, Pace, Promise, Rest
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.combined.ensemble import Ensemble, Guesses, hosted
from outrider.core.drafters.lookup.trie import Trie
from outrider.core.errors import InvalidOption
from outrider.core.protocol import CatchUpDrafter, Drafter, Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG


class Auto(Ensemble):
    """An ensemble that tries as many guesses as should pay, and rests for a while when none did. Those who ask a model
    for their guesses are asked where the others promise little. Rows that share a pass decide together, as each is as
    wide as the widest; while they rest, nobody is asked and nobody listens."""

    def __init__(
        self,
        *,
        costs: Costs,
        drafters: Mapping[str, Drafter],
        longest: int = 24,
    ) -> None:
        if longest < 1:
            raise InvalidOption(f"longest is {longest!r}; it must be 1 or more guesses")
        super().__init__(drafters=drafters, nodes=longest)
        self.costs = costs
        self._catching_up = [drafter for drafter in self.drafters if isinstance(drafter, CatchUpDrafter)]
        self._lazy = len(self._catching_up) == len(self.drafters)
        self._cheap = [hosted(drafter) for drafter in self.drafters]
        self._mixed = any(self._cheap) and not all(self._cheap)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        super().begin(prefill, prompts, sampling)
        self._start(len(prompts))

    def open(self, sampling: Sampling) -> None:
        super().open(sampling)
        self._start(0)

    def _start(self, rows: int) -> None:
        self._missed: list[list[int]] = [[] for _ in range(rows)]  # what a row committed while nobody listened
        self._rest = Rest(first=2.0, most=4.0) if rows == 1 else Rest()  # a crowd's rounds are many rows' rounds
        self._pace, self._promise, self._asleep, self._spared = Pace(), Promise(), False, False
        self._going = [True] * rows
        self._ratios: dict[tuple[int, int], float] = {}

    def arrange(self, order: Sequence[int], width: int) -> None:
        super().arrange(order, width)
        self._missed = [self._missed[row] if row >= 0 else [] for row in order]

    def leave(self, row: int) -> None:
        super().leave(row)
        self._missed[row] = []

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        self._going = [left >= 0 for left in room.tolist()]
        rows = len(self._going)
        self._asleep = not self._rest.due(self.costs.glance(rows) if self._mixed else self.costs.look(rows), rows)
        if self._asleep:
            self._pace.took(1.0, 1.0)
            if rows == 1 or not self._lazy:
                self.forget()
            return Draft.empty(rows, rng.device)
        self._catch_up()
        draft = self._draft(self._guesses(room, rng), rng)
        if draft.size:
            self._rest.paid()
        else:
            self._pace.took(1.0, 1 + self._price)
            self._rest.vain(self._price)
        return draft

    def _guesses(self, room: Tensor, rng: CounterRNG) -> list[Trie]:
        """Of those who are worth asking."""
        self._spared = self._mixed
        if not self._mixed:
            return self._merged(self._ask([True] * len(self.drafters), room, rng))
        parts, rows = self._ask(self._cheap, room, rng), len(self._going)
        tries = self._merged(parts)
        _, tokens = self._best([trie.weights for trie in tries])
        total_variation = self.costs.look(rows) - self.costs.glance(rows)
        if self._pace.worth(self._promise.above(tokens), total_variation) <= 0:
            self._promise.passed()
            return tries
        self._spared = False
        more = self._ask([not cheap for cheap in self._cheap], room, rng)
        return self._merged(
            [own if cheap else other for cheap, own, other in zip(self._cheap, parts, more, strict=True)]
        )

    def _ask(self, who: Sequence[bool], room: Tensor, rng: CounterRNG) -> list[list[Guesses]]:
        """The guesses of some drafters in each row; of the others, none."""
        nothing: list[Guesses] = [([], [], [], None)] * len(room)
        return [self._guesses_of(number, room, rng) if asked else nothing for number, asked in enumerate(who)]

    @property
    def _price(self) -> float:
        """What this round's guesses cost, in plain rounds."""
        rows = len(self._going)
        return self.costs.glance(rows) if self._spared else self.costs.look(rows)

    def _catch_up(self) -> None:
        for row, tokens in enumerate(self._missed):
            if tokens:
                for drafter in self._catching_up:
                    drafter.observe_committed(row, tokens)
                self._missed[row] = []

    def counts(self, rows: Sequence[Sequence[float]]) -> list[int]:
        return [self._best(rows)[0]] * len(rows)

    def _best(self, rows: Sequence[Sequence[float]]) -> tuple[int, float]:
        """As many guesses in each row as are predicted to be worth the most, now that they have been made; and the
        tokens, a row, that are expected of them."""
        best, expected, most, tokens = 0, 1.0, self._pace.worth(1.0, 1 + self._price), 1.0
        ordered = [sorted(weights, reverse=True) for weights in rows]
        going = max(sum(self._going), 1)
        for count in range(1, min(self.nodes, max(map(len, rows))) + 1):
            tokens += sum(weights[count - 1] for weights in ordered if len(weights) >= count) / going
            worth = self._pace.worth(tokens, self._ratio(count))
            if worth > most:
                best, expected, most = count, tokens, worth
        return best, expected

    def _ratio(self, guesses: int) -> float:
        """Of a round with so many guesses in each row there is, finished ones and holes included."""
        shape = len(self._going), guesses
        if shape not in self._ratios:
            self._ratios[shape] = self.costs.ratio(*shape)
        return self._ratios[shape] - self.costs.look(shape[0]) + self._price

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        if self._asleep and self._lazy and len(self._going) > 1:
            for missed, emitted, going in zip(self._missed, verdict.rows(draft), self._going, strict=True):
                if going:
                    missed += emitted
            return
        super().observe(draft, scores, verdict, rng)
        if draft.size and any(self._going):
            pairs = zip(verdict.rows(draft), self._going, strict=True)
            tokens = sum(len(emitted) for emitted, going in pairs if going) / sum(self._going)
            self._pace.took(tokens, self._ratio(draft.size))
            if self._mixed and not self._spared:
                self._promise.kept(tokens)
            self._rest.gained(tokens - self._ratio(draft.size))
