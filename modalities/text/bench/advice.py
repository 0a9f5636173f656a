"""Records every drafter that a text model can have on prompts, for outrider.core.advice, and checks its predictions.

Each drafter runs once with its longest draft; all of them on a few prompts first, and those that may be the fastest on
all prompts. What it predicts from the records is in outrider.core.advice.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np

from outrider.core.advice.advise import Advice, advise, best_length
from outrider.core.advice.measure import WIDTHS, RoundCosts, measure
from outrider.core.advice.predict import Candidate, DraftCost, Machine, Prediction
from outrider.core.advice.replay import attempts, fills
from outrider.core.bench.runner import PLAIN, Bench, Contender, Item, Outcome
from outrider.core.bench.timing import timed
from outrider.core.errors import InvalidOption, OutriderError, unknown
from outrider.core.methods import AUTO, DRAFTERS
from outrider.core.methods.row import Method
from outrider.core.trace import Step
from outrider.text.model import TextModel

LONGEST = 12  # draft tokens of the records
_TREES = (8, 16)  # nodes
_SCREENED, _KEPT = 4, 5  # prompts that every drafter runs on, and drafters that run on all
_TRIED, _BLOCK = 8, 4  # prompts on which those run in turns with plain decoding, more where that is quick, in blocks
_SHORT = (1, 3, 6)  # lengths at which the time of drafting is measured besides the longest
_COST_TOKENS = 24
_LEAST = 4  # steps of which a time is typical
_RUNS = 4  # of measuring the cost of passes, at most
_SECONDS = 10.0  # after which neither is measured on
_CHECKS, _CHECK_SECONDS = (2, 6), 40.0  # times that predictions are held against measurement, and about how long
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """A drafter with the options of its record."""

    drafter: str
    options: Mapping[str, Any]
    longest: int = 0  # of a chain, which is replayed; 0: as it is recorded
    length_option: str = "length"

    @property
    def shape(self) -> str:
        return f"tree of {self.options['nodes']}" if "nodes" in self.options else ""

    def with_length(self, length: int) -> dict[str, Any]:
        """The options with a draft of this length; 0: those of the record."""
        return {**self.options, **({self.length_option: length} if self.longest and length else {})}

    @property
    def name(self) -> str:
        return f"{self.drafter}, {self.shape}" if self.shape else self.drafter


def plans(method: Method, longest: int = LONGEST) -> list[Plan]:
    """How a drafter is recorded: its chain at the longest, its trees at several sizes, anything else as it is."""
    options = method.options
    found = []
    if "chain" in method.topology and "length" in options and (len(method.topology) == 1 or "draft_kind" in options):
        kind = {"draft_kind": "chain"} if len(method.topology) > 1 else {}
        found.append(Plan(method.name, {**kind, "length": longest}, longest))
    if "tree" in method.topology and isinstance(options.get("nodes"), int):
        found += [Plan(method.name, {"nodes": nodes}) for nodes in _TREES]
    return found or [Plan(method.name, {})]


def methods_of(lm: TextModel, names: Sequence[str] = ()) -> list[Method]:
    """The drafters with these names, by default all that run for this model with what is there."""
    for name in names:
        if name not in lm.drafters:
            raise unknown("drafter", name, lm.drafters)
    return [AUTO if name == AUTO.name else DRAFTERS[name] for name in names or lm.drafters.ready]


@dataclass
class Study:
    """The measurements of one model on prompts."""

    lm: TextModel
    items: Sequence[Item]
    tokens: int = 64
    longest: int = LONGEST
    sizes: tuple[int, ...] = (1,)  # batch sizes
    say: Say = lambda line: None

    def __post_init__(self) -> None:
        self.skipped: dict[str, str] = {}
        lengths = {item.id: len(self.lm.encode(item.content)) for item in self.items}
        room = self.lm.context - self.tokens
        fitting = [item for item in self.items if lengths[item.id] <= room]
        if not fitting:
            raise InvalidOption(f"no prompt leaves room for {self.tokens} tokens in the context of {self.lm.context:,}")
        if len(fitting) < len(self.items):
            left_out = f"{len(self.items) - len(fitting)} of {len(self.items)} prompts"
            self.skipped[left_out] = f"they leave no room for {self.tokens} tokens in the context"
        self.items = fitting
        self.plans: dict[str, Plan] = {}
        self._rest = 0.0  # of plain decoding: milliseconds of a round outside of the pass
        self.turn = 0.0  # seconds that one drafter took for one prompt, in turns with others

    def rounds(self) -> RoundCosts:
        """The costs of rounds on this machine, after prompts of about median length."""
        prompts = sorted((self.lm.encode(item.content) for item in self.items), key=len)
        middle = [ids[: self.lm.context // 2] for ids in prompts[len(prompts) // 4 : len(prompts) // 2 + 1]]
        widths = [width for width in WIDTHS if width <= max(self.longest, *_TREES) + 1]
        self.say("measuring the cost of passes")
        start, runs = time.perf_counter(), list[RoundCosts]()
        while len(runs) < _RUNS and (not runs or time.perf_counter() - start < _SECONDS):
            runs.append(measure(self.lm.target, middle, sizes=self.sizes, widths=widths))
        return RoundCosts(runs[0].shapes, np.concatenate([run.samples for run in runs]))

    def advice(self, machine: Machine, methods: Sequence[Method]) -> Advice:
        """Record all drafters on the first prompts, and the fastest on all."""
        screened, rest = self.items[:_SCREENED], self.items[_SCREENED:]
        self._rest = self._plain_rest(screened[:2])
        found: list[Candidate] = []
        for plan in (plan for method in methods for plan in plans(method, self.longest)):
            self.say(plan.name)
            try:
                found.append(self._recorded(plan, screened))
            except OutriderError as error:
                self.skipped[plan.name] = str(error)
        if rest and found:
            for each in _promising([best_length(machine, each) for each in found]):
                self.say(f"{each.name}, all prompts")
                more = self._run(self.plans[each.name], rest)
                records = (*each.records, *(attempts(steps) for steps in more))
                found[found.index(each)] = replace(each, records=records)
            # the others have an interval of a few prompts only
            found = [each for each in found if len(each.records) == len(self.items)]
        found = self._tried(machine, found)
        given = advise(machine, found)
        if given.best and len(self.sizes) > 1:
            fastest = self._with_batches(given.best[0])
            found = [fastest if each.name == fastest.name else each for each in found]
        return advise(machine, found, self.sizes)

    def _tried(self, machine: Machine, found: Sequence[Candidate]) -> list[Candidate]:
        """The candidates with the time of their rounds at the best length, in turns with plain decoding: passes cost
        more or less there than in turns with passes over other numbers of tokens. What was predicted from those counts
        like one more block of prompts, since a few prompts are soon measured wrong."""
        if not found:
            return []
        self.say("the fastest in turns")
        best = sorted((best_length(machine, each) for each in found), key=lambda p: p.speedup, reverse=True)[:_KEPT]
        bench = bench_of(self, best, self.items, -(-2 * _TRIED // len(self.items)))
        start, done = time.perf_counter(), 0
        for turn, _ in enumerate(bench.go(), 1):
            done = turn // len(bench.contenders) - 1  # prompts, after the warm-up
            if done >= _TRIED and time.perf_counter() - start > _SECONDS:
                break
        self.turn = (time.perf_counter() - start) / (done + 1) / len(bench.contenders)
        blocks = [range(at, at + _BLOCK) for at in range(0, done - _BLOCK + 1, _BLOCK)]
        tried = dict[str, Candidate]()
        for each, contender in zip(best, bench.contenders[1:], strict=True):
            pace = [1.0]
            for block in blocks:
                records = tuple(each.candidate.records[place % len(self.items)] for place in block)
                expected = machine.speedup(replace(each.candidate, records=records), each.length)
                pace.append(expected / _ratio(bench, contender.name, block))
            tried[each.candidate.name] = replace(each.candidate, pace=tuple(pace))
        return list(tried.values())

    def _recorded(self, plan: Plan, items: Sequence[Item]) -> Candidate:
        runs = self._run(plan, items)
        records = tuple(attempts(steps) for steps in runs)
        steps = [step for run in runs for step in run]
        chain = bool(plan.longest) and all(attempt.chain for record in records for attempt in record)
        longest = max((attempt.depth for record in records for attempt in record), default=0) if chain else 0
        always = chain and fills(records, longest)
        timed_at = {(1, size): ms for size, ms in self._times(steps).items()}
        if always:
            for length in (length for length in _SHORT if length < longest):
                own = [step for run in self._run(plan, items[:1], length, _COST_TOKENS) for step in run]
                timed_at |= {(1, size): ms for size, ms in self._times(own).items() if size == length}
        self.plans[plan.name] = replace(plan, longest=longest)
        return Candidate(
            plan.name,
            records,
            DraftCost(timed_at),
            always,
            longest,
            plan.shape,
            dict(plan.options) if not chain else {},
        )

    def _run(
        self, plan: Plan, items: Sequence[Item], length: int = 0, tokens: int | None = None
    ) -> list[tuple[Step, ...]]:
        return [
            self.lm.generate(
                item.content,
                drafter=plan.drafter,
                drafter_options=plan.with_length(length),
                max_new_tokens=tokens or self.tokens,
            ).trace.steps
            for item in items
        ]

    def _plain_rest(self, items: Sequence[Item]) -> float:
        steps = [
            step
            for item in items
            for step in self.lm.generate(item.content, drafter=None, max_new_tokens=_COST_TOKENS).trace.steps[1:]
        ]
        return 1e3 * _typical([step.times.rule + step.times.rest for step in steps] or [0.0])

    def _times(self, steps: Sequence[Step]) -> dict[int, float]:
        """Milliseconds of drafting and of what a draft adds to a round outside of the pass, by the size of the draft;
        sizes that are rare are left to the others."""
        by_size: dict[int, list[float]] = defaultdict(list)
        for step in steps:
            own = 1e3 * (step.times.draft + step.times.rule + step.times.rest) - self._rest
            by_size[len(step.drafted)].append(max(own, 0.0))
        common = {size: _typical(values) for size, values in by_size.items() if len(values) >= _LEAST}
        return common or {0: _typical([value for values in by_size.values() for value in values] or [0.0])}

    def _with_batches(self, prediction: Prediction) -> Candidate:
        """The candidate with its drafting measured in batches, too."""
        candidate, plan = prediction.candidate, self.plans[prediction.candidate.name]
        measured = dict(candidate.cost.measured)
        for rows in (size for size in self.sizes if size > 1):
            self.say(f"{plan.name}, {rows} rows")
            prompts = [str(self.items[row % len(self.items)].content) for row in range(rows)]
            options = plan.with_length(prediction.length)
            results = self.lm.generate(
                prompts, drafter=plan.drafter, drafter_options=options, max_new_tokens=_COST_TOKENS
            )
            rounds = {step.index: step for result in results for step in result.trace.steps if step.alive == rows}
            own = [1e3 * step.times.draft for step in rounds.values()]
            if own:
                measured |= {(rows, 0): _typical(own), (rows, max(prediction.length, 1)): _typical(own)}
        return replace(candidate, cost=DraftCost(measured))


def _promising(predictions: Sequence[Prediction]) -> list[Candidate]:
    """Those that run on all prompts: the two that are fastest so far, and those whose intervals reach highest."""
    fastest = sorted(predictions, key=lambda each: each.speedup, reverse=True)[:2]
    others = sorted((each for each in predictions if each not in fastest), key=lambda each: each.high, reverse=True)
    return [each.candidate for each in (*fastest, *others)][:_KEPT]


def _typical(values: Sequence[float]) -> float:
    """The mean without the highest tenth: other load only adds to a time."""
    ordered = sorted(values)
    return mean(ordered[: max(len(ordered) - len(ordered) // 10, 1)])


# ---- predictions held against measurement


@dataclass(frozen=True)
class Checked:
    """A prediction and what was measured."""

    name: str
    length: int
    predicted: float
    low: float
    high: float
    measured: float
    measured_low: float
    measured_high: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def to_check(study: Study, advice: Advice, count: int = 3) -> list[Prediction]:
    """The predictions to hold against measurement: the best of the first candidates, and one more length."""
    chosen = list(advice.best[:count])
    if chosen and (first := chosen[0]).candidate.longest > 1:
        other = max(1, first.length // 2) if first.length > 1 else first.length + 1
        chosen.append(advice.machine.predict(first.candidate, other))
    return chosen


def check(study: Study, predictions: Sequence[Prediction]) -> tuple[Bench, Callable[[], list[Checked]]]:
    """A benchmark of plain decoding and the predicted drafters in turns, and what it found once it has run."""
    once = study.turn * len(study.items) * (1 + len(predictions))
    repeat = min(max(round(_CHECK_SECONDS / max(once, 1e-9)), _CHECKS[0]), _CHECKS[1])
    bench = bench_of(study, predictions, study.items, repeat)

    def found() -> list[Checked]:
        rows = []
        for each, contender in zip(predictions, bench.contenders[1:], strict=True):
            count = len(bench.items)
            speeds = [_ratio(bench, contender.name, range(at, at + count)) for at in range(0, repeat * count, count)]
            spread = (min(speeds), max(speeds))
            rows.append(
                Checked(each.candidate.name, each.length, each.speedup, each.low, each.high, median(speeds), *spread)
            )
        return rows

    return bench, found


def bench_of(study: Study, predictions: Sequence[Prediction], items: Sequence[Item], repeat: int) -> Bench:
    """Plain decoding and the predicted drafters, in turns."""

    def contender(name: str, drafter: str | None, options: Mapping[str, Any]) -> Contender:
        def call(item: Item) -> tuple[Any, Any]:
            out = study.lm.generate(item.content, drafter=drafter, drafter_options=options, max_new_tokens=study.tokens)
            return out.tokens, out.trace.steps

        return Contender(name, lambda item: Outcome(*timed(lambda: call(item))))

    contenders = [contender(PLAIN, None, {})]
    for each in predictions:
        plan = study.plans[each.candidate.name]
        name = f"{each.candidate.name} {each.length or ''}".strip()
        contenders.append(contender(name, plan.drafter, plan.with_length(each.length)))
    return Bench(contenders, items, repeat)


def _ratio(bench: Bench, name: str, picked: range) -> float:
    """The speed of some runs together over that of plain decoding's, without the prefill."""

    def speed(contender: str) -> float:
        outcomes = [run.outcome for run in bench.of(contender)[picked.start : picked.stop]]
        seconds = sum(step.times.total for outcome in outcomes for step in outcome.steps)
        return sum(len(outcome.tokens) for outcome in outcomes) / max(seconds, 1e-9)

    return speed(name) / speed(PLAIN)


def progress_of(methods: Sequence[Method], items: Sequence[Item], sizes: Sequence[int], longest: int) -> int:
    """How many lines a study says."""
    return (
        2 + sum(len(plans(method, longest)) for method in methods) + _KEPT * (len(items) > _SCREENED) + len(sizes) - 1
    )
