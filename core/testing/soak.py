"""A soak test: thousands of requests through a continuous batch, with random limits, stops and cancellations. Every
finished request must equal its run alone, and the process's memory must stay flat. Independent of what a token means.
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
_CANCELS = 0.15  # share of the rounds after which a request is cancelled

# How much memory may grow between the second and the last quarter of a soak. Allocators vary by a few MiB. A leaked
# cache row or step is 4 KiB or more, so 2,000 requests, half of them between the two quarters, exceed the bound, as do
# 200 requests whose rows are 128 slots of 1 KiB.
MAX_GROWTH = 4 << 20


class SoakFailure(OutriderError):
    """The batch continued a cancelled request, or left rows or bytes behind."""


@dataclass
class SoakReport:
    """Counts of a soak."""

    requests: int
    finished: int = 0
    cancelled: int = 0
    stopped: int = 0  # of the finished: by a stop or an end token, not by their limit
    wrong: int = 0  # of the finished: different from their run alone
    rounds: int = 0
    emitted: int = 0
    reused: int = 0  # prompt tokens that were copied, not read
    cache_bytes: int = 0  # peak, prefixes included
    resident: list[int] = field(default_factory=list, repr=False)  # bytes of the process, at regular intervals

    @property
    def growth(self) -> int:
        """Bytes from the second quarter, after the warm-up, to the last."""
        quarter = max(len(self.resident) // 4, 1)
        first, last = self.resident[quarter : 2 * quarter] or self.resident, self.resident[-quarter:]
        return int(statistics.median(last) - statistics.median(first))

    @property
    def flat(self) -> bool:
        return self.growth <= MAX_GROWTH


@dataclass(frozen=True)
class SoakRequest:
    """A request of a soak."""

    prompt: Sequence[int]
    limit: int
    seed: int


def random_requests(
    vocabulary: int, seed: int = 0, max_prompt: int = 30, max_tokens: int = 40
) -> Iterator[SoakRequest]:
    """Random prompts and limits, an endless iterator; ids below 4 are left for end tokens. Every fourth prompt or so
    begins as an earlier one does."""
    rng, earlier = random.Random(seed), list[list[int]]()
    while True:
        prompt = [rng.randrange(4, vocabulary) for _ in range(rng.randint(1, max_prompt))]
        if len(earlier) == 8 and rng.random() < 0.25:
            begun = rng.choice(earlier)
            prompt[: len(begun)] = begun[: len(prompt)]
        earlier = [*earlier[-7:], prompt]
        yield SoakRequest(prompt, rng.randint(1, max_tokens), rng.randrange(1 << 30))


def decode_alone(
    request: SoakRequest,
    target: Target,
    drafter: Callable[[], Drafter] | None,
    rule: Rule,
    *,
    sampling: Sampling,
    stop: Stop | None = None,
) -> list[int]:
    """The output of a request decoded by itself."""
    steps = decode(
        target,
        None if drafter is None else drafter(),
        rule,
        [request.prompt],
        sampling=sampling,
        max_new_tokens=request.limit,
        stop=stop,
        seed=[request.seed],
        record=Record(nodes=False),
    )
    return [token for step in steps for token in step.emitted]


def soak(
    target: Callable[[], BatchedTarget],
    drafter: Callable[[], Drafter] | None,
    rule: Rule,
    requests: int,
    *,
    source: Iterator[SoakRequest],
    sampling: Sampling,
    stop: Stop | None = None,
    rows: int = 8,
    memory: int | None = None,
    prefix_memory: int | None = 1 << 20,
    check: int = 1,
    seed: int = 17,
    on_progress: Callable[[int], object] | None = None,
) -> SoakReport:
    """Decode a number of requests from `source`; every `check`-th that finishes is decoded again alone. `on_progress`
    receives the number done. Raises SoakFailure for a request that continues after its end, and for leaks."""
    rng, report = random.Random(seed), SoakReport(requests)
    limits = {"rows": rows, "memory": memory, "prefix_memory": prefix_memory}
    batch = ContinuousBatch(target(), drafter, rule, sampling=sampling, stop=stop, **limits)  # type: ignore[arg-type]
    active: dict[int, SoakRequest] = {}
    outputs: dict[int, list[int]] = {}
    added = done = 0
    while True:
        while batch.waiting < 12 and added < requests:
            request, added = next(source), added + 1
            number = batch.add(request.prompt, request.limit, seed=request.seed)
            active[number], outputs[number] = request, []
        if batch.idle:
            break
        for step in batch.round():
            if step.row not in outputs:
                raise SoakFailure(f"request {step.row} continued after it was cancelled or had finished")
            outputs[step.row] += step.emitted
            report.emitted += len(step.emitted)
            if step.finish is not None:
                tokens, request = outputs.pop(step.row), active.pop(step.row)
                report.finished += 1
                report.stopped += step.finish != "limit"
                if report.finished % check == 0:
                    expected = decode_alone(request, target(), drafter, rule, sampling=sampling, stop=stop)
                    report.wrong += tokens != expected
        report.rounds += 1
        report.cache_bytes = max(report.cache_bytes, batch.cache_bytes + batch.prefix_bytes)
        if outputs and rng.random() < _CANCELS:
            number = rng.choice(list(outputs))
            batch.cancel(number)
            del outputs[number], active[number]
            report.cancelled += 1
        if report.finished + report.cancelled > done:
            done = report.finished + report.cancelled
            if on_progress is not None:
                on_progress(done)
            while len(report.resident) < done * _SAMPLES // requests:
                gc.collect()
                report.resident.append(resident_memory())
    if outputs:
        raise SoakFailure(f"the batch is idle, but {len(outputs)} requests have not ended: {sorted(outputs)[:5]}")
    if batch.cache_bytes or batch.active:
        raise SoakFailure(f"{batch.cache_bytes:,} bytes of cache and {batch.active} rows were not freed")
    report.reused = batch.reused_tokens
    batch.close()
    return report
