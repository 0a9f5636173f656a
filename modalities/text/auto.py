"""`drafter="auto"`: who drafts, and how much, decided at every step from what rounds cost here and what was right.

Training-free drafters guess side by side; of all their guesses, as many are tried as are predicted to be the fastest.
Costs are measured once for a model, a precision and a machine, kept in the cache folder and noted in the trace; what is
decided from them depends on nothing else but the tokens so far, so that a seed gives the same output again. Where no
guess is predicted to pay, decoding is plain. Knows targets and drafters through the protocol, nothing of text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.assets import cache_folder, written
from outrider.core.decode import Drafter, decode
from outrider.core.dice import Dice
from outrider.core.draft import Draft, Tree
from outrider.core.drafters.ensemble import MEMBERS, Ensemble
from outrider.core.errors import InvalidOption, OutriderError, unknown
from outrider.core.laws import Sampling
from outrider.core.methods import make_rule
from outrider.core.record import Record
from outrider.core.target import Prefill, Prompts, Target

_WIDTHS = (1, 2, 3, 5, 8, 12, 16, 24, 32)
_ROUNDS = 5
_LONGEST = 24
_IDLE = 4  # steps without a guess that pays, before guessing rests
_REST, _LONGEST_REST = 8, 64  # steps that it rests, twice as many each time


class Costs:
    """What a round over so many tokens takes, in any unit: measured at some widths, straight lines between."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        points = sorted(measured)
        self._widths = [width for width, _ in points]
        self._times = np.maximum.accumulate([cost for _, cost in points]).tolist()
        if len(set(self._widths)) < 2 or self._widths[0] < 1 or min(self._times) <= 0:
            raise InvalidOption("costs need at least two different numbers of tokens, and times above 0")

    def __call__(self, tokens: int) -> float:
        widths, times = self._widths, self._times
        if tokens <= widths[-1]:
            return float(np.interp(tokens, widths, times))
        slope = (times[-1] - times[-2]) / (widths[-1] - widths[-2])
        return float(times[-1] + slope * (tokens - widths[-1]))


class Auto(Ensemble):
    """An ensemble that tries as many guesses as should pay, and rests for a while when none did."""

    def __init__(
        self,
        costs: Costs,
        *,
        drafters: Sequence[Drafter | str] = MEMBERS,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        longest: int = _LONGEST,
    ) -> None:
        super().__init__(drafters=drafters, options=options, nodes=longest)
        self.costs = costs

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        super().begin(prefill, prompts, sampling)
        self._crowd = 0
        self.share(len(prompts))
        self._idle, self._rest, self._left = 0, _REST, 0

    def share(self, rows: int) -> None:
        """So many rows draft alike in each pass: the more there are, the sooner a guess doesn't pay."""
        if rows != self._crowd:
            self._crowd = rows
            self._ratios = [self.costs(rows * (count + 1)) / self.costs(rows) for count in range(self.nodes + 1)]

    def wanted(self, weights: Sequence[float]) -> int:
        best, fastest, tokens = 0, 1.0, 1.0
        for count, weight in enumerate(sorted(weights, reverse=True)[: self.nodes], 1):
            tokens += weight
            if tokens / self._ratios[count] > fastest:
                best, fastest = count, tokens / self._ratios[count]
        return best

    def propose(self, room: Tensor, dice: Dice) -> Draft:
        if self._left > 0:
            self._left -= 1
            self.forget()
            return Draft.empty(len(room), dice.device)
        draft = super().propose(room, dice)
        self._idle = 0 if draft.size else self._idle + 1
        if draft.size:
            self._rest = _REST
        elif self._idle >= _IDLE:
            self._left, self._rest, self._idle = self._rest, min(2 * self._rest, _LONGEST_REST), 0
        return draft


def make(
    target: Callable[[], Target], where: str, options: Mapping[str, Any], members: Mapping[str, Mapping[str, Any]] = {}
) -> tuple[Auto, str]:
    """The drafter, and its costs as a trace notes them: give that text as the option `costs` to have a run again.
    `where` names the model and the machine they belong to; `members` are options of the drafters, by their names."""
    for given in options:
        if given not in ("costs", "longest"):
            raise unknown("option of the drafter 'auto'", given, ("costs", "longest"))
    longest = options.get("longest", _LONGEST)
    if not isinstance(longest, int) or longest < 1:
        raise InvalidOption(f"longest is {longest!r}; it must be 1 or more guesses")
    costs = str(options["costs"]) if "costs" in options else calibration(target, where)
    return Auto(parse(costs), options=members, longest=longest), costs


def parse(costs: str) -> Costs:
    """Costs as a trace notes them: tokens of a round and its milliseconds, "1:14.3 2:14.5 4:14.9"."""
    try:
        pairs = [pair.split(":") for pair in costs.split()]
        measured = [(int(tokens), float(ms)) for tokens, ms in pairs]
    except ValueError:
        raise InvalidOption(f"costs is {costs!r:.60}; give tokens and milliseconds such as '1:14.3 4:14.9'") from None
    return Costs(measured)


def calibration(target: Callable[[], Target], where: str) -> str:
    """What rounds over so many tokens cost: as measured on this machine before, else now."""
    path = cache_folder() / "calibrations" / f"{where}.txt"
    try:
        costs = path.read_text(encoding="utf-8")
        parse(costs)
    except (OSError, OutriderError):
        costs = " ".join(f"{tokens}:{ms:.3g}" for tokens, ms in measure(target()))
        with suppress(OSError):  # a cache that can't be written costs a second the next time
            written(path, costs)
    return costs


class _Padded(Ensemble):
    """Tries so many guesses in every step, whatever they are worth: for measuring."""

    count = 0

    def propose(self, room: Tensor, dice: Dice) -> Draft:
        if not self.count:
            self.forget()
            return Draft.empty(len(room), dice.device)
        super().propose(room, dice)
        tokens = torch.arange(self.count, device=dice.device)[None]
        tree = Tree.of(tuple((node + 1) // 2 - 1 for node in range(self.count)), dice.device)
        return Draft.guess(tokens, tree, torch.ones_like(tokens, dtype=torch.bool))


def measure(target: Target) -> list[tuple[int, float]]:
    """Milliseconds of a whole round, drafting and bookkeeping included, with so many tokens in its pass: the best of a
    few, since whatever else the machine does can only slow one down."""
    prompt = [index % target.vocabulary for index in range(1, 65)]
    widths = [width for width in _WIDTHS if width <= target.vocabulary]
    best = dict.fromkeys(widths, float("inf"))
    drafter = _Padded()
    limit = (_ROUNDS * len(widths) + 2) * (len(widths) + 8)
    steps = decode(
        target,
        drafter,
        make_rule("exact"),
        [prompt],
        sampling=Sampling(temperature=0),
        limit=limit,
        record=Record(nodes=False),
    )
    next(steps)  # reads the prompt
    for _ in range(_ROUNDS):
        for width in widths:
            drafter.count = width - 1
            start = time.perf_counter()
            step = next(steps, None)
            if step is None:
                break
            best[width] = min(best[width], (time.perf_counter() - start) * 1e3)
    del steps  # which frees what the target holds
    return [(width, cost) for width, cost in best.items() if cost < float("inf")]
