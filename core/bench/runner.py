"""Measuring decoders side by side: contenders take turns on every item, and what is compared is paired.

Speeds are by the clock on the wall, from the prompt handed over to the last token, medians with quartiles; a speedup is
the median over items of ratios taken within one round, its interval a bootstrap over items, and beside it stands that
of the decoding alone, without the prompt's reading. Knows traces and token ids; nothing of prompts, tokenizers or what
an output means. What is written is the JSON of `outrider bench`.
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
_BARELY = 0.02  # a note is made of what is slower than plain by more than this
# An output beside plain's: equal; apart after a near-tie; apart though it must not be; apart, as it may be.
Same = Literal["same", "near", "wrong", "other"]


@dataclass(frozen=True)
class Item:
    """Something to decode; what `content` is, is between the modality and its contenders."""

    id: str
    task: str
    content: Any


@dataclass(frozen=True)
class Outcome:
    """One decoding of one item."""

    tokens: tuple[int, ...]
    seconds: float  # of the whole call
    steps: tuple[Step, ...] = ()  # none where a stranger did the work
    memory: int = 0  # peak bytes of the process, or of the device's memory


@dataclass(frozen=True)
class Contender:
    """One way of decoding. An optional one that fails is left out from there on, and the rest goes on without it."""

    name: str
    run: Callable[[Item], Outcome]
    rule: str = EXACT.name
    lossless: bool = True
    engine: str = "outrider"
    optional: bool = False
    settle: float = 0.0  # seconds of quiet before its turn, for threads of others that still spin


@dataclass(frozen=True)
class Run:
    """What one turn gave."""

    contender: str
    item: Item
    repeat: int
    outcome: Outcome


@dataclass
class Bench:
    """Every contender on every item, in turns. What is done so far can be read at any time: stopping loses nothing."""

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
        names = [one.name for one in self.contenders]
        if len(set(names)) < len(names) or names[:1] != [PLAIN]:
            raise InvalidOption(f"the contenders are {', '.join(names)}; each once, and '{PLAIN}' first")

    @property
    def turns(self) -> int:
        """How many `go` will yield, warm-up included, if nothing fails."""
        return len(self.contenders) * (1 + self.repeat * len(self.items))

    def go(self) -> Iterator[str]:
        """Warm up on the first item, then measure; yields the name of each contender that had its turn. Who begins
        rotates, so that nobody always runs on a warm or a tired machine."""
        for one in self.contenders:
            self._turn(one, self.items[0])
            yield one.name
        for number, (repeat, item) in enumerate((r, i) for r in range(self.repeat) for i in self.items):
            start = number % len(self.contenders)
            for one in [*self.contenders[start:], *self.contenders[:start]]:
                outcome = self._turn(one, item)
                if outcome is not None:
                    self.runs.append(Run(one.name, item, repeat, outcome))
                yield one.name

    def _turn(self, one: Contender, item: Item) -> Outcome | None:
        if one.name in self.failed:
            return None
        if one.settle:
            time.sleep(one.settle)
        try:
            return one.run(item)
        except OutriderError as error:
            if not one.optional:
                raise
            self.failed[one.name] = str(error)
            return None

    def of(self, name: str) -> list[Run]:
        return [run for run in self.runs if run.contender == name]

    def first(self, name: str) -> dict[str, Run]:
        """A contender's first run of each item, by the item's id."""
        found: dict[str, Run] = {}
        for run in self.of(name):
            found.setdefault(run.item.id, run)
        return found

    def looping(self, loops: Callable[[Sequence[int]], bool]) -> frozenset[str]:
        """The items whose plain output goes round in circles."""
        return frozenset(name for name, run in self.first(PLAIN).items() if loops(run.outcome.tokens))


def sweep(
    name: str, names: Sequence[str], table: Mapping[str, Method], given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The options of one method out of several: all combinations of what was listed. An option belongs to all that
    have it, or with a name and a dot before it (`tolerance.tau`) to one; a list of values is one after another."""
    lists = {}
    for option, values in given.items():
        owner, _, own = option.rpartition(".")
        owners = [owner] if owner else [one for one in names if own in table[one].options]
        if not owners or (owner and owner not in names):
            raise InvalidOption(f"the option '{option}' belongs to none of {', '.join(names)}")
        if name in owners:
            lists[own] = values if isinstance(values, list) else [values]
    return [dict(zip(lists, chosen, strict=True)) for chosen in product(*lists.values())]


def bootstrap(groups: Sequence[Sequence[float]], *, draws: int = _DRAWS, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the median of medians: groups are drawn again, and so is what is inside each."""
    rng = np.random.default_rng(seed)
    inner = np.stack([np.median(rng.choice(np.asarray(group), (draws, len(group))), 1) for group in groups])
    picked = rng.integers(len(groups), size=(len(groups), draws))
    medians = np.median(np.take_along_axis(inner, picked, 0), 0)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def pooled(runs: Iterable[Run]) -> Summary:
    """The metrics of several runs taken together."""
    steps: list[Step] = []
    offset = 0
    for run in runs:
        steps += [replace(step, index=step.index + offset) for step in run.outcome.steps]
        offset += 1 + max((step.index for step in run.outcome.steps), default=0)
    return Summary.of(steps)


def figures(runs: Sequence[Run], plain: Sequence[Run], same: Mapping[str, Same] | None = None) -> dict[str, Any]:
    """A contender's figures, beside plain decoding's runs of the same items; `same` says how its outputs compare."""
    beside = {(run.item.id, run.repeat): run.outcome for run in plain}
    speeds: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    behind: dict[str, list[float]] = defaultdict(list)  # the prompt: ratios of what was decoded after it
    for run in runs:
        speed = _speed(run.outcome)
        speeds[run.item.id].append(speed)
        if base := beside.get((run.item.id, run.repeat)):
            ratios[run.item.id].append(speed / _speed(base))
            if run.outcome.steps and base.steps:
                pace, plain_pace = (Summary.of(one.steps).tokens_per_second for one in (run.outcome, base))
                behind[run.item.id].append(pace / max(plain_pace, 1e-9))
    tokens = sum(len(run.outcome.tokens) for run in runs)
    seconds = sum(run.outcome.seconds for run in runs)
    found: dict[str, Any] = {"prompts": len(speeds), "tokens": tokens, "seconds": seconds}
    low, middle, high = _quartiles([median(one) for one in speeds.values()])
    found |= {"tokens_per_second": middle, "tokens_per_second_low": low, "tokens_per_second_high": high}
    found["throughput"] = tokens / seconds if seconds else 0.0
    found |= {"speedup": None, "speedup_low": None, "speedup_high": None}
    if ratios:
        found["speedup"] = median(median(one) for one in ratios.values())
        found["speedup_low"], found["speedup_high"] = bootstrap(list(ratios.values()))
    found["decode_speedup"] = median(median(one) for one in behind.values()) if behind else None
    traced = any(run.outcome.steps for run in runs)
    total = pooled(runs)
    found["tokens_per_pass"] = total.tokens_per_pass if traced else None
    found["acceptance_rate"] = total.acceptance_rate if traced else None
    found["equivalents_per_token"] = total.equivalents_per_token if traced else None
    compared = [same[name] for name in speeds if name in same] if same is not None else []
    for key, word in (("identical", "same"), ("near_ties", "near"), ("wrong", "wrong")):
        found[key] = compared.count(word) / len(compared) if compared else None  # type: ignore[arg-type]
    found["memory"] = max((run.outcome.memory for run in runs), default=0)
    return found


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
    """A contender's row of the JSON: over everything, by task, and without the items that loop."""
    runs, plain = bench.of(contender.name), bench.of(PLAIN)

    def part(wanted: Callable[[Item], bool]) -> dict[str, Any] | None:
        mine = [run for run in runs if wanted(run.item)]
        return figures(mine, [run for run in plain if wanted(run.item)], same) if mine else None

    drafter = contender.name.removeprefix(contender.engine).strip() or PLAIN
    found: dict[str, Any] = {"drafter": drafter, "rule": contender.rule, "lossless": contender.lossless}
    found |= {"engine": contender.engine, **figures(runs, plain, same)}
    found["quality"] = quality(runs) if quality else {}
    if any(run.outcome.steps for run in runs):
        total = pooled(runs)
        found["by_position"], found["conditional"] = list(total.by_position), list(total.conditional)
        found["decode_tokens_per_second"] = total.tokens_per_second  # the prompt's reading left out
        found["undrafted"] = undrafted(run.outcome.steps for run in runs)
        found["predicted_tokens_per_second"] = predicted(runs, cost) if cost else None
        found["note"] = note(found, total, cost)
    tasks = sorted({run.item.task for run in runs})

    def by_task(wanted: Callable[[Item], bool]) -> dict[str, Any]:
        each = {task: part(lambda item, task=task: item.task == task and wanted(item)) for task in tasks}  # type: ignore[misc]
        return {task: one for task, one in each.items() if one}

    sound = part(lambda item: item.id not in looping)
    found["without_looping"] = sound and {**sound, "tasks": by_task(lambda item: item.id not in looping)}
    found["tasks"] = by_task(lambda item: True)
    return found


def undrafted(traces: Iterable[Sequence[Step]]) -> float:
    """The share of steps that drafted nothing, the last of each trace aside, which may have had no room to."""
    steps = [step for trace in traces for step in trace[:-1]]
    return mean(not step.drafted for step in steps) if steps else 0.0


def note(found: Mapping[str, Any], total: Summary, cost: PassCost | None) -> str:
    """What somebody who reads the row should know: that it does not pay, and where it would."""
    if found["drafter"] == PLAIN:
        return ""
    if not total.drafted:
        return "switched off throughout: no draft was predicted to pay, or none was found"
    if found["speedup"] is None or found["speedup"] >= 1 - _BARELY:
        off = found["undrafted"]
        return f"nothing drafted in {off:.0%} of steps" if off > 0.005 else ""
    said = f"slower than plain decoding: leave it off ({found['acceptance_rate']:.0%} of drafted tokens accepted"
    calls = max(total.target_passes, 1)
    length = round(total.drafted / calls)
    if cost is not None and length:
        each = total.times.draft / calls / length / cost(1)
        bound = break_even(length, each, cost.relative(length + 1))
        said += ", no rate would pay" if bound > 1 else f", a chain of {length} breaks even at a chance of {bound:.0%}"
    return said + ")"


def predicted(runs: Sequence[Run], cost: PassCost) -> float:
    """Tokens a second that theory gives for drafts of the sizes seen, from their acceptance by position, what passes
    cost on a stopwatch, and the time taken to draft and to judge."""
    total = pooled(runs)
    steps = [step for run in runs for step in run.outcome.steps]
    rest = (total.times.rule + total.times.rest) / max(len(steps), 1)
    tokens = seconds = 0.0
    shapes = sorted(((len(step.drafted), depth(step)), step.times.draft) for step in steps)
    for (nodes, deep), group in groupby(shapes, key=lambda one: one[0]):
        drafting = [seconds for _, seconds in group]
        one = predict(expected_tokens(total.conditional, deep), nodes, cost, mean(drafting), rest)
        tokens += len(drafting) * one.tokens_per_pass
        seconds += len(drafting) * one.step
    return tokens / seconds if seconds else 0.0


def depth(step: Step) -> int:
    """How many drafted tokens the longest path of a step's draft has."""
    depths: list[int] = []
    for parent in step.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
