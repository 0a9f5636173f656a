"""Benchmarks decoders: contenders alternate on every item, and comparisons are paired.

Speeds are wall-clock, from the prompt to the last token, as medians with quartiles. A speedup is the median over items
of ratios within one round, with a bootstrap interval over items; the speedup of decoding alone, without the prefill, is
reported too. Works on traces and token ids, independent of prompts, tokenizers and the meaning of outputs. Results are
the JSON of `outrider bench`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from statistics import mean, median
from typing import Any, Literal

import numpy as np

from outrider.core.cost.theory import PassCost, break_even, expected_tokens, predict
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.methods import Method
from outrider.core.methods.rules import EXACT
from outrider.core.trace import Step, Summary

SCHEMA = 1
PLAIN = "plain"
_DRAWS = 2000  # of the bootstrap
_SLOWER = 0.02  # a note is made if a contender is slower than plain decoding by more than this
# An output compared with plain decoding's: equal; different after a near-tie; wrongly different; allowed to differ.
Same = Literal["same", "near", "wrong", "other"]


@dataclass(frozen=True)
class Item:
    """Something to decode; the modality's contenders know what `content` is."""

    id: str
    task: str
    content: Any
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of its decoding alone


@dataclass(frozen=True)
class Counts:
    """What an engine that records no steps reports of one decoding."""

    passes: int  # of the target
    drafted: int
    accepted: int
    seconds: float  # without the prefill


@dataclass(frozen=True)
class Outcome:
    """One decoding of one item."""

    tokens: tuple[int, ...]
    seconds: float  # of the whole call
    steps: tuple[Step, ...] = ()  # none from other engines
    memory: int = 0  # peak bytes of the process, or of the device's memory
    counts: Counts | None = None  # from other engines, where they report them

    @property
    def decode_speed(self) -> float | None:
        """Tokens per second without the prefill; None if it was not measured."""
        if self.steps:
            return Summary.of(self.steps).tokens_per_second
        return len(self.tokens) / max(self.counts.seconds, 1e-9) if self.counts else None


@dataclass(frozen=True)
class Contender:
    """A way of decoding. If an `optional` one fails, the benchmark continues without it."""

    name: str
    run: Callable[[Item], Outcome]
    drafter: str = ""  # "": the name, without the engine's
    rule: str = EXACT.name
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of the drafter and of the rule
    lossless: bool = True
    engine: str = "outrider"
    optional: bool = False
    settle: float = 0.0  # seconds to wait before its turn, for spinning threads of others


@dataclass(frozen=True)
class Run:
    """The outcome of one turn."""

    contender: str
    item: Item
    repeat: int
    outcome: Outcome


@dataclass
class Bench:
    """Runs every contender on every item, alternating. `runs` can be read at any time, so stopping loses nothing."""

    contenders: Sequence[Contender]  # plain decoding first
    items: Sequence[Item]
    repeat: int = 1
    runs: list[Run] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # contender -> why

    def __post_init__(self) -> None:
        if not self.items:
            raise InvalidOption("there are no items to measure on")
        if self.repeat < 1:
            raise InvalidOption(f"repeat is {self.repeat}; it must be 1 or more")
        names = [contender.name for contender in self.contenders]
        if len(set(names)) < len(names) or names[:1] != [PLAIN]:
            raise InvalidOption(f"the contenders are {', '.join(names)}; names must differ, and '{PLAIN}' be first")

    @property
    def turns(self) -> int:
        """The number of names that `go` yields, warm-up included."""
        return len(self.contenders) * (1 + self.repeat * len(self.items))

    def go(self) -> Iterator[str]:
        """Warm up on the first item, then measure; yields the contender's name after each turn. The first contender
        rotates, since the machine's temperature affects speeds."""
        for contender in self.contenders:
            self._turn(contender, self.items[0])
            yield contender.name
        for number, (repeat, item) in enumerate((r, i) for r in range(self.repeat) for i in self.items):
            start = number % len(self.contenders)
            for contender in [*self.contenders[start:], *self.contenders[:start]]:
                outcome = self._turn(contender, item)
                if outcome is not None:
                    self.runs.append(Run(contender.name, item, repeat, outcome))
                yield contender.name

    def _turn(self, contender: Contender, item: Item) -> Outcome | None:
        if contender.name in self.failed:
            return None
        if contender.settle:
            time.sleep(contender.settle)
        try:
            return contender.run(item)
        except OutriderError as error:
            if not contender.optional:
                raise
            self.failed[contender.name] = str(error)
            return None

    def of(self, name: str) -> list[Run]:
        return [run for run in self.runs if run.contender == name]

    def first(self, name: str) -> dict[str, Run]:
        """A contender's first run of each item, by the item's id."""
        first: dict[str, Run] = {}
        for run in self.of(name):
            first.setdefault(run.item.id, run)
        return first

    def looping(self, loops: Callable[[Sequence[int]], bool]) -> frozenset[str]:
        """The ids of items whose plain output repeats itself, as `loops` decides."""
        return frozenset(name for name, run in self.first(PLAIN).items() if loops(run.outcome.tokens))


def sweep(
    name: str, names: Sequence[str], table: Mapping[str, Method], given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """All combinations of the option values given for the method `name` out of `names`. An option applies to all
    methods that have it, or with a prefix (`tolerance.tau`) to one; a list gives several values."""
    lists = {}
    for option, values in given.items():
        owner, _, own = option.rpartition(".")
        owners = [owner] if owner else [method for method in names if own in table[method].options]
        if not owners or (owner and owner not in names):
            raise InvalidOption(f"the option '{option}' belongs to none of {', '.join(names)}")
        if name in owners:
            lists[own] = values if isinstance(values, list) else [values]
    return [dict(zip(lists, chosen, strict=True)) for chosen in product(*lists.values())]


def bootstrap(groups: Sequence[Sequence[float]], *, draws: int = _DRAWS, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the median of medians; resamples the groups, and the values within each."""
    rng = np.random.default_rng(seed)
    inner = np.stack([np.median(rng.choice(np.asarray(group), (draws, len(group))), 1) for group in groups])
    picked = rng.integers(len(groups), size=(len(groups), draws))
    medians = np.median(np.take_along_axis(inner, picked, 0), 0)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def pooled(runs: Iterable[Run]) -> Summary:
    """The summary of several runs' steps together."""
    steps: list[Step] = []
    offset = 0
    for run in runs:
        steps += [replace(step, index=step.index + offset) for step in run.outcome.steps]
        offset += 1 + max((step.index for step in run.outcome.steps), default=0)
    return Summary.of(steps)


def figures(runs: Sequence[Run], plain: Sequence[Run], same: Mapping[str, Same] | None = None) -> dict[str, Any]:
    """A contender's figures, compared with plain decoding's runs of the same items; `same` is the comparison of outputs
    by item."""
    baseline = {(run.item.id, run.repeat): run.outcome for run in plain}
    speeds: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    decode_ratios: dict[str, list[float]] = defaultdict(list)  # without the prefill
    for run in runs:
        speed = _speed(run.outcome)
        speeds[run.item.id].append(speed)
        if base := baseline.get((run.item.id, run.repeat)):
            ratios[run.item.id].append(speed / _speed(base))
            own, reference = run.outcome.decode_speed, base.decode_speed
            if own is not None and reference is not None:
                decode_ratios[run.item.id].append(own / max(reference, 1e-9))
    tokens = sum(len(run.outcome.tokens) for run in runs)
    seconds = sum(run.outcome.seconds for run in runs)
    result: dict[str, Any] = {"prompts": len(speeds), "tokens": tokens, "seconds": seconds}
    low, middle, high = _quartiles([median(values) for values in speeds.values()])
    result |= {"tokens_per_second": middle, "tokens_per_second_low": low, "tokens_per_second_high": high}
    result["throughput"] = tokens / seconds if seconds else 0.0
    result |= {"speedup": None, "speedup_low": None, "speedup_high": None}
    if ratios:
        result["speedup"] = median(median(values) for values in ratios.values())
        result["speedup_low"], result["speedup_high"] = bootstrap(list(ratios.values()))
    result["decode_speedup"] = median(median(values) for values in decode_ratios.values()) if decode_ratios else None
    traced = any(run.outcome.steps for run in runs)
    total = pooled(runs)
    result["tokens_per_pass"] = total.tokens_per_pass if traced else None
    result["acceptance_rate"] = total.acceptance_rate if traced else None
    result["equivalents_per_token"] = total.equivalents_per_token if traced else None
    changes = [sum(step.total_variation) for run in runs for step in run.outcome.steps]
    result["total_variation_per_token"] = sum(changes) / max(tokens, 1) if traced else None
    if counted := [run.outcome.counts for run in runs if run.outcome.counts is not None]:
        drafted = sum(counts.drafted for counts in counted)
        result["tokens_per_pass"] = tokens / max(sum(counts.passes for counts in counted), 1)
        result["acceptance_rate"] = sum(counts.accepted for counts in counted) / drafted if drafted else 0.0
    compared = [same[name] for name in speeds if name in same] if same is not None else []
    for key, word in (("identical", "same"), ("near_ties", "near"), ("wrong", "wrong")):
        result[key] = compared.count(word) / len(compared) if compared else None  # type: ignore[arg-type]
    result["memory"] = max((run.outcome.memory for run in runs), default=0)
    return result


def _speed(outcome: Outcome) -> float:
    return max(len(outcome.tokens), 1) / max(outcome.seconds, 1e-9)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)) if values else (0.0, 0.0, 0.0)
    return float(low), float(middle), float(high)


def row(
    bench: Bench,
    contender: Contender,
    *,
    same: Mapping[str, Same] | None = None,
    looping: frozenset[str] = frozenset(),
    cost: PassCost | None = None,
    quality: Callable[[Sequence[Run]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A contender's row of the JSON: figures over all items, by task, and without the looping items."""
    runs, plain = bench.of(contender.name), bench.of(PLAIN)

    def part(wanted: Callable[[Item], bool]) -> dict[str, Any] | None:
        mine = [run for run in runs if wanted(run.item)]
        return figures(mine, [run for run in plain if wanted(run.item)], same) if mine else None

    drafter = contender.drafter or contender.name.removeprefix(contender.engine).strip() or PLAIN
    fields: dict[str, Any] = {"drafter": drafter, "rule": contender.rule, "options": dict(contender.options)}
    fields |= {"lossless": contender.lossless, "engine": contender.engine, **figures(runs, plain, same)}
    fields["quality"] = quality(runs) if quality else {}
    if any(run.outcome.steps for run in runs):
        total = pooled(runs)
        fields["by_position"], fields["conditional"] = list(total.by_position), list(total.conditional)
        fields["decode_tokens_per_second"] = total.tokens_per_second  # without the prefill
        fields["undrafted"] = undrafted(run.outcome.steps for run in runs)
        fields["predicted_tokens_per_second"] = predicted(runs, cost) if cost else None
        fields["note"] = note(fields, total, cost)
    tasks = sorted({run.item.task for run in runs})

    def by_task(wanted: Callable[[Item], bool]) -> dict[str, Any]:
        parts = {task: part(lambda item, task=task: item.task == task and wanted(item)) for task in tasks}  # type: ignore[misc]
        return {task: own for task, own in parts.items() if own}

    not_looping = part(lambda item: item.id not in looping)
    fields["without_looping"] = not_looping and {**not_looping, "tasks": by_task(lambda item: item.id not in looping)}
    fields["tasks"] = by_task(lambda item: True)
    return fields


def undrafted(traces: Iterable[Sequence[Step]]) -> float:
    """The share of steps without a draft, except the last of each trace, which may have had no room for one."""
    steps = [step for trace in traces for step in trace[:-1]]
    return mean(not step.drafted for step in steps) if steps else 0.0


def note(fields: Mapping[str, Any], total: Summary, cost: PassCost | None) -> str:
    """A remark on the row: that drafting was off, or slower than plain decoding and where it would break even."""
    if fields["drafter"] == PLAIN:
        return ""
    if not total.drafted:
        return "switched off throughout: no draft was predicted to pay, or none was found"
    if fields["speedup"] is None or fields["speedup"] >= 1 - _SLOWER:
        off = fields["undrafted"]
        return f"nothing drafted in {off:.0%} of steps" if off > 0.005 else ""
    text = f"slower than plain decoding: leave it off ({fields['acceptance_rate']:.0%} of drafted tokens accepted"
    passes = max(total.target_passes, 1)
    length = round(total.drafted / passes)
    if cost is not None and length:
        per_token = total.times.draft / passes / length / cost(1)
        bound = break_even(length, per_token, cost.relative(length + 1))
        if bound > 1:
            text += ", no rate breaks even"
        elif bound > fields["acceptance_rate"]:  # else the time goes elsewhere, which the theory leaves out
            text += f", a chain of {length} breaks even at {bound:.0%}"
    return text + ")"


def predicted(runs: Sequence[Run], cost: PassCost) -> float:
    """Tokens per second predicted by theory for drafts of the measured sizes, from their acceptance by position, the
    measured cost of passes, and the measured time of drafting and of the rule."""
    total = pooled(runs)
    steps = [step for run in runs for step in run.outcome.steps]
    rest = (total.times.rule + total.times.rest) / max(len(steps), 1)
    tokens = seconds = 0.0
    shapes = sorted(((len(step.drafted), depth(step)), step.times.draft) for step in steps)
    for (nodes, levels), group in groupby(shapes, key=lambda pair: pair[0]):
        drafting = [draft_seconds for _, draft_seconds in group]
        prediction = predict(expected_tokens(total.conditional, levels), nodes, cost, mean(drafting), rest)
        tokens += len(drafting) * prediction.tokens_per_pass
        seconds += len(drafting) * prediction.step
    return tokens / seconds if seconds else 0.0


def depth(step: Step) -> int:
    """The depth of a step's draft: the number of tokens on its longest path."""
    depths: list[int] = []
    for parent in step.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
