"""A soak: thousands of requests through a continuous batch, with random limits, stops and cancels. Does every finished
row equal its solo run, and does the process's memory stay flat?

Knows the protocol; nothing of what a token means.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.core.batching import ContinuousBatch
from outrider.core.decode import Stop, decode
from outrider.core.device import resident_memory
from outrider.core.distribution import Sampling
from outrider.core.errors import OutriderError
from outrider.core.protocol import BatchedTarget, Drafter, Rule, Target
from outrider.core.step_recorder import Record

_SAMPLES = 40  # of memory
_CANCELS = 0.15  # of the rounds end with somebody giving up

# What memory may grow by between the second quarter of a soak and its last one. Allocators keep a few MiB more or less
# by chance. Anything that stayed behind of a request, its row of the cache or its steps, is 4 KiB or more: two
# thousand requests, of which half lie between the two quarters, would leave more than this bound allows, and so would
# two hundred whose rows are 128 slots of a kilobyte.
SPARE = 4 << 20


class Fault(OutriderError):
    """The batch did what it must not."""


@dataclass
class SoakReport:
    """What was seen."""

    requests: int
    finished: int = 0
    cancelled: int = 0
    stopped: int = 0  # of the finished, by a stop or an end token and not by their limit
    wrong: int = 0  # of the finished, not what they are alone
    rounds: int = 0
    emitted: int = 0
    cache_bytes: int = 0  # at most
    resident: list[int] = field(default_factory=list, repr=False)  # bytes of the process, at even distances

    @property
    def growth(self) -> int:
        """Bytes from the second quarter, when everything has been used once, to the last."""
        quarter = max(len(self.resident) // 4, 1)
        first, last = self.resident[quarter : 2 * quarter] or self.resident, self.resident[-quarter:]
        return int(statistics.median(last) - statistics.median(first))

    @property
    def flat(self) -> bool:
        return self.growth <= SPARE


@dataclass(frozen=True)
class SoakRequest:
    """A request to come."""

    prompt: Sequence[int]
    limit: int
    seed: int


def wishes(vocabulary: int, seed: int = 0, longest: int = 30, most: int = 40) -> Iterator[SoakRequest]:
    """Random prompts and limits, without end; ids below 4 are left for ends."""
    rng = random.Random(seed)
    while True:
        prompt = [rng.randrange(4, vocabulary) for _ in range(rng.randint(1, longest))]
        yield SoakRequest(prompt, rng.randint(1, most), rng.randrange(1 << 30))


def alone(
    wish: SoakRequest,
    target: Target,
    drafter: Callable[[], Drafter] | None,
    rule: Rule,
    *,
    sampling: Sampling,
    stop: Stop | None = None,
) -> list[int]:
    """What comes of a request where there is no other."""
    steps = decode(
        target,
        None if drafter is None else drafter(),
        rule,
        [wish.prompt],
        sampling=sampling,
        max_new_tokens=wish.limit,
        stop=stop,
        seed=[wish.seed],
        record=Record(nodes=False),
    )
    return [token for step in steps for token in step.emitted]


def soak(
    target: Callable[[], BatchedTarget],
    drafter: Callable[[], Drafter] | None,
    rule: Rule,
    requests: int,
    *,
    wanted: Iterator[SoakRequest],
    sampling: Sampling,
    stop: Stop | None = None,
    rows: int = 8,
    memory: int | None = None,
    check: int = 1,
    seed: int = 17,
    say: Callable[[int], object] | None = None,
) -> SoakReport:
    """So many requests; every `check`-th of those that finish is decoded once more alone. `say` is told how many are
    done. Raises Fault where something went on that had been cancelled, or where bytes were left behind."""
    rng, found = random.Random(seed), SoakReport(requests)
    batch = ContinuousBatch(target(), drafter, rule, sampling=sampling, rows=rows, memory=memory, stop=stop)
    given: dict[int, SoakRequest] = {}
    outputs: dict[int, list[int]] = {}

    asked = done = 0
    while True:
        while batch.waiting < 12 and asked < requests:
            wish, asked = next(wanted), asked + 1
            number = batch.add(wish.prompt, wish.limit, seed=wish.seed)
            given[number], outputs[number] = wish, []
        if batch.idle:
            break
        for step in batch.round():
            if step.row not in outputs:
                raise Fault(f"request {step.row} went on though it had been cancelled or was finished")
            outputs[step.row] += step.emitted
            found.emitted += len(step.emitted)
            if step.finish is not None:
                tokens, wish = outputs.pop(step.row), given.pop(step.row)
                found.finished += 1
                found.stopped += step.finish != "limit"
                if found.finished % check == 0:
                    solo = alone(wish, target(), drafter, rule, sampling=sampling, stop=stop)
                    found.wrong += tokens != solo
        found.rounds += 1
        found.cache_bytes = max(found.cache_bytes, batch.cache_bytes)
        if outputs and rng.random() < _CANCELS:
            number = rng.choice(list(outputs))
            batch.cancel(number)
            del outputs[number], given[number]
            found.cancelled += 1
        if found.finished + found.cancelled > done:
            done = found.finished + found.cancelled
            if say is not None:
                say(done)
            while len(found.resident) < done * _SAMPLES // requests:
                gc.collect()
                found.resident.append(resident_memory())
    if outputs:
        raise Fault(f"the batch is idle, and {len(outputs)} requests never came to an end: {sorted(outputs)[:5]}")
    if batch.cache_bytes or batch.active:
        raise Fault(f"{batch.cache_bytes:,} bytes of cache and {batch.active} rows are left behind")
    batch.close()
    return found
