"""The launches of a round by part, counted on the shadow device: what a round costs a GPU's host.

A replay of a recording is one launch, an upload another. The part of a launch is the step of the loop that made it;
where a round is one recording, the pass and the verdict are in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_low
from typing import Any
from unittest import mock

from outrider.core import decode as loop
from outrider.core.distribution import Sampling
from outrider.core.protocol import Drafter, Plain, Prompts, Rule, Target
from outrider.core.testing.shadow.device import ShadowDevice

PARTS = ("draft", "score", "verdict", "fetch", "keep", "observe", "loop")
_FILLING = 3  # rounds in which caches of constants are filled


@dataclass(frozen=True)
class RoundCost:
    """One round: replays and other launches by part, waits and captures."""

    replays: Counter[str]
    launches: Counter[str]  # other than replays
    waits: int
    captures: int

    @property
    def total(self) -> int:
        return self.replays.total() + self.launches.total()


class _Parts:
    """Gives each launch to the part of the loop that is running."""

    def __init__(self, gpu: ShadowDevice) -> None:
        self.gpu, self.part, self.seen = gpu, "loop", (0, 0)
        self.replays, self.launches = Counter[str](), Counter[str]()
        self.waits = self.captures = 0
        self.reset()

    def book(self) -> None:
        """Give what was launched since the last call to the current part."""
        counts = self.gpu.counts
        replays, launches = counts.replays - self.seen[0], counts.launches - counts.replays - self.seen[1]
        self.replays[self.part] += replays
        self.launches[self.part] += launches
        self.seen = counts.replays, counts.launches - counts.replays

    def reset(self) -> RoundCost:
        """The costs since the last call."""
        self.book()
        counts = self.gpu.counts
        waits = counts.waits + counts.pageable - counts.captures  # a capture's own wait is no round's
        cost = RoundCost(+self.replays, +self.launches, waits - self.waits, counts.captures - self.captures)
        self.replays, self.launches = Counter(), Counter()
        self.waits, self.captures = waits, counts.captures
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


def typical(costs: list[RoundCost]) -> RoundCost:
    """The round with the median number of launches, of those that captured nothing."""
    steady = [cost for cost in costs if not cost.captures] or costs
    middle = median_low(cost.total for cost in steady)
    return next(cost for cost in steady if cost.total == middle)
