"""The random numbers by which guesses were accepted or rejected, computed again from the trace's seeds.

They are hashes of the seed, the step and the node (`core/rng.py`), so a trace need not record them. They are given only
if they explain every decision of the trace, which those of another engine, or of a rule that decides in another way, do
not. `dicePlan` in `app/viewer/page/story.js` decides alike.
"""

from __future__ import annotations

from functools import lru_cache

from outrider.core.trace import Step, Trace

_NODES = 1024  # of a draft at most

Numbers = list[float | None]


def dice(trace: Trace) -> list[Numbers]:
    """For each step, the uniform number of each node that was tried: it accepts the node if it is below the recorded
    chance. None where no number decided."""
    unknown: list[Numbers] = [[None] * len(step.drafted) for step in trace.steps]
    if trace.options.get("temperature") == 0 or trace.options.get("engine"):
        return unknown
    found = []
    for step, none in zip(trace.steps, unknown, strict=True):
        numbers: Numbers = none
        if len(step.chance) == len(step.drafted) and any(step.tried):
            if len(step.drafted) > _NODES:
                return unknown
            thrown = _numbers(_seed(trace, step.row), step.index, len(step.drafted))
            if not _explains(thrown, step):
                return unknown
            numbers = [number if tried else None for number, tried in zip(thrown, step.tried, strict=True)]
        found.append(numbers)
    return found


def _explains(thrown: tuple[float, ...], step: Step) -> bool:
    """Whether the nodes whose number is below their chance are those that were accepted, no others being tried. The end
    of a text cuts what was accepted."""
    accepted = set(step.path)
    for node, tried in enumerate(step.tried):
        if not tried:
            continue
        parent = step.parents[node]
        if parent >= 0 and parent not in accepted and not step.finish:
            return False  # tried behind a rejected guess: the draft was judged as a whole
        if (passed := thrown[node] < step.chance[node]) != (node in accepted) and not (step.finish and passed):
            return False
    return True


def _seed(trace: Trace, row: int) -> int:
    """The seed of the row's generator."""
    from outrider.core.rng import CounterRNG

    if isinstance(trace.seed, int):
        return CounterRNG.of(trace.seed, row + 1).seeds[row] if row < 4096 else 0
    return CounterRNG.of([trace.seed[row]] if row < len(trace.seed) else [0], 1).seeds[0]


@lru_cache(maxsize=256)
def _numbers(seed: int, index: int, count: int) -> tuple[float, ...]:
    from outrider.core.rng import CounterRNG, Purpose

    rng = CounterRNG([seed])
    rng.at(index)
    rng.reserve(count)
    return tuple(rng.table(Purpose.ACCEPT)[0, :count].tolist())
