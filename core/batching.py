"""Continuous batching: requests enter and leave while others are decoded, and each gives the same output as alone.

Each row has its own positions in a common cache; where the target can, it holds memory only for the slots that it has
used. A finished row becomes an empty row, which the next request fills; if no request is waiting, empty
rows are removed once they are half of all. Requests are served in order of arrival; one that does not fit yet may be
overtaken a limited number of times. A long prompt is read one chunk per round, which bounds the delay of the other
rows; what another row has read of it is copied. Independent of what a token means.

Batch Speculative Decoding Done Right (arXiv 2510.22876) pads rows again in every round or groups rows of one length;
here nothing is realigned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outrider.core.constrained_drafter import constrained
from outrider.core.constraint import ConstrainedPrompt, Constraint, Walker, unsatisfied
from outrider.core.decode import Run, Stop, check_prompt
from outrider.core.distribution import Sampling
from outrider.core.drafters.per_row import batched
from outrider.core.errors import Incompatible, InvalidOption, OutriderError
from outrider.core.protocol import (
    PREFILL_CHUNK,
    BatchedTarget,
    Drafter,
    PagedTarget,
    Plain,
    Prefill,
    PrefixSharing,
    Rule,
)
from outrider.core.rng import CounterRNG, mix
from outrider.core.step_recorder import Record
from outrider.core.trace import Step

PREFIX_MEMORY = 256 << 20  # bytes
_SCRATCH = 64  # slots of a row for drafts and tokens not yet read


@dataclass(eq=False)
class _Row:
    """A request, waiting or active."""

    number: int
    prompt: Sequence[int]
    limit: int
    seed: int
    width: int  # cache slots that it may need
    overtaken: int = 0
    round: int = 0
    reading: Generator[int, None, Prefill] | None = None
    walker: Walker | None = None  # at what has been emitted, where a constraint holds
    chunk: int | None = None  # tokens that the next step of `reading` reads; None: it has not begun
    reused: int = 0  # prompt tokens that were copied, not read


class ContinuousBatch:
    """Decodes at most `rows` requests at a time in at most `memory` bytes of cache; `make` gives a drafter (None: plain
    decoding). At most `waiting` further requests are queued; one that does not fit is overtaken `patience` times.

    What requests have read is held in at most `prefix_memory` bytes, part of `memory`, and is copied for a prompt that
    begins with the same tokens (0: only from active requests; None: prompts are read whole).

    `stop(number, tokens)` is as for `decode`, with a request's number for the row. `failed(number, error)` is told of
    requests whose constraint lets nothing follow (None: the error is raised). Not thread-safe.
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
        prefix_memory: int | None = PREFIX_MEMORY,
        waiting: int = 100_000,
        patience: int = 16,
        stop: Stop | None = None,
        failed: Callable[[int, OutriderError], object] | None = None,
        record: Record | None = None,
    ) -> None:
        if min(rows, waiting) < 1 or patience < 0:
            raise InvalidOption(
                f"rows={rows}, waiting={waiting}, patience={patience}: each must be 1 or more, patience may be 0"
            )
        if prefix_memory is not None and prefix_memory < 0:
            raise InvalidOption(f"prefix_memory is {prefix_memory}; it must be a number of bytes, or None")
        if not isinstance(target, BatchedTarget):
            raise Incompatible(
                f"{type(target).__name__} does not support continuous batching; use a model that our own "
                "decoder runs (Llama, Qwen, Mistral, Gemma, ...), or give generate() a list of prompts"
            )
        self.target, self.rows, self.memory, self.prefix_memory = target, rows, memory, prefix_memory
        self._paged = target if isinstance(target, PagedTarget) and target.page is not None else None
        self._prefixes = target.prefixes if isinstance(target, PrefixSharing) else None
        self.max_waiting, self.patience = waiting, patience
        sampling = sampling or Sampling()
        self._drafter = batched(lambda: constrained(Plain() if make is None else make(), sampling))
        if self._drafter.vocabulary not in (None, target.vocabulary):
            raise Incompatible(
                f"the drafter has a vocabulary of {self._drafter.vocabulary} and the target one of {target.vocabulary}"
            )
        self._stop, self._failed = stop, failed
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
        self._width = 0  # slots of each row
        self._reserved = False  # whether there is room for all rows
        self._reused: dict[int, int] = {}  # of each request that the last round decoded
        self._bound_prefixes()

    # ---- requests

    def add(
        self, prompt: Sequence[int], max_new_tokens: int, *, seed: int = 0, constraint: Constraint | None = None
    ) -> int:
        """Queue a request -> its number. Its output equals that of `decode` for it alone with `seed=[seed]`, up to
        rounding; under sampling not with drafters that choose by the number of rows (guarded, adaptive, auto) or learn
        from earlier requests (swift). A constraint of its own takes the place of the batch's, which may be `Free`."""
        check_prompt(prompt, self.target.vocabulary, f"request {self._next}'s prompt")
        if max_new_tokens < 1:
            raise InvalidOption(f"max_new_tokens is {max_new_tokens}; it must be 1 or more")
        if len(self._queue) >= self.max_waiting:
            raise InvalidOption(f"{len(self._queue):,} requests are waiting already; run the batch before adding more")
        if constraint is not None and self._run.sampling.constraint is None:
            raise InvalidOption("the batch has no constraint; give its sampling one, such as Free()")
        ids = list(prompt) if constraint is None else ConstrainedPrompt(prompt, constraint)
        row = _Row(self._next, ids, max_new_tokens, seed, len(prompt) + max_new_tokens + _SCRATCH)
        if obeyed := constraint or self._run.sampling.constraint:
            row.walker = Walker(obeyed)
        if self.memory is not None and self._bytes([row.width]) > self.memory:
            raise InvalidOption(
                f"a prompt of {len(prompt):,} tokens and {max_new_tokens:,} new ones need "
                f"{self._bytes([row.width]):,} bytes of cache, and the batch may have {self.memory:,}; lower "
                "max_new_tokens or give it more memory"
            )
        self._queue.append(row)
        self._next += 1
        return row.number

    def cancel(self, number: int) -> None:
        """Drop a request, waiting or active, before the next round."""
        self._cancelled.add(number)

    @property
    def idle(self) -> bool:
        return not self._queue and not any(self._slots)

    @property
    def active(self) -> int:
        """The number of active requests."""
        return sum(row is not None for row in self._slots)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def cache_bytes(self) -> int:
        """Bytes of cache for all rows, empty ones included."""
        return self._bytes([0 if row is None else row.width for row in self._slots], self._width)

    @property
    def prefix_bytes(self) -> int:
        """Bytes that are held of what requests have read."""
        return 0 if self._prefixes is None else self._prefixes.bytes

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens of all requests that were copied, not read."""
        return 0 if self._prefixes is None else self._prefixes.reused

    def reused(self, number: int) -> int:
        """Prompt tokens that were copied, not read, of a request that the last round decoded."""
        return self._reused.get(number, 0)

    def __iter__(self) -> Iterator[Step]:
        """Steps until no request is waiting or active; requests may be added meanwhile."""
        while not self.idle:
            yield from self.round()

    def round(self) -> list[Step]:
        """One round: requests enter, a chunk of a prompt is read, every row that is ready is decoded. The row of each
        Step is its request's number."""
        self._drop()
        self._fail()
        self._admit()
        self._read()
        self._reused = {row.number: row.reused for row in self._slots if row is not None}
        if not any(self._run.open):
            return []
        steps = self._run.round([0 if row is None else row.round for row in self._slots])
        renumbered = []
        for step in steps:
            row = self._slots[step.row]
            assert row is not None
            row.round += 1
            renumbered.append(replace(step, row=row.number))
            if step.finish is not None:
                self._vacate(step.row)
        self._close_up()
        return renumbered

    def close(self) -> None:
        """Drop all requests and free the memory."""
        self._queue.clear()
        self._slots, self._width = [], 0
        self._run.open = []
        self._run.end()

    # ---- rows

    def _stops(self, slot: int, tokens: Sequence[int]) -> int | None:
        row = self._slots[slot]
        assert row is not None and self._stop is not None
        return self._stop(row.number, tokens)

    def _bytes(self, widths: Sequence[int], least: int = 0) -> int:
        """Bytes of rows that may need these slots (0: an empty row). If rows don't hold whole pages of what they have
        used but all slots, they have as many as the widest, at least `least`."""
        page = None if self._paged is None else self._paged.page
        slots = [-(-max(width, 1) // (page or 64)) * (page or 64) for width in widths]
        total = sum(slots) if page is not None else len(slots) * max([least, *slots])
        return total * self.target.slot_bytes

    def _drop(self) -> None:
        """Remove the requests cancelled since the last round."""
        if not self._cancelled:
            return
        self._queue = deque(row for row in self._queue if row.number not in self._cancelled)
        for slot, row in enumerate(self._slots):
            if row is not None and row.number in self._cancelled:
                self._vacate(slot)
        self._cancelled.clear()
        self._close_up()

    def _fail(self) -> None:
        """End the requests that their constraints don't let go on, before they can stop a round of all."""
        for slot, row in enumerate(self._slots):
            output = self._run.emitted[slot]
            if row is not None and row.walker is not None and not row.walker.reach(output):
                error = row.walker.error or unsatisfied(f"request {row.number}", output)
                self._vacate(slot)
                if self._failed is None:
                    raise error
                self._failed(row.number, error)

    def _vacate(self, slot: int) -> None:
        row, self._slots[slot] = self._slots[slot], None
        assert row is not None
        if self._prefixes is not None:
            self._prefixes.retain(slot, [*row.prompt, *self._run.emitted[slot]])
        if row.reading is None:
            self._drafter.leave(slot)
        else:
            row.reading.close()
        self.target.leave(slot)
        self._run.open[slot], self._run.emitted[slot] = False, []

    def _admit(self) -> None:
        """Activate the requests that fit, in order of arrival; those that don't fit may be overtaken."""
        chosen: list[_Row] = []
        overtaken: list[_Row] = []
        active = [row for row in self._slots if row is not None]
        for row in list(self._queue):
            together = [*active, *chosen, row]
            if len(together) > self.rows:
                break
            widths = [member.width for member in together]
            if self.memory is None or self._bytes(widths) <= self.memory:
                if self.memory is not None:
                    empty = [0] * (len(self._slots) - len(together))
                    if self._bytes([*widths, *empty]) > self.memory:
                        self._close_up(at_once=True)
                chosen.append(row)
                for other in overtaken:
                    other.overtaken += 1
            elif row.overtaken >= self.patience:
                break
            else:
                overtaken.append(row)
        if not chosen:
            return
        taken = {row.number for row in chosen}
        self._queue = deque(row for row in self._queue if row.number not in taken)
        empty = [slot for slot, row in enumerate(self._slots) if row is None]
        width = max(row.width for row in (*active, *chosen))
        more = max(len(chosen) - len(empty), 0)
        if more or width > self._width:
            self._arrange([*range(len(self._slots)), *[-1] * more], width)
            empty = [slot for slot, row in enumerate(self._slots) if row is None]
        for slot, row in zip(empty, chosen, strict=False):
            self._slots[slot] = row
            row.reading = self.target.enter(partial(self._slots.index, row), row.prompt)
            self._run.limits[slot], self._run.emitted[slot] = row.limit, []
            self._run.rng.seeds[slot] = mix(mix(row.seed))
        self._bound_prefixes()

    def _arrange(self, order: list[int], width: int) -> None:
        """Reorder the rows: row i becomes the former row order[i], -1 an empty row. Not within a chunk of a prompt."""
        width = max([width, *(row.width for row in self._slots if row is not None)])
        self._width = -(-width // 64) * 64
        if not self._reserved and self.target.device.type != "cpu":
            self._reserve(len(order))
        self._reserved = True
        self._slots = [self._slots[row] if row >= 0 else None for row in order]
        self._bound_prefixes()
        self._run.arrange(order, self._width)

    def _reserve(self, least: int) -> None:
        """Let target and drafter make room for as many rows as there may be, which they keep: the passes of each number
        of rows are then recorded once, not again whenever more rows than ever before have moved to a larger buffer."""
        fit = self.rows if self.memory is None else min(self.memory // max(self._bytes([self._width]), 1), self.rows)
        rows = max(fit, least)
        if self._paged is not None:
            self._paged.provide(rows, None if self.memory is None else self.memory // self.target.slot_bytes)
        else:
            self.target.arrange([-1] * rows, self._width)
            self.target.arrange([], self._width)
        self._drafter.arrange([-1] * rows, self._width)
        self._drafter.arrange([], self._width)

    def _bound_prefixes(self) -> None:
        """Let prefixes have what rows leave of the memory."""
        if self._prefixes is not None:
            limit, left = self.prefix_memory, self.memory
            if limit is not None and left is not None:
                limit = min(limit, max(left - self.cache_bytes, 0))
            self._prefixes.restrict(limit)

    def _close_up(self, *, at_once: bool = False) -> None:
        """Remove empty rows if no request is waiting and they are at least half of all rows."""
        active = [slot for slot, row in enumerate(self._slots) if row is not None]
        if at_once or (self._slots and not self._queue and 2 * len(active) <= len(self._slots)):
            self._arrange(active, 0)

    def _read(self) -> None:
        """Read one chunk of the earliest prompts; more while no row is ready to be decoded."""
        reading = sorted((row.number, slot) for slot, row in enumerate(self._slots) if row is not None and row.reading)
        tokens = 0
        for _, slot in reading:
            row = self._slots[slot]
            assert row is not None and row.reading is not None
            while tokens < PREFILL_CHUNK or not any(self._run.open):
                tokens += row.chunk or 0
                before = self.reused_tokens
                try:
                    row.chunk, first = next(row.reading), row.chunk is None
                except StopIteration as end:
                    first = row.chunk is None
                    row.reading = None
                    self._drafter.enter(slot, end.value, row.prompt)
                    self._run.open[slot] = True
                if first:
                    row.reused = self.reused_tokens - before
                if row.reading is None:
                    break
