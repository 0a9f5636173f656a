"""`drafter="auto"`: decides in every round which drafters to query and how many of their guesses to verify, by the
measured costs of rounds and the recent accuracy of such guesses.

The guesses of several drafters, by default training-free ones, are merged, and the number predicted to be fastest is
verified; none if plain decoding is faster. Decisions depend only on the costs
(outrider.core.drafters.combined.round_costs) and the tokens so far, so the same seed and costs give the same output.
Uses drafters through the protocol only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from outrider.core.cost.break_even import Costs, DraftBudget, ModelDraftValue, RecentSpeed
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.combined.ensemble import Ensemble, Guesses, hosted
from outrider.core.drafters.lookup.trie import Trie
from outrider.core.errors import InvalidOption
from outrider.core.protocol import CatchUpDrafter, Drafter, Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG


class Auto(Ensemble):
    """An ensemble that verifies as many guesses as are predicted to pay, at most `max_guesses`, and pauses when none
    do. Drafters that run a model are queried only if the cheap ones expect few tokens. All rows of a batch decide
    together, since a pass is as wide as its widest row; during a pause, drafters are neither queried nor updated."""

    def __init__(
        self,
        *,
        costs: Costs,
        drafters: Mapping[str, Drafter],
        max_guesses: int = 24,
    ) -> None:
        if max_guesses < 1:
            raise InvalidOption(f"max_guesses is {max_guesses!r}; it must be 1 or more")
        super().__init__(drafters=drafters, nodes=max_guesses)
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
        self._missed: list[list[int]] = [[] for _ in range(rows)]  # tokens committed during a pause
        # a lost round costs a batch more time than a single row
        self._budget = DraftBudget(initial=2.0, limit=4.0) if rows == 1 else DraftBudget()
        self._speed, self._model_value = RecentSpeed(), ModelDraftValue()
        self._paused = self._cheap_only = False
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
        overhead = self.costs.cheap_overhead(rows) if self._mixed else self.costs.overhead(rows)
        self._paused = not self._budget.may_draft(overhead, rows)
        if self._paused:
            self._speed.record(1.0, 1.0)
            if rows == 1 or not self._lazy:
                self.forget()
            return Draft.empty(rows, rng.device)
        self._catch_up()
        draft = self._draft(self._guesses(room, rng), rng)
        if draft.size:
            self._budget.succeeded()
        else:
            self._speed.record(1.0, 1 + self._overhead)
            self._budget.failed(self._overhead)
        return draft

    def _guesses(self, room: Tensor, rng: CounterRNG) -> list[Trie]:
        """The merged guesses of the drafters that are worth querying."""
        self._cheap_only = self._mixed
        if not self._mixed:
            return self._merged(self._query([True] * len(self.drafters), room, rng))
        parts, rows = self._query(self._cheap, room, rng), len(self._going)
        tries = self._merged(parts)
        _, tokens = self._best([trie.weights for trie in tries])
        model_cost = self.costs.overhead(rows) - self.costs.cheap_overhead(rows)
        if self._speed.worth(self._model_value.gain(tokens), model_cost) <= 0:
            self._model_value.skip()
            return tries
        self._cheap_only = False
        more = self._query([not cheap for cheap in self._cheap], room, rng)
        return self._merged(
            [own if cheap else other for cheap, own, other in zip(self._cheap, parts, more, strict=True)]
        )

    def _query(self, chosen: Sequence[bool], room: Tensor, rng: CounterRNG) -> list[list[Guesses]]:
        """The guesses of each drafter in each row; none for drafters that are not chosen."""
        nothing: list[Guesses] = [([], [], [], None)] * len(room)
        return [self._guesses_of(number, room, rng) if query else nothing for number, query in enumerate(chosen)]

    @property
    def _overhead(self) -> float:
        """The cost of this round's guessing, in plain rounds."""
        rows = len(self._going)
        return self.costs.cheap_overhead(rows) if self._cheap_only else self.costs.overhead(rows)

    def _catch_up(self) -> None:
        for row, tokens in enumerate(self._missed):
            if tokens:
                for drafter in self._catching_up:
                    drafter.observe_committed(row, tokens)
                self._missed[row] = []

    def counts(self, rows: Sequence[Sequence[float]]) -> list[int]:
        return [self._best(rows)[0]] * len(rows)

    def _best(self, rows: Sequence[Sequence[float]]) -> tuple[int, float]:
        """The number of guesses per row that is predicted to be worth the most, given their weights, and the tokens per
        row expected from it."""
        best, expected, highest, tokens = 0, 1.0, self._speed.worth(1.0, 1 + self._overhead), 1.0
        ordered = [sorted(weights, reverse=True) for weights in rows]
        going = max(sum(self._going), 1)
        for count in range(1, min(self.nodes, max(map(len, rows))) + 1):
            tokens += sum(weights[count - 1] for weights in ordered if len(weights) >= count) / going
            worth = self._speed.worth(tokens, self._ratio(count))
            if worth > highest:
                best, expected, highest = count, tokens, worth
        return best, expected

    def _ratio(self, guesses: int) -> float:
        """The cost of a round with this many guesses in each row, finished and empty ones included."""
        shape = len(self._going), guesses
        if shape not in self._ratios:
            self._ratios[shape] = self.costs.ratio(*shape)
        return self._ratios[shape] - self.costs.overhead(shape[0]) + self._overhead

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        if self._paused and self._lazy and len(self._going) > 1:
            for missed, emitted, going in zip(self._missed, verdict.rows(draft), self._going, strict=True):
                if going:
                    missed += emitted
            return
        super().observe(draft, scores, verdict, rng)
        if draft.size and any(self._going):
            pairs = zip(verdict.rows(draft), self._going, strict=True)
            tokens = sum(len(emitted) for emitted, going in pairs if going) / sum(self._going)
            self._speed.record(tokens, self._ratio(draft.size))
            if self._mixed and not self._cheap_only:
                self._model_value.record(tokens)
            self._budget.add(tokens - self._ratio(draft.size))
