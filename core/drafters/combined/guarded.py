"""Any drafter, switched off while it is predicted to be slower than plain decoding: the break-even of Leviathan et al.
(arXiv 2211.17192), for recent tokens per round over their cost instead of a single acceptance rate.

Rows of a batch are switched together, since a pass is as wide as its widest row. A drafter that is off is tried again
from time to time, within a budget that plain rounds accumulate. Uses drafters through the protocol only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.core.cost.break_even import Cost, DraftBudget
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.combined.adaptive import (
    Guesses,
    constant_cost,
    propose_with_cost,
    weight_free,
)
from outrider.core.drafters.per_row import batches, per_row
from outrider.core.errors import Incompatible
from outrider.core.protocol import (
    BatchedDrafter,
    CatchUpDrafter,
    DiscardingDrafter,
    Drafter,
    Prefill,
    Prompts,
    Scores,
    StandaloneDrafter,
    readings_of,
)
from outrider.core.rng import CounterRNG

_MIN_WEIGHT = 0.3  # with less weight of observations than this, a single row's drafter is tried
_FIRST_GUESS = 0.5  # assumed probability that a first guess is right


@dataclass(frozen=True)
class Member:
    """A drafter's name, and how to make one."""

    name: str
    make: Callable[[], Drafter]


class Guarded:
    """Any drafter, switched off while its predicted speedup is below `min_speedup`; the trace notes it. `cost` is the
    cost of one draft level in plain passes (default: from the weights the drafter reads), `costs(rows, tokens)` that of
    a target pass over `tokens` tokens in each of `rows` rows. While a single row's drafter is off, its guesses are
    still compared with the output if it reads no weights; otherwise it is tried every `probe`-th round. `decay` is that
    of the averages."""

    def __init__(
        self,
        drafter: Member,
        *,
        min_speedup: float = 1.0,
        decay: float = 0.9,
        probe: int = 16,
        cost: float | None = None,
        costs: Cost | None = None,
    ) -> None:
        self._make, self.name = drafter.make, drafter.name
        self.min_speedup, self.decay, self.probe = min_speedup, decay, probe
        self._given, self._costs = cost, costs or constant_cost
        self._set(drafter.make())
        if isinstance(self._inner, StandaloneDrafter):
            raise Incompatible(
                f"{drafter.name} updates its guesses from its own draft's scores, so it can't be switched off"
            )
        self.vocabulary, self.needs = self._inner.vocabulary, self._inner.needs
        self.readings = readings_of(self._inner)
        self._free = weight_free(self._inner) and not cost
        self._catches_up = isinstance(self._inner, CatchUpDrafter)
        self._crowd = 1
        self._begun = False

    def _set(self, drafter: Drafter) -> None:
        self._inner = drafter
        self._discarding = drafter if isinstance(drafter, DiscardingDrafter) else None

    @property
    def bytes_read(self) -> int:
        return self._inner.bytes_read

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._target = prefill.self_draftable.weight_bytes if prefill.self_draftable else 0
        self._start(len(prompts))
        self._begun = True
        self._inner.begin(prefill, prompts, sampling)

    def _start(self, rows: int) -> None:
        self._level = self._given or 0.0  # cost of a draft level
        self._gain = self._weight = 0.0
        self._steps, self._budget = 0, DraftBudget()
        self._loss: float | None = None  # of the last try, in plain rounds
        self._missed: list[list[int]] = [[] for _ in range(rows)]
        self._going = [True] * rows
        self._watched: Guesses | None = None
        self._off = False

    # ---- continuous batching (outrider.core.protocol.BatchedDrafter)

    def supports_batching(self) -> bool:
        """Not for drafters that would need one model per row, nor once one drafts for all rows of `begin`."""
        return batches(self._inner) or (weight_free(self._inner) and not self._begun)

    def open(self, sampling: Sampling) -> None:
        if not batches(self._inner):
            self._set(per_row(self._make, self._inner))
        self._target = 0
        self._begun = False
        self._start(0)
        self._batched.open(sampling)

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._batched.arrange(order, width)
        self._missed = [self._missed[row] if row >= 0 else [] for row in order]

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        self._target = prefill.self_draftable.weight_bytes if prefill.self_draftable else 0
        self._batched.enter(row, prefill, prompt)

    def leave(self, row: int) -> None:
        self._batched.leave(row)
        self._missed[row] = []

    @property
    def _batched(self) -> BatchedDrafter:
        assert isinstance(self._inner, BatchedDrafter)
        return self._inner

    def set_crowd(self, rows: int) -> None:
        self._crowd = max(rows, 1)

    # ----

    @property
    def predicted(self) -> float:
        """The predicted speedup over plain decoding."""
        return self._gain / self._weight if self._weight else 1.0

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        self._going = [left >= 0 for left in room.tolist()]
        self._steps += 1
        rows = len(self._going)
        self._off, self._watched = not self._tried(rows), None
        if self._off and not (rows == 1 and self._free):
            if not self._catches_up:  # it must have proposed, even nothing, in order to observe this round
                self._inner.propose(room.clamp(max=0), rng)
            return self._plain(rows, rng)
        self._catch_up()
        draft, level = propose_with_cost(self._inner, room, rng, self._target)
        if self._given is None and level is not None:
            self._level = level
        if self._off:
            self._watched = Guesses(draft)
            return self._plain(rows, rng)
        return replace(draft, note=(self.name,) * rows)

    def _tried(self, rows: int) -> bool:
        pays = self.predicted >= self.min_speedup
        if rows == 1:
            return pays or self._weight < _MIN_WEIGHT or self._steps % self.probe == 0
        loss = self._loss
        self._budget.drafting = pays and loss is not None
        if loss is None:  # expected loss of drafting one token
            loss = max(self._cost(rows, 1, 1) - 1 - _FIRST_GUESS, 0.0)
        return self._budget.may_draft(loss, rows)

    def _plain(self, rows: int, rng: CounterRNG) -> Draft:
        note = f"plain (off: {self.predicted:.2f}x predicted)" if self._weight else "plain (off: too many rows)"
        return replace(Draft.empty(rows, rng.device), note=(note,) * rows)

    def _cost(self, rows: int, guesses: int, depth: int) -> float:
        """The cost of a round, in plain rounds."""
        rows = max(rows, self._crowd)
        return self._costs(rows, guesses + 1) / self._costs(rows, 1) + self._level * depth

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        emitted, rows = verdict.rows(draft), len(self._going)
        if self._watched is not None:
            tokens = self._watched.right(0, emitted[0]) + 1  # a lower bound: later guesses can't be checked
            self._learn(tokens / self._cost(1, self._watched.sizes[0], 0))
        elif self._off:
            if self._catches_up:
                for missed, new, going in zip(self._missed, emitted, self._going, strict=True):
                    missed += new if going else []
                return
            if self._discarding is not None:
                self._discarding.discard_draft()
        else:
            total = sum(len(new) for new, going in zip(emitted, self._going, strict=True) if going)
            per_row, cost = total / max(sum(self._going), 1), self._cost(rows, draft.size, draft.tree.depth)
            self._learn(per_row / cost)
            if rows > 1:
                self._loss = max(cost - per_row, 0.0)
                self._budget.add(per_row - cost)
        self._inner.observe(draft, scores, verdict, rng)

    def _learn(self, gain: float) -> None:
        self._gain = self.decay * self._gain + (1 - self.decay) * gain
        self._weight = self.decay * self._weight + 1 - self.decay

    def _catch_up(self) -> None:
        for row, tokens in enumerate(self._missed):
            if tokens:
                assert isinstance(self._inner, CatchUpDrafter)
                self._inner.observe_committed(row, tokens)
                self._missed[row] = []

    def end(self) -> None:
        self._inner.end()
