"""`drafter="auto"`: who drafts, and how far, decided at every step from what passes cost here and what was accepted.

Costs are measured once for a model, a precision and a machine, kept in the cache folder and noted in the trace; what is
decided from them depends on nothing else but the tokens so far, so that a seed gives the same output again. Where no
guess is predicted to pay, decoding is plain. Knows targets and drafters through the protocol, nothing of text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets import cache_folder, written
from outrider.core.decode import Drafter
from outrider.core.dice import Dice
from outrider.core.draft import Draft, Tree, Verdict
from outrider.core.errors import InvalidOption, OutriderError, unknown
from outrider.core.laws import Sampling
from outrider.core.methods import DRAFTERS, make_drafter
from outrider.core.policies import Best, BreakEven
from outrider.core.speed import PassCost, fit_pass_cost
from outrider.core.target import Prefill, Prompts, Scores, Target

CANDIDATES = ("prompt-lookup",)  # chains that need no training and cost next to nothing
_WIDTHS = (1, 2, 4, 8, 16, 32)
_ROUNDS = 5
_LONGEST = 16
_LOOKUP = 0.002  # what finding one guess costs, in passes: bookkeeping on the host


class Auto:
    """Several drafters of fixed guesses, tried in order; the first that has a guess drafts, as far as it should pay."""

    vocabulary: int | None = None
    needs: frozenset[str] = frozenset()
    bytes_read = 0

    def __init__(self, drafters: Sequence[Drafter], costs: PassCost, *, longest: int = _LONGEST) -> None:
        self.drafters, self.costs, self.longest = drafters, costs, longest

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        rows = len(prompts)

        def verify(tokens: int) -> float:
            return self.costs(rows * tokens) / self.costs(rows)

        self._policies = []
        for drafter in self.drafters:
            drafter.begin(prefill, prompts, sampling)
            policy = BreakEven(_LOOKUP, verify, Best(cost=_LOOKUP, verify=verify, most=self.longest))
            policy.begin(rows, torch.device("cpu"))
            self._policies.append(policy)
        self._by: int | None = None

    def propose(self, room: Tensor, dice: Dice) -> Draft:
        self._by = None
        for number, (drafter, policy) in enumerate(zip(self.drafters, self._policies, strict=True)):
            draft = drafter.propose(room, dice)
            if draft.size and bool(draft.live.any()):
                self._by = number
                return shortened(draft, policy.start())
        return Draft.empty(len(room), dice.device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, dice: Dice) -> None:
        for drafter in self.drafters:
            drafter.observe(draft, scores, verdict, dice)
        if self._by is not None:
            self._policies[self._by].learn(draft.live.sum(1).cpu(), verdict.accepted.cpu())

    def end(self) -> None:
        for drafter in self.drafters:
            drafter.end()


def shortened(draft: Draft, lengths: Tensor) -> Draft:
    """A chain of fixed guesses, of which each row keeps its first few: lengths [B]."""
    size = min(draft.size, int(lengths.max()))
    slots = torch.arange(size, device=draft.tokens.device)
    live = draft.live[:, :size] & (slots < lengths.to(slots.device)[:, None])
    if not bool(live.any()):
        return Draft.empty(draft.rows, draft.tokens.device)
    size = int(live.any(0).nonzero().max()) + 1
    return replace(draft, tokens=draft.tokens[:, :size], tree=Tree.chain(size, slots.device), live=live[:, :size])


def make(target: Callable[[], Target], where: str, options: Mapping[str, Any]) -> tuple[Auto, str]:
    """The drafter, and its costs as a trace notes them: give that text as the option `costs` to have a run again.
    `where` names the model and the machine they belong to."""
    for given in options:
        if given not in ("costs", "longest"):
            raise unknown("option of the drafter 'auto'", given, ("costs", "longest"))
    longest = options.get("longest", _LONGEST)
    if not isinstance(longest, int) or longest < 1:
        raise InvalidOption(f"longest is {longest!r}; it must be 1 or more guesses")
    costs = str(options["costs"]) if "costs" in options else calibration(target, where)
    drafters = [make_drafter(one, length=longest) for one in CANDIDATES if one in DRAFTERS]
    return Auto([one for one in drafters if one is not None], parse(costs), longest=longest), costs


def parse(costs: str) -> PassCost:
    """Costs as a trace notes them: tokens of a pass and its milliseconds, "1:14.3 2:14.5 4:14.9"."""
    try:
        pairs = [pair.split(":") for pair in costs.split()]
        return fit_pass_cost([(int(tokens), float(ms) / 1e3) for tokens, ms in pairs])
    except ValueError:
        raise InvalidOption(f"costs is {costs!r:.60}; give tokens and milliseconds such as '1:14.3 4:14.9'") from None


def calibration(target: Callable[[], Target], where: str) -> str:
    """What passes over so many tokens cost: as measured on this machine before, else now."""
    path = cache_folder() / "calibrations" / f"{where}.txt"
    try:
        costs = path.read_text(encoding="utf-8")
        parse(costs)
    except (OSError, OutriderError):
        costs = " ".join(f"{tokens}:{seconds * 1e3:.3g}" for tokens, seconds in measure(target()))
        with suppress(OSError):  # a cache that can't be written costs a second the next time
            written(path, costs)
    return costs


def measure(target: Target) -> list[tuple[int, float]]:
    """Seconds of a pass over a root and a chain of guesses: the best of a few, since whatever else the machine does can
    only slow one down."""
    prompt = [index % target.vocabulary for index in range(1, 65)]
    best = dict.fromkeys(_WIDTHS, float("inf"))
    target.begin([prompt], Sampling(temperature=0), frozenset())
    try:
        for _ in range(_ROUNDS):
            for width in _WIDTHS:
                ids = torch.tensor([prompt[: width - 1]], dtype=torch.long, device=target.device)
                tree = Tree.chain(width - 1, target.device)
                draft = Draft.guess(ids, tree, torch.ones_like(ids, dtype=torch.bool))
                start = time.perf_counter()
                target.score(draft).laws().probs.sum().item()  # waits for the device
                best[width] = min(best[width], time.perf_counter() - start)
    finally:
        target.end()
    return list(best.items())
