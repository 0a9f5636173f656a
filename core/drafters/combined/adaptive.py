"""One of several drafters for each row and step: by the reward of each so far (a bandit, as in BanditSpec, arXiv
2505.15141, and arXiv 2408.08470), or by the complexity of the text.

The reward of a drafter is the tokens of a step divided by the cost of the step in target passes. Costs are options or
derived from the weights a drafter reads, so that a seed reproduces its output; with a `clock` they are measured, and
output may differ. Drafters that read no weights draft in every step, and their reward is known even if another
drafter's draft was scored. Uses drafters through the protocol only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from outrider.core.cost.break_even import Cost
from outrider.core.device import upload
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict, select
from outrider.core.errors import Incompatible, InvalidOption, unknown
from outrider.core.protocol import (
    CombinedDrafter,
    DiscardingDrafter,
    Drafter,
    Plain,
    Prefill,
    Prompts,
    Scores,
    StandaloneDrafter,
    WeightFree,
    readings_of,
)
from outrider.core.rng import CounterRNG


class Chooser(Protocol):
    """Chooses for one row."""

    def order(self, tokens: Sequence[int]) -> list[int]: ...  # drafters by preference, given the row's tokens so far
    def max_tokens(self, tokens: Sequence[int]) -> int | None: ...  # to draft; None: no limit
    def learn(self, arm: int, reward: float) -> None: ...
    def note(self, arm: int) -> str: ...  # the reason, for the trace


@dataclass
class Bandit:
    """The drafter with the highest upper confidence bound on its reward (discounted UCB: old rewards count less)."""

    arms: int
    explore: float = 0.5
    memory: float = 0.98

    def __post_init__(self) -> None:
        self._count, self._sum = [0.0] * self.arms, [0.0] * self.arms

    def order(self, tokens: Sequence[int]) -> list[int]:
        total = math.log(sum(self._count) + 1)
        bounds = [
            summed / count + self.explore * math.sqrt(2 * total / count) if count > 1e-9 else math.inf
            for summed, count in zip(self._sum, self._count, strict=True)
        ]
        return sorted(range(self.arms), key=lambda arm: (-bounds[arm], arm))

    def max_tokens(self, tokens: Sequence[int]) -> int | None:
        return None

    def learn(self, arm: int, reward: float) -> None:
        self._count[arm] = self._count[arm] * self.memory + 1
        self._sum[arm] = self._sum[arm] * self.memory + reward

    def note(self, arm: int) -> str:
        return ""


@dataclass
class Complexity:
    """From the share of distinct tokens among the last `window` and the length of the text: the simpler the text, the
    earlier in the list the drafter, and the longer the draft, up to `longest`. A baseline that learns nothing."""

    arms: int
    window: int = 64
    long: int = 512
    longest: int = 12

    def complexity(self, tokens: Sequence[int]) -> float:
        """From 0 to 1."""
        last = tokens[-self.window :]
        return 0.7 * len(set(last)) / max(len(last), 1) + 0.3 * min(len(tokens) / self.long, 1.0)

    def order(self, tokens: Sequence[int]) -> list[int]:
        first = min(int(self.complexity(tokens) * self.arms), self.arms - 1)
        return sorted(range(self.arms), key=lambda arm: (abs(arm - first), arm))

    def max_tokens(self, tokens: Sequence[int]) -> int | None:
        return max(round(self.longest * (1 - self.complexity(tokens))), 1)

    def learn(self, arm: int, reward: float) -> None:
        """The text alone decides."""

    def note(self, arm: int) -> str:
        return ""


CHOOSERS: dict[str, Callable[..., Chooser]] = {"bandit": Bandit, "complexity": Complexity}


class Adaptive:
    """`by` names one of CHOOSERS, with its `settings`. `costs` is the cost of one more draft level by drafter, in plain
    passes, and `verify(rows, tokens)` that of a pass over this many tokens in each of this many rows, in any unit."""

    def __init__(
        self,
        *,
        drafters: Mapping[str, Drafter],
        by: str = "bandit",
        settings: Mapping[str, Any] | None = None,
        costs: Mapping[str, float] | None = None,
        verify: Cost | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if by not in CHOOSERS:
            raise unknown("way to choose", by, CHOOSERS)
        if not drafters:
            raise InvalidOption("there are no drafters to choose from; name at least one")
        self.names, self.drafters = list(drafters), list(drafters.values())
        for name, drafter in zip(self.names, self.drafters, strict=True):
            if isinstance(drafter, StandaloneDrafter):
                raise Incompatible(
                    f"{name} reads its next guesses off its own draft, so no other drafter may take a step in between"
                )
        sizes = {drafter.vocabulary for drafter in self.drafters} - {None}
        if len(sizes) > 1:
            raise Incompatible(f"the drafters have vocabularies of {sizes}; they must be made for one target")
        self.vocabulary: int | None = sizes.pop() if sizes else None
        self.needs = frozenset[str]().union(*(drafter.needs for drafter in self.drafters))
        self.readings = (_SHAPE, *dict.fromkeys(each for drafter in self.drafters for each in readings_of(drafter)))
        self._make = partial(CHOOSERS[by], len(self.drafters), **(settings or {}))
        self._make()  # refuses wrong settings now
        self._given, self._verify, self._clock = dict(costs or {}), verify or constant_cost, clock
        self._discarding = [drafter if isinstance(drafter, DiscardingDrafter) else None for drafter in self.drafters]

    @property
    def bytes_read(self) -> int:
        return sum(drafter.bytes_read for drafter in self.drafters)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._target = prefill.self_draftable.weight_bytes if prefill.self_draftable else 0
        self._texts = [list(prompt) for prompt in prompts]
        self._choosers = [self._make() for _ in prompts]
        self._costs = [self._given.get(name, 0.0) for name in self.names]
        self.set_crowd(len(prompts))
        self._free = [weight_free(each) and cost == 0 for each, cost in zip(self.drafters, self._costs, strict=True)]
        for drafter in self.drafters:
            drafter.begin(prefill, prompts, sampling)
        self._since = self._clock() if self._clock else 0.0

    def set_crowd(self, rows: int) -> None:
        """With more rows in the target pass, each drafted token costs more."""
        self._crowd = max(rows, 1)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = room.tolist()
        limits = [chooser.max_tokens(text) for chooser, text in zip(self._choosers, self._texts, strict=True)]
        left = [room_ if limit is None else min(room_, limit) for room_, limit in zip(left, limits, strict=True)]
        drafts: list[Draft | None] = [None] * len(self.drafters)
        for arm, drafter in enumerate(self.drafters):
            if self._free[arm]:
                drafts[arm] = drafter.propose(torch.tensor(left), rng.fork(arm))
        self._trees = [None if draft is None else Guesses(draft) for draft in drafts]
        self._chosen = [self._choose(row) if room_ >= 0 else 0 for row, room_ in enumerate(left)]
        for arm, drafter in enumerate(self.drafters):
            if drafts[arm] is None:
                own = [
                    room_ if room_ < 0 or chosen == arm else 0 for room_, chosen in zip(left, self._chosen, strict=True)
                ]
                draft, cost = propose_with_cost(drafter, torch.tensor(own), rng.fork(arm), self._target)
                drafts[arm] = draft
                if self.names[arm] not in self._given and cost is not None:
                    self._costs[arm] = cost
        made = [draft for draft in drafts if draft is not None]
        note = tuple(
            self.names[arm] + chooser.note(arm) for arm, chooser in zip(self._chosen, self._choosers, strict=True)
        )
        if len(set(self._chosen)) == 1:
            return replace(made[self._chosen[0]], note=note)
        return replace(select(made, upload(self._chosen, rng.device)), note=note)

    def _choose(self, row: int) -> int:
        """The most preferred drafter, except for those known to have drafted nothing."""
        order = self._choosers[row].order(self._texts[row])
        for arm in order:
            tree = self._trees[arm]
            if tree is None or tree.sizes[row] or isinstance(self.drafters[arm], Plain):
                return arm
        return order[0]

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        now = self._clock() if self._clock else 0.0
        counts, depths = scores.read(_SHAPE)
        for row, emitted in enumerate(verdict.rows(draft)):
            self._texts[row] += emitted
            for arm, tree in enumerate(self._trees):
                if arm == self._chosen[row]:
                    cost = self._cost(arm, int(counts[row, 0]), int(depths[row, 0]))
                    seconds = now - self._since
                    self._choosers[row].learn(arm, len(emitted) / (seconds if self._clock and seconds else cost))
                elif tree is not None and not self._clock:
                    tokens = tree.right(row, emitted) + 1  # a lower bound: the tokens after these are unknown
                    self._choosers[row].learn(arm, tokens / self._cost(arm, tree.sizes[row], 0))
        self._since = now
        for arm, (drafter, discarding) in enumerate(zip(self.drafters, self._discarding, strict=True)):
            if discarding is not None and any(chosen != arm for chosen in self._chosen):
                discarding.discard_draft()
            drafter.observe(draft, scores, verdict, rng.fork(arm))

    def _cost(self, arm: int, nodes: int, depth: int) -> float:
        rows = self._crowd
        return self._verify(rows, nodes + 1) / self._verify(rows, 1) + self._costs[arm] * depth

    def end(self) -> None:
        for drafter in self.drafters:
            drafter.end()
        self._texts = []


def constant_cost(rows: int, tokens: int) -> float:
    """A pass that costs the same whatever it reads."""
    return 1.0


def propose_with_cost(drafter: Drafter, room: Tensor, rng: CounterRNG, target_bytes: int) -> tuple[Draft, float | None]:
    """A draft, and the cost of each level in passes of a target with weights of this size; None if no weights were
    read."""
    before = drafter.bytes_read
    draft = drafter.propose(room, rng)
    read = drafter.bytes_read - before
    return draft, read / draft.tree.depth / target_bytes if target_bytes and read and draft.tree.depth else None


def weight_free(drafter: Drafter) -> bool:
    """Does it read no weights, its own or the target's? A combination: do all its drafters read none?"""
    if isinstance(drafter, CombinedDrafter):
        return all(map(weight_free, drafter.drafters))
    return isinstance(drafter, WeightFree)


class Guesses:
    """A draft on the host, to compare with the emitted tokens."""

    def __init__(self, draft: Draft) -> None:
        host = draft.on_host
        self._children: list[dict[tuple[int, int], int]] = []
        self.sizes: list[int] = []
        for tokens, parents, live in zip(host.tokens, host.parents, host.tried, strict=True):
            pairs = zip(parents, tokens, strict=True)
            self._children.append({pair: node for node, pair in enumerate(pairs) if live[node]})
            self.sizes.append(sum(live))

    def right(self, row: int, emitted: Sequence[int]) -> int:
        """How many of these tokens it guessed."""
        node, count = -1, 0
        for token in emitted:
            if (below := self._children[row].get((node, token))) is None:
                break
            node, count = below, count + 1
        return count


@dataclass(frozen=True)
class _Shape:
    """How many live nodes each row's draft has, and on how many levels, [B, 1] each."""

    parts: ClassVar[int] = 2

    def __call__(self, draft: Draft, scores: Scores) -> Sequence[Tensor]:
        return draft.live.sum(1, keepdim=True), deepest(draft)[:, None]


_SHAPE = _Shape()


def deepest(draft: Draft) -> Tensor:
    """[B] levels of each row's live nodes."""
    if not draft.size:
        return torch.zeros(draft.rows, dtype=torch.long, device=draft.tokens.device)
    return ((draft.tree.depths + 1) * draft.live).amax(1)
