"""`drafter="auto"`: decides in every round which drafters to query and how many of their guesses to verify, by the
measured costs of rounds and the recent accuracy of such guesses.

The guesses of several drafters, by default training-free ones, are merged, and the number predicted to be fastest is
verified; none if plain decoding is faster. Decisions depend only on the costs
(outrider.core.drafters.combined.round_costs) and the tokens so far, so the same seed and costs give the same output.
Uses drafters through the protocol only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from outrider.core.cost.break_even import Costs, DraftBudget, ModelDraftValue, RecentSpeed
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.combined.ensemble import Ensemble, Guesses, hosted
from outrider.core.drafters.lookup.trie import Trie
from outrider.core.errors import InvalidOption
from outrider.core.protocol import CatchUpDrafter, Drafter, Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG

_USUAL = 3  # guesses in a round, until those of models are known


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
        made = partial(DraftBudget, initial=2.0, limit=4.0) if rows == 1 else DraftBudget
        # what drafters that run a model lose does not end drafting by the others
        self._budget, self._model_budget = made(), made()
        self._speed = RecentSpeed()
        self._model_value: ModelDraftValue | None = None  # of the drafters that run a model
        self._paused = self._cheap_only = self._may_query_models = False
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
        if self._cheap_only and self._model_value is not None:
            self._model_value.skip()  # in the last round
        self._cheap_only = self._mixed
        cheap, whole = self.costs.cheap_overhead(rows), self.costs.overhead(rows)
        affordable = self._mixed and self._model_budget.may_draft(whole - cheap, rows)
        self._may_query_models = affordable and self._worth_of_models() > self._speed.worth(1.0, 1.0)
        may_draft = self._budget.may_draft(cheap if self._mixed else whole, rows)
        self._paused = not (may_draft or self._may_query_models)
        if self._paused:
            self._speed.record(1.0, 1.0)
            if rows == 1 or not self._lazy:
                self.forget()
            return Draft.empty(rows, rng.device)
        self._catch_up()
        draft = self._draft(self._guesses(room, rng), rng)
        if draft.size:
            self._spent.succeeded()
        else:
            self._speed.record(1.0, 1 + self._overhead)
            self._spent.failed(self._overhead)
            self._learn_of_models(1.0, 1 + self._overhead)
        return draft

    @property
    def _spent(self) -> DraftBudget:
        """The budget that this round is paid from."""
        return self._model_budget if self._mixed and not self._cheap_only else self._budget

    def _guesses(self, room: Tensor, rng: CounterRNG) -> list[Trie]:
        """The merged guesses of the drafters that are worth querying."""
        if not self._mixed:
            return self._merged(self._query([True] * len(self.drafters), room, rng))
        parts = self._query(self._cheap, room, rng)
        tries = self._merged(parts)
        cheap_worth = self._best([trie.weights for trie in tries])[1]
        if not self._may_query_models or self._worth_of_models() <= cheap_worth:
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
        """The number of guesses per row that is predicted to be worth the most, given their weights, and its worth."""
        best, highest, tokens = 0, self._speed.worth(1.0, 1 + self._overhead), 1.0
        ordered = [sorted(weights, reverse=True) for weights in rows]
        going = max(sum(self._going), 1)
        for count in range(1, min(self.nodes, max(map(len, rows))) + 1):
            tokens += sum(weights[count - 1] for weights in ordered if len(weights) >= count) / going
            worth = self._speed.worth(tokens, self._ratio(count))
            if worth > highest:
                best, highest = count, worth
        return best, highest

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
            self._learn_of_models(tokens, self._ratio(draft.size))
            self._spent.add(tokens - self._ratio(draft.size))

    def _worth_of_models(self) -> float:
        if self._model_value is None:
            rows = len(self._going)
            least = 1 + self.costs.overhead(rows)
            self._model_value = ModelDraftValue(rounds=max(self.costs.ratio(rows, _USUAL), least))
        return self._speed.worth(self._model_value.tokens, self._model_value.rounds)

    def _learn_of_models(self, tokens: float, rounds: float) -> None:
        if self._model_value is not None and not self._cheap_only:
            self._model_value.record(tokens, rounds)
