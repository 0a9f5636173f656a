"""The random numbers by which a step's guesses were accepted or rejected, computed again from the trace's seeds.

They are hashes of the seed, the step and the node (`core/rng.py`), so a trace need not record them. Numbers that do not
agree with the recorded decisions, as those of another engine or of a rule that judges a chain as a whole, are left out.
"""

from __future__ import annotations

from functools import lru_cache

from outrider.core.methods.rules import EXACT, TOKEN
from outrider.core.trace import Step, Trace

_NODES = 1024  # of a draft at most
_RULES = (EXACT.name, TOKEN.name)


def dice(trace: Trace, step: Step) -> list[float | None]:
    """The uniform number thrown for each node of a step, which accepts the node if it is below the recorded chance."""
    count = len(step.drafted)
    unknown: list[float | None] = [None] * count
    drawn = not all(step.fixed) and trace.rule in _RULES and len(step.chance) == count
    if not drawn or count > _NODES or trace.options.get("temperature") == 0 or trace.options.get("engine"):
        return unknown
    numbers = _numbers(_seed(trace, step.row), step.index, count)
    accepted = set(step.path)
    for node, number in enumerate(numbers):
        if step.tried[node] and (number < step.chance[node]) != (node in accepted):
            return unknown
    return [number if step.tried[node] else None for node, number in enumerate(numbers)]


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
