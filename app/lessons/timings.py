"""Wall-clock comparisons of lessons: several ways to decode the same inputs, interleaved, with what to doubt.

The turns and the bootstrap are those of `outrider bench` (outrider.core.bench.runner). Independent of modalities: a way
is a function from an input to a result that has `tokens` and a `trace`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.app.lessons.costs import RoundCost
from outrider.app.lessons.costs import speedup as decoding_speedup
from outrider.app.lessons.intervals import Interval, tokens_per_pass
from outrider.core.bench.other_load import Others, is_busy
from outrider.core.bench.runner import PLAIN, Bench, Contender, Item, Outcome, figures

_TOLERANCE = 1.05  # a speedup above the tokens per target pass by more than this is impossible


@dataclass(frozen=True)
class Timing:
    """One way of decoding beside plain decoding of the same inputs."""

    name: str
    speedup: Interval  # of the whole call: the median over inputs of paired ratios of seconds per token
    decoding: Interval  # the same of decoding alone, without the prompt's pass and what makes sound or pictures
    passes: Interval  # tokens per target pass
    cost: RoundCost  # of a round, the mean of all timings
    total_variation: float = 0.0  # per token; 0 under an exact rule
    timings: int = 1  # of each input

    @property
    def impossible(self) -> bool:
        """Whether the speedup exceeds what the saved target passes allow, so that something else slowed plain
        decoding down."""
        return self.speedup.value > _TOLERANCE * self.passes.value

    def verdict(self) -> str:
        """Whether it pays on these inputs, and which part of its rounds decides."""
        if self.impossible:
            return "impossible: faster than its tokens per target pass allow; time it again on a quiet machine"
        pays = self.speedup.than(1, "pays", "does not pay", "no difference shown")
        if self.passes.below(1.1):
            return f"{pays}: hardly any guess is accepted"
        said = f"{pays}: {self.passes.value:.2f} tokens for {self.cost.total:.2f} plain rounds"
        if self.speedup.above(1):
            return said
        if self.decoding.above(1):
            return f"{said}, but decoding is a small part of the call"
        costs = {"drafting": self.cost.draft, "a longer target pass": self.cost.target - 1}
        costs["the rule and bookkeeping"] = self.cost.rest
        return f"{said}, mostly {max(costs, key=lambda part: costs[part])}"


@dataclass(frozen=True)
class Comparison:
    """All ways but the first, which is plain decoding, and the load of the machine meanwhile."""

    timings: tuple[Timing, ...]
    results: Mapping[str, Sequence[Any]]  # by way: the first result of each input
    others: float  # cores that other programs kept busy, on average

    def __getitem__(self, name: str) -> Timing:
        return next(timing for timing in self.timings if timing.name == name)

    @property
    def doubts(self) -> list[str]:
        """Why the figures can't be relied on; empty if nothing speaks against them."""
        found = [
            f"{timing.name}: {timing.speedup.value:.2f}x is impossible at {timing.passes.value:.2f} tokens per target "
            "pass, so something else slowed plain decoding down"
            for timing in self.timings
            if timing.impossible
        ]
        if is_busy(self.others):
            cores = f"{self.others:.1f} of {os.cpu_count()} cores"
            found.insert(0, f"the machine was busy: other programs used {cores}, so repeat this on a quiet one")
        return found


def compare(
    ways: Mapping[str, Callable[[Any], Any]],
    inputs: Sequence[Any],
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time every way on every input `repeats` times, in turns after a warm-up; the first way is plain decoding."""
    results: dict[str, dict[str, list[Any]]] = {name: {} for name in ways}
    names = dict(zip([PLAIN, *list(ways)[1:]], ways, strict=True))  # by contender

    def contender(name: str) -> Contender:
        def run(item: Item) -> Outcome:
            start = clock()
            result = ways[names[name]](item.content)
            seconds = clock() - start
            results[names[name]].setdefault(item.id, []).append(result)
            return Outcome(tuple(result.tokens), seconds, result.trace.steps)

        return Contender(name, run)

    items = [Item(str(index), "all", content) for index, content in enumerate(inputs)]
    bench = Bench([contender(name) for name in names], items, repeats)
    others = Others()
    for _ in bench.go():
        pass
    load = others.cores()
    first = {name: [by_item[item.id][0] for item in items] for name, by_item in results.items()}
    every = {
        name: [result for item in items for result in by_item[item.id][-repeats:]] for name, by_item in results.items()
    }
    plain = every[names[PLAIN]]
    timings = []
    for name in list(names)[1:]:
        found = figures(bench.of(name), bench.of(PLAIN))
        speedup = Interval(found["speedup"], found["speedup_low"], found["speedup_high"])
        summaries = [result.trace.summary() for result in first[name]]
        variation = sum(own.total_variation for own in summaries) / max(sum(own.tokens for own in summaries), 1)
        passes, cost = tokens_per_pass(first[name]), RoundCost.of(every[name], plain)
        alone = decoding_speedup(every[name], plain)
        timings.append(Timing(name, speedup, alone, passes, cost, variation, repeats))
    return Comparison(tuple(timings), first, load)
