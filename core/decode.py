"""The decoding loop: propose, score, decide, cut, keep, observe. A generator of Steps, for batches of ragged rows.

Plain decoding is the same loop with an empty draft. Independent of how drafts are made, how a rule decides and what a
token means. On CUDA the host synchronises with the device once per round, when the verdict is fetched.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import late_guess
from outrider.core.constrained_drafter import constrained
from outrider.core.device import SideTransfer, upload
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Outcome
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import (
    ArrangeableRows,
    BatchedDrafter,
    CapturingTarget,
    Drafter,
    Judged,
    JudgingTarget,
    LateDrafter,
    OverlappedDrafter,
    Plain,
    Prompts,
    Rule,
    Scores,
    Target,
    readings_of,
)
from outrider.core.rng import CounterRNG
from outrider.core.step_recorder import Extras, FetchedStep, Record
from outrider.core.trace import Finish, Step, Times

_CLOSE_UP = 0.75  # of the rows: finished ones leave once so few are left, or fewer
Stop = Callable[[int, Sequence[int]], int | None]  # (row, all tokens it has emitted) -> where to cut them; None: go on


def decode(
    target: Target,
    drafter: Drafter | None,
    rule: Rule,
    prompts: Prompts,
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int | Sequence[int],
    stop: Stop | None = None,
    seed: int | Sequence[int] | CounterRNG = 0,
    record: Record | None = None,
) -> Iterator[Step]:
    """Decode each prompt until its end token, its stop or its `max_new_tokens`; yields a Step per row and target pass.

    Arguments are checked before the first step. Closing the generator frees the target's memory.
    """
    drafter, sampling = Plain() if drafter is None else drafter, sampling or Sampling()
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    _check(target, drafter, prompts, limits, seed)
    drafter = constrained(drafter, sampling)
    rng = seed if isinstance(seed, CounterRNG) else CounterRNG.of(seed, len(prompts), target.device)
    run = Run(target, drafter, rule, sampling, rng, stop=stop, record=record or Record())
    return run.steps(prompts, limits)


def _check(
    target: Target, drafter: Drafter, prompts: Prompts, limits: list[int], seed: int | Sequence[int] | CounterRNG
) -> None:
    if not len(prompts):
        raise InvalidOption("there are no prompts; give a list with at least one list of token ids")
    if isinstance(prompts[0], int):
        raise InvalidOption("prompts is one list of token ids; a batch is a list of such lists, so wrap it: [prompt]")
    for row, prompt in enumerate(prompts):
        check_prompt(prompt, target.vocabulary, f"prompt {row}")
    if len(limits) != len(prompts):
        raise InvalidOption(
            f"max_new_tokens has {len(limits)} values for {len(prompts)} prompts; give one for all or one each"
        )
    if min(limits) < 1:
        raise InvalidOption(f"max_new_tokens is {min(limits)}; it must be 1 or more")
    if not isinstance(seed, int | CounterRNG) and len(seed) != len(prompts):
        raise InvalidOption(f"there are {len(seed)} seeds for {len(prompts)} prompts; give one for all or one each")
    if drafter.vocabulary is not None and drafter.vocabulary != target.vocabulary:
        raise Incompatible(
            f"the drafter has a vocabulary of {drafter.vocabulary} and the target one of {target.vocabulary}; "
            "use a drafter made for this target, or one that translates between tokenizers"
        )
    if not target.rollback and not isinstance(drafter, Plain):
        raise Incompatible(
            "this target cannot drop tokens it has read (recurrent state), "
            "so rejected guesses could not be undone; use plain decoding, drafter=None"
        )


def check_prompt(prompt: Sequence[int], vocabulary: int, name: str) -> None:
    """Refuse a prompt that the target can't read."""
    if not len(prompt):
        raise InvalidOption(f"{name} is empty; a model needs at least one token to continue from")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocabulary:
        invalid = low if low < 0 else high
        raise InvalidOption(f"{name} contains token {invalid}; the target's vocabulary goes from 0 to {vocabulary - 1}")


def commit(
    row: int, before: Sequence[int], emitted: Sequence[int], end: Sequence[int], stop: Stop | None, limit: int
) -> tuple[int, Finish | None]:
    """The number of newly emitted tokens to keep in a row, and what finishes the row, if anything: an end token (which
    is kept), its stop, or its limit, in that order. The only place where output is cut."""
    count, finish = len(emitted), None
    for index, token in enumerate(emitted):
        if token in end:
            count, finish = index + 1, "end"
            break
    room = limit - len(before)
    if count > room:
        count, finish = room, None
    if stop is not None:
        cut = stop(row, [*before, *emitted[:count]])
        if cut is not None and cut < len(before) + count:
            return max(cut - len(before), 0), "stop"
        if cut is not None:
            return count, "end" if finish == "end" else "stop"
    if finish == "end":
        return count, "end"
    return count, "limit" if count == room else None


class _Stopwatch:
    """Splits the time of a round by phase; on CUDA with events, which are read without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._last = self._now()
        self._laps: list[tuple[str, object, object]] = []

    def _now(self) -> object:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def start(self) -> None:
        """Start timing here, so that the consumer's time between rounds does not count."""
        self._last = self._now()

    def lap(self, name: str) -> None:
        now = self._now()
        self._laps.append((name, self._last, now))
        self._last = now

    def read(self) -> Times:
        """The times since the last reading of the laps that the device has completed; on CUDA, those after the verdict
        count for the next round."""
        spent = {"draft": 0.0, "score": 0.0, "rule": 0.0, "rest": 0.0}
        later: list[tuple[str, object, object]] = []
        for name, start, stop in self._laps:
            if isinstance(start, float) and isinstance(stop, float):
                spent[name] += stop - start
            elif isinstance(start, torch.cuda.Event) and isinstance(stop, torch.cuda.Event):
                if stop.query():  # type: ignore[no-untyped-call]
                    spent[name] += start.elapsed_time(stop) / 1e3
                else:
                    later.append((name, start, stop))
        self._laps = later
        return Times(**spent)


class Run:
    """Rows that are decoded together, and the tokens each has emitted. In `decode` all rows start together; in
    outrider.core.batching they enter and leave between rounds."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rule: Rule,
        sampling: Sampling,
        rng: CounterRNG,
        *,
        stop: Stop | None,
        record: Record,
    ) -> None:
        if sampling.constraint is not None and not rule.lossless:
            raise Incompatible(
                "a relaxed rule may accept tokens that the constraint forbids; use an exact rule, such as the default"
            )
        self.target, self.drafter = target, drafter
        self._late = drafter if isinstance(drafter, LateDrafter) else None  # whose verdicts are not recorded
        self.rule = target.captured(rule) if isinstance(target, CapturingTarget) and self._late is None else rule
        self._judging = target if isinstance(target, JudgingTarget) and self._late is None else None
        self._overlapped = drafter if isinstance(drafter, OverlappedDrafter) else None
        self._readings = readings_of(drafter) if target.device.type != "cpu" else ()  # there a transfer costs nothing
        self.sampling, self.stop, self.rng, self.record = sampling, stop, rng, record
        self.limits: list[int] = []
        self.emitted: list[list[int]] = []
        self.open: list[bool] = []
        self._watch = _Stopwatch(target.device)
        self._side: SideTransfer | None = None

    def steps(self, prompts: Prompts, limits: list[int]) -> Iterator[Step]:
        self.limits, self.emitted, self.open = limits, [[] for _ in prompts], [True] * len(prompts)
        try:
            prefill = self.target.begin(prompts, self.sampling, self.drafter.needs)
            self.drafter.begin(prefill, prompts, self.sampling)
            numbers, stop, index = [*range(len(prompts))], self.stop, 0  # numbers: of the rows that are left
            self.stop = None if stop is None else lambda row, tokens: stop(numbers[row], tokens)
            while any(self.open):
                for step in self.round(index):
                    yield step if numbers[step.row] == step.row else replace(step, row=numbers[step.row])
                index += 1
                left = [row for row, going in enumerate(self.open) if going]
                if left and len(left) <= _CLOSE_UP * len(self.open) and self._closes_up():
                    self.arrange(left, max(len(prompts[numbers[row]]) + len(self.emitted[row]) for row in left))
                    numbers[:] = [numbers[row] for row in left]
        finally:
            if not sys.is_finalizing():  # an abandoned run at the interpreter's end has nothing left to free
                self.end()

    def _closes_up(self) -> bool:
        """Whether finished rows can leave. Not on a GPU, where passes are recorded for each number of rows."""
        if self.target.device.type != "cpu" or not isinstance(self.target, ArrangeableRows):
            return False
        batched = not isinstance(self.drafter, BatchedDrafter) or self.drafter.supports_batching()
        return batched and isinstance(self.drafter, ArrangeableRows)

    def arrange(self, order: Sequence[int], width: int) -> None:
        """Reorder the rows: row i becomes the former row order[i], or an empty one for -1."""
        assert isinstance(self.target, ArrangeableRows) and isinstance(self.drafter, ArrangeableRows)
        self.target.arrange(order, width)
        self.drafter.arrange(order, width)
        self.limits = [self.limits[row] if row >= 0 else 1 for row in order]
        self.emitted = [self.emitted[row] if row >= 0 else [] for row in order]
        self.open = [row >= 0 and self.open[row] for row in order]
        self.rng.arrange(order)

    def end(self) -> None:
        if self._side is not None:
            self._side.end()
        self.drafter.end()
        self.target.end()

    def _score(self, draft: Draft) -> Scores | Judged:
        """The target's scores, with the verdict if it judges. An overlapped drafter drafts ahead meanwhile, in a thread
        or on a CUDA stream."""
        if self._overlapped is None:
            return self._pass(draft)
        if self._side is None:
            self._side = SideTransfer(self.target.device)
        with self._side.run(self._overlapped.draft_ahead, draft):
            return self._pass(draft)

    def _pass(self, draft: Draft) -> Scores | Judged:
        judged = None
        if self._judging is not None:
            judged = self._judging.judge(draft, self.rule, self.rng, nodes=self.record.nodes, readings=self._readings)
        return self.target.score(draft) if judged is None else judged

    def _room(self) -> Tensor:
        left = [
            limit - len(emitted) - 1 if open_ else -1
            for limit, emitted, open_ in zip(self.limits, self.emitted, self.open, strict=True)
        ]
        return torch.tensor(left)

    def round(self, index: int | Sequence[int]) -> list[Step]:
        """One round: a Step of every open row. `index` is the steps' number, or each row's own."""
        rng, drafter, target, watch = self.rng, self.drafter, self.target, self._watch
        watch.start()
        rng.at(index, self.open)
        read = drafter.bytes_read
        watch.lap("rest")
        draft = drafter.propose(self._room(), rng)
        watch.lap("draft")
        rng.reserve(draft.size + 1)
        scored = self._score(draft)
        watch.lap("score")
        judged = scored if isinstance(scored, Judged) else None
        scores = scored.scores if isinstance(scored, Judged) else scored
        late = None if self._late is None else self._late.late_guess()
        if late is not None:
            verdict = late_guess.decide(self.rule, draft, late, scores, rng)
        else:
            verdict = self.rule(draft, scores, rng) if judged is None else judged.verdict
        seen = FetchedStep(draft, verdict, self.record.nodes, scores, self._readings, judged)
        scores.fetched = seen.readings
        watch.lap("rule")
        tokens, paths = zip(*((seen.emitted(row), seen.path(row)) for row in range(len(self.open))), strict=True)
        cuts = [self._cut(row, emitted) for row, emitted in enumerate(tokens)]
        counts = [count for count, _ in cuts]
        count = upload(counts, target.device)
        verdict = replace(verdict, outcome=Outcome([*tokens], [*paths], counts), count=count)
        extras = Extras(scores, verdict, self.record)
        watch.lap("rest")
        target.keep(draft, verdict, count)
        watch.lap("score")
        drafter.observe(draft, scores, verdict, rng)
        watch.lap("draft")
        cost = 1 + (drafter.bytes_read - read) / max(target.weight_bytes, 1)
        alive = sum(self.open)
        parts = []
        for row, (kept, finish) in enumerate(cuts):
            if self.open[row]:
                parts.append((row, seen.step(row, kept), extras.step(row, kept), finish))
                self.emitted[row] += seen.emitted(row)[:kept]
                self.open[row] = finish is None
        watch.lap("rest")
        times = watch.read()
        return [
            Step(row=row, index=number, finish=finish, times=times, alive=alive, cost=cost, **own, **extra)  # type: ignore[arg-type]
            for row, own, extra, finish in parts
            for number in [index if isinstance(index, int) else index[row]]
        ]

    def _cut(self, row: int, emitted: list[int]) -> tuple[int, Finish | None]:
        if not self.open[row]:
            return 0, None
        return commit(row, self.emitted[row], emitted, self.sampling.end, self.stop, self.limits[row])
