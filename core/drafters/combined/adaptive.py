"""One of several drafters for each row and step: by what each has been worth so far (a bandit, as in BanditSpec, arXiv
2505.15141, and arXiv 2408.08470), or by how complex the text looks.

What a drafter is worth is the tokens of a step over what the step costs, in target passes. Costs are given or read off
the weights a drafter reads, so that a seed gives the same output again; with a `clock` they are measured, and it
doesn't. Drafters that cost nothing guess in every step, and are told apart even where another's guesses were tried: a
counterfactual for free. Knows drafters through the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core.cost.break_even import Cost
from outrider.core.device import fetch, upload
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict, choose
from outrider.core.errors import Incompatible, InvalidOption, unknown
from outrider.core.protocol import Drafter, Plain, Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG

PLAIN = "plain"


class Chooser(Protocol):
    """Decides for one row. Told what each drafter was worth whenever that is known."""

    def order(self, tokens: Sequence[int]) -> list[int]: ...  # drafters by preference, for the row's text so far
    def most(self, tokens: Sequence[int]) -> int | None: ...  # how many guesses; None: as many as there are
    def learn(self, arm: int, worth: float) -> None: ...
    def note(self, arm: int) -> str: ...  # why, for the trace


@dataclass
class Bandit:
    """The highest upper bound on its worth drafts next (UCB, discounted: what was long ago counts less)."""

    arms: int
    explore: float = 0.5
    memory: float = 0.98

    def __post_init__(self) -> None:
        self._count, self._sum = [0.0] * self.arms, [0.0] * self.arms

    def order(self, tokens: Sequence[int]) -> list[int]:
        total = math.log(sum(self._count) + 1)
        bounds = [
            all_ / count + self.explore * math.sqrt(2 * total / count) if count > 1e-9 else math.inf
            for all_, count in zip(self._sum, self._count, strict=True)
        ]
        return sorted(range(self.arms), key=lambda arm: (-bounds[arm], arm))

    def most(self, tokens: Sequence[int]) -> int | None:
        return None

    def learn(self, arm: int, worth: float) -> None:
        self._count[arm] = self._count[arm] * self.memory + 1
        self._sum[arm] = self._sum[arm] * self.memory + worth

    def note(self, arm: int) -> str:
        return ""


@dataclass
class Complexity:
    """The share of different tokens among the last `window`, and the length of the text: the simpler it looks, the
    earlier in the list its drafter stands and the more is drafted, up to `longest`. It looks at nothing that happened,
    which is what it is compared for."""

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

    def most(self, tokens: Sequence[int]) -> int | None:
        return max(round(self.longest * (1 - self.complexity(tokens))), 1)

    def learn(self, arm: int, worth: float) -> None:
        """It looks at the text alone."""

    def note(self, arm: int) -> str:
        return ""


CHOOSERS: dict[str, Callable[..., Chooser]] = {"bandit": Bandit, "complexity": Complexity}


class Adaptive:
    """`drafters` are drafters or their names, "plain" among them for none, with `options` by name. `by` is a way to
    choose of CHOOSERS, with its own `settings`. `costs` is what drafting one level deeper costs, by name, in plain
    passes, and `verify(rows, tokens)` what a pass over so many tokens in each of so many rows does, in any unit."""

    def __init__(
        self,
        *,
        drafters: Sequence[Drafter | str] = ("suffix", "token-recycling"),
        options: Mapping[str, Mapping[str, Any]] | None = None,
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
        self.names = [one if isinstance(one, str) else type(one).__name__ for one in drafters]
        self.drafters = [
            by_name(one, (options or {}).get(one, {})) if isinstance(one, str) else one for one in drafters
        ]
        for name, one in zip(self.names, self.drafters, strict=True):
            if getattr(one, "alone", False):
                raise Incompatible(f"{name} reads its next guesses off its own draft, so nobody may draft in between")
        sizes = {one.vocabulary for one in self.drafters} - {None}
        if len(sizes) > 1:
            raise Incompatible(f"the drafters have vocabularies of {sizes}; they must be made for one target")
        self.vocabulary: int | None = sizes.pop() if sizes else None
        self.needs = frozenset[str]().union(*(one.needs for one in self.drafters))
        self._make = partial(CHOOSERS[by], len(self.drafters), **(settings or {}))
        self._make()  # what is wrong with the settings is said now
        self._given, self._verify, self._clock = dict(costs or {}), verify or free, clock

    @property
    def bytes_read(self) -> int:
        return sum(one.bytes_read for one in self.drafters)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._target = prefill.itself.weight_bytes if prefill.itself else 0
        self._texts = [list(prompt) for prompt in prompts]
        self._choosers = [self._make() for _ in prompts]
        self._costs = [self._given.get(name, 0.0) for name in self.names]
        self.share(len(prompts))
        self._free = [reads_nothing(one) and cost == 0 for one, cost in zip(self.drafters, self._costs, strict=True)]
        for one in self.drafters:
            one.begin(prefill, prompts, sampling)
        self._since = self._clock() if self._clock else 0.0

    def share(self, rows: int) -> None:
        """So many rows draft alike in each pass: the more there are, the more its width costs, and the sooner guesses
        don't pay."""
        self._crowd = max(rows, 1)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = room.tolist()
        caps = [chooser.most(text) for chooser, text in zip(self._choosers, self._texts, strict=True)]
        left = [one if cap is None else min(one, cap) for one, cap in zip(left, caps, strict=True)]
        drafts: list[Draft | None] = [None] * len(self.drafters)
        for arm, drafter in enumerate(self.drafters):
            if self._free[arm]:
                drafts[arm] = drafter.propose(torch.tensor(left), rng.fork(arm))
        self._trees = [None if draft is None else Guesses(draft) for draft in drafts]
        self._chosen = [self._choose(row) if one >= 0 else 0 for row, one in enumerate(left)]
        for arm, drafter in enumerate(self.drafters):
            if drafts[arm] is None:
                own = [one if one < 0 or chosen == arm else 0 for one, chosen in zip(left, self._chosen, strict=True)]
                draft, price = priced(drafter, torch.tensor(own), rng.fork(arm), self._target)
                drafts[arm] = draft
                if self.names[arm] not in self._given and price is not None:
                    self._costs[arm] = price
        made = [draft for draft in drafts if draft is not None]
        note = tuple(
            self.names[arm] + chooser.note(arm) for arm, chooser in zip(self._chosen, self._choosers, strict=True)
        )
        if len(set(self._chosen)) == 1:
            return replace(made[self._chosen[0]], note=note)
        return replace(choose(made, upload(self._chosen, rng.device)), note=note)

    def _choose(self, row: int) -> int:
        """The first choice that has a guess, or can't know before it is asked."""
        order = self._choosers[row].order(self._texts[row])
        for arm in order:
            tree = self._trees[arm]
            if tree is None or tree.sizes[row] or isinstance(self.drafters[arm], Plain):
                return arm
        return order[0]

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        now = self._clock() if self._clock else 0.0
        counts, depths = fetch(draft.live.sum(1, keepdim=True), deepest(draft)[:, None])
        for row, emitted in enumerate(verdict.rows(draft)):
            self._texts[row] += emitted
            for arm, tree in enumerate(self._trees):
                if arm == self._chosen[row]:
                    cost = self._cost(arm, int(counts[row, 0]), int(depths[row, 0]))
                    seconds = now - self._since
                    self._choosers[row].learn(arm, len(emitted) / (seconds if self._clock and seconds else cost))
                elif tree is not None and not self._clock:
                    tokens = tree.right(row, emitted) + 1  # at least; what comes behind these is not known
                    self._choosers[row].learn(arm, tokens / self._cost(arm, tree.sizes[row], 0))
        self._since = now
        for arm, one in enumerate(self.drafters):
            if any(chosen != arm for chosen in self._chosen) and (aside := getattr(one, "aside", None)):
                aside()
            one.observe(draft, scores, verdict, rng.fork(arm))

    def _cost(self, arm: int, nodes: int, depth: int) -> float:
        rows = self._crowd
        return self._verify(rows, nodes + 1) / self._verify(rows, 1) + self._costs[arm] * depth

    def end(self) -> None:
        for one in self.drafters:
            one.end()
        self._texts = []


def free(rows: int, tokens: int) -> float:
    """A pass that costs the same whatever it reads."""
    return 1.0


def priced(drafter: Drafter, room: Tensor, rng: CounterRNG, target: int) -> tuple[Draft, float | None]:
    """A draft, and what each level of it cost in passes of a target with weights of so many bytes, if it read any."""
    before = drafter.bytes_read
    draft = drafter.propose(room, rng)
    read = drafter.bytes_read - before
    return draft, read / draft.tree.depth / target if target and read and draft.tree.depth else None


def reads_nothing(drafter: Drafter) -> bool:
    """Is it one that has no weights to read, its own or the target's? Of several, if none of them has."""
    members = getattr(drafter, "drafters", None)
    if members is not None:
        return all(map(reads_nothing, members))
    return bool(getattr(type(drafter), "bytes_read", None) == 0)


class Guesses:
    """A draft on the host, to see how far it would have been right."""

    def __init__(self, draft: Draft) -> None:
        parts = fetch(draft.tokens, draft.tree.parents.expand(draft.rows, -1), draft.live)
        self._children: list[dict[tuple[int, int], int]] = []
        self.sizes: list[int] = []
        for tokens, parents, live in zip(*(part.tolist() for part in parts), strict=True):
            pairs = zip(parents, tokens, strict=True)
            self._children.append({pair: node for node, pair in enumerate(pairs) if live[node]})
            self.sizes.append(sum(live))

    def right(self, row: int, emitted: Sequence[int]) -> int:
        """How many of these tokens it had."""
        node, count = -1, 0
        for token in emitted:
            if (below := self._children[row].get((node, token))) is None:
                break
            node, count = below, count + 1
        return count


def deepest(draft: Draft) -> Tensor:
    """[B] levels of each row's live nodes."""
    if not draft.size:
        return torch.zeros(draft.rows, dtype=torch.long, device=draft.tokens.device)
    return ((draft.tree.depths + 1) * draft.live).amax(1)


def by_name(name: str, options: Mapping[str, Any]) -> Drafter:
    from outrider.core.methods import make_drafter  # which names this module

    return (None if name == PLAIN else make_drafter(name, **options)) or Plain()
