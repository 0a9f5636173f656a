"""The launches of a round by part, counted on the shadow device: what a round costs a GPU's host; and its kernels,
their bytes and operations.

A replay of a recording is one launch, an upload another. The part of a launch is the step of the loop that made it;
where a round is one recording, the pass and the verdict are in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any
from unittest import mock

from outrider.core import decode as loop
from outrider.core.distribution import Sampling
from outrider.core.protocol import Drafter, Plain, Prompts, Rule, Target
from outrider.core.testing.shadow.device import ShadowDevice
from outrider.core.testing.shadow.work import Work

PARTS = ("draft", "score", "verdict", "fetch", "keep", "observe", "loop")
_FILLING = 3  # rounds in which caches of constants are filled


@dataclass(frozen=True)
class RoundCost:
    """One round: replays and other launches by part, waits and captures."""

    replays: Counter[str]
    launches: Counter[str]  # other than replays
    waits: int
    captures: int
    kernels: Counter[str] = field(default_factory=Counter)  # those of replays included
    work: Mapping[str, Work] = field(default_factory=dict)  # where the device is metered
    waits_of: Counter[str] = field(default_factory=Counter)  # of each part

    @property
    def total(self) -> int:
        return self.replays.total() + self.launches.total()


class _Parts:
    """Gives each launch to the part of the loop that is running."""

    def __init__(self, gpu: ShadowDevice) -> None:
        self.gpu, self.part, self.seen = gpu, "loop", (0, 0, 0, Work(), 0)
        self.replays, self.launches, self.kernels = Counter[str](), Counter[str](), Counter[str]()
        self.work, self.waits = dict[str, Work](), Counter[str]()
        self.captures = 0
        self.reset()

    def book(self) -> None:
        """Give what was launched since the last call to the current part."""
        counts = self.gpu.counts
        replays, launches = counts.replays - self.seen[0], counts.launches - counts.replays - self.seen[1]
        self.replays[self.part] += replays
        self.launches[self.part] += launches
        self.kernels[self.part] += launches + counts.replayed - self.seen[2]
        more = Work(counts.work.bytes - self.seen[3].bytes, counts.work.flops - self.seen[3].flops)
        self.work[self.part] = self.work.get(self.part, Work()).and_also(more)
        waits = counts.waits + counts.pageable - counts.captures  # a capture's own wait is no round's
        self.waits[self.part] += waits - self.seen[4]
        self.seen = counts.replays, counts.launches - counts.replays, counts.replayed, counts.work, waits

    def reset(self) -> RoundCost:
        """The costs since the last call."""
        self.book()
        captures, self.captures = self.gpu.counts.captures - self.captures, self.gpu.counts.captures
        replays, launches, kernels, waits = +self.replays, +self.launches, +self.kernels, +self.waits
        cost = RoundCost(replays, launches, self.waits.total(), captures, kernels, self.work, waits)
        self.replays, self.launches, self.kernels, self.waits, self.work = (
            Counter(),
            Counter(),
            Counter(),
            Counter(),
            {},
        )
        return cost

    def within(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose launches are the part's, unless it is called within another part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.part != "loop":
                return work(*args, **kwargs)
            self.book()
            self.part = part
            try:
                return work(*args, **kwargs)
            finally:
                self.book()
                self.part = "loop"

        return run


@contextmanager
def _parted(parts: _Parts, target: Target, drafter: Drafter) -> Iterator[None]:
    """While open, the loop's steps are given to their parts."""
    named: list[tuple[Any, str, str]] = [
        (drafter, "propose", "draft"),
        (drafter, "observe", "observe"),
        (target, "score", "score"),
        (target, "judge", "score"),
        (target, "keep", "keep"),
        (loop, "FetchedStep", "fetch"),
    ]
    patches = [
        mock.patch.object(owner, name, parts.within(part, getattr(owner, name)))
        for owner, name, part in named
        if hasattr(owner, name)
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def round_costs(
    gpu: ShadowDevice,
    target: Target,
    drafter: Drafter | None,
    rule: Rule,
    prompts: Prompts,
    *,
    sampling: Sampling,
    rounds: int,
) -> list[RoundCost]:
    """The costs of each round of a generation but the first ones, those of its last round left out."""
    drafter = drafter or Plain()
    parts, costs, index = _Parts(gpu), list[RoundCost](), 0
    with _parted(parts, target, drafter):
        steps = loop.decode(target, drafter, rule, prompts, sampling=sampling, max_new_tokens=1 << 16, seed=1)
        for step in steps:
            if step.index > index:
                costs.append(parts.reset())
                index = step.index
            if index == rounds + _FILLING:
                break
        steps.close()  # type: ignore[attr-defined]
    return costs[_FILLING:]


def by_part(cost: RoundCost, weight_bytes: int, bandwidth: float) -> list[dict[str, Any]]:
    """The ledger: a row for each part of a round and one for the whole round. `floor_ms`: reading the weights once at
    `bandwidth`, in bytes a second; `bytes_ms`: moving all bytes at that."""
    rows = list[dict[str, Any]]()
    for part in (*PARTS, "round"):
        whole = part == "round"
        work = Work() if whole else cost.work.get(part, Work())
        if whole:
            for each in cost.work.values():
                work = work.and_also(each)
        counts = [each.total() if whole else each[part] for each in (cost.replays, cost.launches, cost.kernels)]
        waits = cost.waits if whole else cost.waits_of[part]
        if whole or any(counts) or waits:
            rows.append(
                {
                    "part": part,
                    **dict(zip(("replays", "launches", "kernels"), counts, strict=True)),
                    "waits": waits,
                    "mbytes": work.bytes / 1e6,
                    "mflops": work.flops / 1e6,
                    "bytes_ms": work.bytes / bandwidth * 1e3,
                    "floor_ms": weight_bytes / bandwidth * 1e3 if whole else None,
                }
            )
    return rows


def typical(costs: list[RoundCost]) -> RoundCost:
    """The round with the median number of launches, of those that captured nothing."""
    steady = [cost for cost in costs if not cost.captures] or costs
    middle = median_low(cost.total for cost in steady)
    return next(cost for cost in steady if cost.total == middle)
