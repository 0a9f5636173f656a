"""Any drafter, off where it is predicted to be slower than plain decoding: the break-even of Leviathan et al. (arXiv
2211.17192) on what its steps gave lately over what they cost, instead of on one acceptance.

Rows that share a pass are on or off together, as each is as wide as the widest. What is tried while it is off, so that
it can be switched on again, is bounded by what plain decoding has set aside for it. Knows drafters through the
protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.core.cost.break_even import Cost, Rest
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.combined.adaptive import Guesses, by_name, free, priced, reads_nothing
from outrider.core.drafters.per_row import Joined, PerRow, joins
from outrider.core.errors import Incompatible
from outrider.core.protocol import Drafter, Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG

_TRUSTED = 0.3  # with less known of its worth than this share, a drafter whose row is alone is tried
_HALF = 0.5  # the chance of a first guess to be right, before anything is known


class Guarded:
    """`make` gives the drafter; `cost` is what drafting one level deeper costs, in plain passes (left out: read off the
    weights it reads), and `verify(rows, tokens)` what a round of so many rows with so many tokens each costs. Where a
    row is alone, a drafter that costs nothing is watched while it is off, and any other is tried again every `probe`-th
    step."""

    def __init__(
        self,
        make: Callable[[], Drafter],
        name: str,
        *,
        least: float = 1.0,
        memory: float = 0.9,
        probe: int = 16,
        cost: float | None = None,
        verify: Cost | None = None,
    ) -> None:
        self._make, self.name = make, name
        self.least, self.memory, self.probe = least, memory, probe
        self._given, self._verify = cost, verify or free
        self._inner: Drafter = make()
        if getattr(self._inner, "alone", False):
            raise Incompatible(f"{name} reads its next guesses off its own draft, so it can't be switched off between")
        self.vocabulary, self.needs = self._inner.vocabulary, self._inner.needs
        self._free = reads_nothing(self._inner) and not cost
        self._hears = hasattr(self._inner, "hear")  # may it be told later what was said?
        self._crowd = 1

    @property
    def bytes_read(self) -> int:
        return self._inner.bytes_read

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._target = prefill.itself.weight_bytes if prefill.itself else 0
        self._start(len(prompts))
        self._inner.begin(prefill, prompts, sampling)

    def _start(self, rows: int) -> None:
        self._level = self._given or 0.0  # what a level costs
        self._worth = self._weight = 0.0
        self._steps, self._rest = 0, Rest()
        self._price: float | None = None  # what the last try lost, in plain rounds
        self._missed: list[list[int]] = [[] for _ in range(rows)]
        self._going = [True] * rows
        self._watched: Guesses | None = None
        self._off = False

    # ---- rows that come and go (outrider.core.drafters.per_row.Joined)

    def joins(self) -> bool:
        """Not where rows would share what belongs to one of them."""
        return joins(self._inner) or reads_nothing(self._inner)

    def open(self, sampling: Sampling) -> None:
        if not joins(self._inner):
            self._inner = PerRow(self._make, self._inner)
        self._target = 0
        self._start(0)
        self._joined.open(sampling)

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._joined.arrange(order, width)
        self._missed = [self._missed[row] if row >= 0 else [] for row in order]

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        self._target = prefill.itself.weight_bytes if prefill.itself else 0
        self._joined.enter(row, prefill, prompt)

    def leave(self, row: int) -> None:
        self._joined.leave(row)
        self._missed[row] = []

    @property
    def _joined(self) -> Joined:
        return self._inner  # type: ignore[return-value]

    def share(self, rows: int) -> None:
        """So many like it, one for each row, draft side by side."""
        self._crowd = max(rows, 1)

    # ----

    @property
    def predicted(self) -> float:
        """How many times plain decoding's speed its drafts are worth."""
        return self._worth / self._weight if self._weight else 1.0

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        self._going = [left >= 0 for left in room.tolist()]
        self._steps += 1
        rows = len(self._going)
        self._off, self._watched = not self._tried(rows), None
        if self._off and not (rows == 1 and self._free):
            if not self._hears:  # so that it sees what is said
                self._inner.propose(room.clamp(max=0), rng)
            return self._plain(rows, rng)
        self._catch_up()
        draft, level = priced(self._inner, room, rng, self._target)
        if self._given is None and level is not None:
            self._level = level
        if self._off:
            self._watched = Guesses(draft)
            return self._plain(rows, rng)
        return replace(draft, note=(self.name,) * rows)

    def _tried(self, rows: int) -> bool:
        keen = self.predicted >= self.least
        if rows == 1:
            return keen or self._weight < _TRUSTED or self._steps % self.probe == 0
        price = self._price
        self._rest.drafting = keen and price is not None
        if price is None:  # one guess, right half of the time
            price = max(self._cost(rows, 1, 1) - 1 - _HALF, 0.0)
        return self._rest.due(price, rows)

    def _plain(self, rows: int, rng: CounterRNG) -> Draft:
        note = f"plain (off: {self.predicted:.2f}x predicted)" if self._weight else "plain (off: too many rows)"
        return replace(Draft.empty(rows, rng.device), note=(note,) * rows)

    def _cost(self, rows: int, guesses: int, depth: int) -> float:
        """Of a step, in plain ones."""
        rows = max(rows, self._crowd)
        return self._verify(rows, guesses + 1) / self._verify(rows, 1) + self._level * depth

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        emitted, rows = verdict.rows(draft), len(self._going)
        if self._watched is not None:
            tokens = self._watched.right(0, emitted[0]) + 1  # at least; what comes behind these is not known
            self._learn(tokens / self._cost(1, self._watched.sizes[0], 0))
        elif self._off:
            if self._hears:
                for missed, tokens_, going in zip(self._missed, emitted, self._going, strict=True):
                    missed += tokens_ if going else []
                return
            if aside := getattr(self._inner, "aside", None):
                aside()
        else:
            tried = sum(len(tokens_) for tokens_, going in zip(emitted, self._going, strict=True) if going)
            each, cost = tried / max(sum(self._going), 1), self._cost(rows, draft.size, draft.tree.depth)
            self._learn(each / cost)
            if rows > 1:
                self._price = max(cost - each, 0.0)
                self._rest.gained(each - cost)
        self._inner.observe(draft, scores, verdict, rng)

    def _learn(self, worth: float) -> None:
        self._worth = self.memory * self._worth + (1 - self.memory) * worth
        self._weight = self.memory * self._weight + 1 - self.memory

    def _catch_up(self) -> None:
        for row, tokens in enumerate(self._missed):
            if tokens:
                self._inner.hear(row, tokens)  # type: ignore[attr-defined]
                self._missed[row] = []

    def end(self) -> None:
        self._inner.end()


def guarded(
    *,
    drafter: Drafter | str = "prompt-lookup",
    options: Mapping[str, Any] | None = None,
    least: float = 1.0,
    memory: float = 0.9,
    probe: int = 16,
    cost: float | None = None,
    verify: Cost | None = None,
) -> Guarded:
    """Any drafter, switched off where it is predicted to be slower than plain decoding; the trace says so."""
    name = drafter if isinstance(drafter, str) else type(drafter).__name__

    def make() -> Drafter:
        return by_name(drafter, options or {}) if isinstance(drafter, str) else drafter

    return Guarded(make, name, least=least, memory=memory, probe=probe, cost=cost, verify=verify)
