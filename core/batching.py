"""A batch that never ends: requests enter and leave while others are decoded, each row as it would be alone.

Rows stand in a rectangle of cache, each with positions of its own. A row that is finished leaves a hole, which the next
request fills; where nobody waits, holes are closed once they are half of the rows. Requests are served in the order
they came; one that does not fit yet may be overtaken, but only so often. A long prompt is read a piece a round, so that
nobody waits for it longer than that. Knows the protocol, nothing of what a token means.

Compared with Batch Speculative Decoding Done Right (arXiv 2510.22876), which pads the rows anew at every step or groups
rows of one length, nothing is realigned here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outrider.core.decode import Run, Stop, check_prompt
from outrider.core.distribution import Sampling
from outrider.core.drafters.per_row import joined
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import PIECE, BatchedTarget, Drafter, Plain, Prefill, Rule
from outrider.core.rng import CounterRNG, mix
from outrider.core.step_recorder import Record
from outrider.core.trace import Step

_SCRATCH = 64  # slots of a row for what is drafted and not yet read


@dataclass(eq=False)
class _Row:
    """A request, waiting or under way."""

    number: int
    prompt: Sequence[int]
    limit: int
    seed: int
    width: int  # slots it needs at most
    overtaken: int = 0
    round: int = 0
    reading: Generator[None, None, Prefill] | None = None


class ContinuousBatch:
    """Requests side by side, at most `rows` at a time and in at most `memory` bytes of cache; `make` gives a drafter
    (None: plain decoding). What waits is kept as token ids, `waiting` requests at most.

    `stop(number, tokens)` is as for `decode`, the row being a request's number. Not for several threads at once.
    """

    def __init__(
        self,
        target: BatchedTarget,
        make: Callable[[], Drafter] | None,
        rule: Rule,
        *,
        sampling: Sampling | None = None,
        rows: int = 8,
        memory: int | None = None,
        waiting: int = 100_000,
        patience: int = 16,
        stop: Stop | None = None,
        record: Record | None = None,
    ) -> None:
        if min(rows, waiting) < 1 or patience < 0:
            raise InvalidOption(
                f"rows={rows}, waiting={waiting}, patience={patience}: each must be 1 or more, patience may be 0"
            )
        if not hasattr(target, "enter"):
            raise Incompatible(
                f"{type(target).__name__} can't have rows enter and leave; take a model that runs on our own decoder "
                "(Llama's or Qwen's family), or give generate() a list of prompts"
            )
        self.target, self.rows, self.memory, self.most, self.patience = target, rows, memory, waiting, patience
        self._drafter = joined(Plain if make is None else make)
        if self._drafter.vocabulary not in (None, target.vocabulary):
            raise Incompatible(
                f"the drafter has a vocabulary of {self._drafter.vocabulary} and the target one of {target.vocabulary}"
            )
        sampling = sampling or Sampling()
        self._stop = stop
        rng = CounterRNG([], target.device)
        self._run = Run(
            target,
            self._drafter,
            rule,
            sampling,
            rng,
            stop=None if stop is None else self._stops,
            record=record or Record(nodes=False),
        )
        target.open(sampling, self._drafter.needs)
        self._drafter.open(sampling)
        self._slots: list[_Row | None] = []
        self._queue: deque[_Row] = deque()
        self._cancelled: set[int] = set()
        self._next = 0
        self._width = 0  # of the rows there are

    # ---- from outside

    def add(self, prompt: Sequence[int], limit: int, *, seed: int = 0) -> int:
        """A request -> its number. Its output is what `decode` gives for it alone with `seed=[seed]`."""
        check_prompt(prompt, self.target.vocabulary, f"request {self._next}'s prompt")
        if limit < 1:
            raise InvalidOption(f"the limit is {limit}; it must be 1 or more new tokens")
        if len(self._queue) >= self.most:
            raise InvalidOption(f"{len(self._queue):,} requests are waiting already; run the batch before adding more")
        row = _Row(self._next, list(prompt), limit, seed, len(prompt) + limit + _SCRATCH)
        if self.memory is not None and self._bytes(1, row.width) > self.memory:
            raise InvalidOption(
                f"a prompt of {len(prompt):,} tokens and {limit:,} new ones need {self._bytes(1, row.width):,} bytes "
                f"of cache, and the batch may have {self.memory:,}; lower the limit or give it more memory"
            )
        self._queue.append(row)
        self._next += 1
        return row.number

    def cancel(self, number: int) -> None:
        """Give a request up, waiting or under way; nothing more comes of it."""
        self._cancelled.add(number)

    @property
    def idle(self) -> bool:
        return not self._queue and not any(self._slots)

    @property
    def active(self) -> int:
        """Requests under way."""
        return sum(row is not None for row in self._slots)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def cache_bytes(self) -> int:
        """Held for the rows there are, holes included."""
        return len(self._slots) * self._width * self.target.slot_bytes

    def __iter__(self) -> Iterator[Step]:
        """Rounds until nobody waits and nobody is under way; more may be added on the way."""
        while not self.idle:
            yield from self.round()

    def round(self) -> list[Step]:
        """One round: requests enter, a piece of a prompt is read, every row that can be is decoded. The steps' rows are
        the requests' numbers."""
        self._drop()
        self._admit()
        self._read()
        if not any(self._run.open):
            return []
        steps = self._run.round([0 if row is None else row.round for row in self._slots])
        found = []
        for step in steps:
            row = self._slots[step.row]
            assert row is not None
            row.round += 1
            found.append(replace(step, row=row.number))
            if step.finish is not None:
                self._vacate(step.row)
        self._close_up()
        return found

    def close(self) -> None:
        """Give everything up."""
        self._queue.clear()
        self._slots, self._width = [], 0
        self._run.open = []
        self._run.end()

    # ---- rows

    def _stops(self, slot: int, tokens: Sequence[int]) -> int | None:
        row = self._slots[slot]
        assert row is not None and self._stop is not None
        return self._stop(row.number, tokens)

    def _bytes(self, rows: int, width: int) -> int:
        return rows * (-(-width // 64) * 64) * self.target.slot_bytes

    def _drop(self) -> None:
        """Those cancelled since the last round."""
        if not self._cancelled:
            return
        self._queue = deque(row for row in self._queue if row.number not in self._cancelled)
        for slot, row in enumerate(self._slots):
            if row is not None and row.number in self._cancelled:
                self._vacate(slot)
        self._cancelled.clear()
        self._close_up()

    def _vacate(self, slot: int) -> None:
        row, self._slots[slot] = self._slots[slot], None
        assert row is not None
        if row.reading is None:
            self._drafter.leave(slot)
        else:
            row.reading.close()
        self.target.leave(slot)
        self._run.open[slot], self._run.emitted[slot] = False, []

    def _admit(self) -> None:
        """Whoever fits, in the order they came, but for those that may be overtaken."""
        chosen: list[_Row] = []
        passed: list[_Row] = []
        there = [row for row in self._slots if row is not None]
        for row in list(self._queue):
            together = [*there, *chosen, row]
            if len(together) > self.rows:
                break
            wide = max(one.width for one in together)
            if self.memory is None or self._bytes(len(together), wide) <= self.memory:
                if self.memory is not None and self._bytes(len(self._slots), wide) > self.memory:
                    self._close_up(at_once=True)
                chosen.append(row)
                for one in passed:
                    one.overtaken += 1
            elif row.overtaken >= self.patience:
                break
            else:
                passed.append(row)
        if not chosen:
            return
        taken = {row.number for row in chosen}
        self._queue = deque(row for row in self._queue if row.number not in taken)
        holes = [slot for slot, row in enumerate(self._slots) if row is None]
        wide = max(row.width for row in (*there, *chosen))
        more = max(len(chosen) - len(holes), 0)
        if more or wide > self._width:
            self._arrange([*range(len(self._slots)), *[-1] * more], wide)
            holes = [slot for slot, row in enumerate(self._slots) if row is None]
        for slot, row in zip(holes, chosen, strict=False):
            self._slots[slot] = row
            row.reading = self.target.enter(partial(self._slots.index, row), row.prompt)
            self._run.limits[slot], self._run.emitted[slot] = row.limit, []
            self._run.rng.seeds[slot] = mix(mix(row.seed))

    def _arrange(self, order: list[int], width: int) -> None:
        """Row i is what row order[i] was; -1: a hole. Nobody may be in the middle of a prompt's piece."""
        run = self._run
        width = max([width, *(row.width for row in self._slots if row is not None)])
        self._width = -(-width // 64) * 64
        self.target.arrange(order, self._width)
        self._drafter.arrange(order, self._width)
        self._slots = [self._slots[row] if row >= 0 else None for row in order]
        run.limits = [run.limits[row] if row >= 0 else 1 for row in order]
        run.emitted = [run.emitted[row] if row >= 0 else [] for row in order]
        run.open = [row >= 0 and run.open[row] for row in order]
        run.rng.seeds = [run.rng.seeds[row] if row >= 0 else 0 for row in order]

    def _close_up(self, *, at_once: bool = False) -> None:
        """Holes are closed lazily: where nobody waits, and they are half of the rows or more."""
        there = [slot for slot, row in enumerate(self._slots) if row is not None]
        if at_once or (self._slots and not self._queue and 2 * len(there) <= len(self._slots)):
            self._arrange(there, 0)

    def _read(self) -> None:
        """A piece's worth of prompts, those that came first; more, while nobody could be decoded otherwise."""
        reading = sorted((row.number, slot) for slot, row in enumerate(self._slots) if row is not None and row.reading)
        tokens = 0
        for _, slot in reading:
            row = self._slots[slot]
            assert row is not None and row.reading is not None
            while tokens < PIECE or not any(self._run.open):
                tokens += min(len(row.prompt), PIECE)
                try:
                    next(row.reading)
                except StopIteration as end:
                    row.reading = None
                    self._drafter.enter(slot, end.value, row.prompt)
                    self._run.open[slot] = True
                    break
