"""`drafter="auto"`: who drafts, and how much, decided at every step from what rounds cost here and what was right.

Drafters, training-free ones unless others are named, guess side by side; of all their guesses, as many are tried as are
predicted to be the fastest. Costs are measured once for a model, a precision and a machine, kept in the cache folder
and noted in the trace; what is decided from them depends on nothing else but the tokens so far, so that a seed gives
the same output again. Where no guess is predicted to pay, decoding is plain. Knows targets and drafters through the
protocol, nothing of text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets.store import written
from outrider.core.cost.break_even import GLANCE, LOOK, Costs, Pace, Promise, Rest
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.combined.ensemble import MEMBERS, Ensemble, Guesses, hosted
from outrider.core.drafters.lookup.trie import Trie
from outrider.core.errors import InvalidOption, OutriderError, unknown
from outrider.core.methods import make_rule
from outrider.core.paths import cache_folder
from outrider.core.protocol import BoundedTarget, CatchUpDrafter, Drafter, Prefill, Prompts, Scores, Target
from outrider.core.rng import CounterRNG
from outrider.core.step_recorder import Record
from outrider.core.tree import Tree

_WIDTHS = (LOOK, *range(1, 10), 12, 16, 17, 24, 32)  # tokens of one row; products go by fours, sixes or eights
_NARROW = (LOOK, 1, 2, 3, 5, 9, 17)  # and of each of several
_WIDEST = 192  # tokens of all rows together, if there are more than two in each
_FEW, _MORE, _MOST = 2, 4, 64  # rows that are measured: two, and on in steps
_READ = 256  # tokens of the prompt to measure behind; fewer each, where rows are several
_ROUNDS, _SECONDS = 8, 1.5
_LONGEST = 24


class Auto(Ensemble):
    """An ensemble that tries as many guesses as should pay, and rests for a while when none did. Those who ask a model
    for their guesses are asked where the others promise little. Rows that share a pass decide together, as each is as
    wide as the widest; while they rest, nobody is asked and nobody listens."""

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
        self._catching_up = [drafter for drafter in self.drafters if isinstance(drafter, CatchUpDrafter)]
        self._lazy = len(self._catching_up) == len(self.drafters)
        self._cheap = [hosted(drafter) for drafter in self.drafters]
        self._mixed = any(self._cheap) and not all(self._cheap)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        super().begin(prefill, prompts, sampling)
        self._start(len(prompts))

    def open(self, sampling: Sampling) -> None:
        super().open(sampling)
        self._start(0)

    def _start(self, rows: int) -> None:
        self._missed: list[list[int]] = [[] for _ in range(rows)]  # what a row committed while nobody listened
        self._rest = Rest(first=2.0, most=4.0) if rows == 1 else Rest()  # a crowd's rounds are many rows' rounds
        self._pace, self._promise, self._asleep, self._spared = Pace(), Promise(), False, False
        self._going = [True] * rows
        self._ratios: dict[tuple[int, int], float] = {}

    def arrange(self, order: Sequence[int], width: int) -> None:
        super().arrange(order, width)
        self._missed = [self._missed[row] if row >= 0 else [] for row in order]

    def leave(self, row: int) -> None:
        super().leave(row)
        self._missed[row] = []

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        self._going = [left >= 0 for left in room.tolist()]
        rows = len(self._going)
        self._asleep = not self._rest.due(self.costs.glance(rows) if self._mixed else self.costs.look(rows), rows)
        if self._asleep:
            self._pace.took(1.0, 1.0)
            if rows == 1 or not self._lazy:
                self.forget()
            return Draft.empty(rows, rng.device)
        self._catch_up()
        draft = self._draft(self._guesses(room, rng), rng)
        if draft.size:
            self._rest.paid()
        else:
            self._pace.took(1.0, 1 + self._price)
            self._rest.vain(self._price)
        return draft

    def _guesses(self, room: Tensor, rng: CounterRNG) -> list[Trie]:
        """Of those who are worth asking."""
        self._spared = self._mixed
        if not self._mixed:
            return self._merged(self._ask([True] * len(self.drafters), room, rng))
        parts, rows = self._ask(self._cheap, room, rng), len(self._going)
        tries = self._merged(parts)
        _, tokens = self._best([trie.weights for trie in tries])
        total_variation = self.costs.look(rows) - self.costs.glance(rows)
        if self._pace.worth(self._promise.above(tokens), total_variation) <= 0:
            self._promise.passed()
            return tries
        self._spared = False
        more = self._ask([not cheap for cheap in self._cheap], room, rng)
        return self._merged(
            [own if cheap else other for cheap, own, other in zip(self._cheap, parts, more, strict=True)]
        )

    def _ask(self, who: Sequence[bool], room: Tensor, rng: CounterRNG) -> list[list[Guesses]]:
        """The guesses of some drafters in each row; of the others, none."""
        nothing: list[Guesses] = [([], [], [], None)] * len(room)
        return [self._guesses_of(number, room, rng) if asked else nothing for number, asked in enumerate(who)]

    @property
    def _price(self) -> float:
        """What this round's guesses cost, in plain rounds."""
        rows = len(self._going)
        return self.costs.glance(rows) if self._spared else self.costs.look(rows)

    def _catch_up(self) -> None:
        for row, tokens in enumerate(self._missed):
            if tokens:
                for drafter in self._catching_up:
                    drafter.observe_committed(row, tokens)
                self._missed[row] = []

    def counts(self, rows: Sequence[Sequence[float]]) -> list[int]:
        return [self._best(rows)[0]] * len(rows)

    def _best(self, rows: Sequence[Sequence[float]]) -> tuple[int, float]:
        """As many guesses in each row as are predicted to be worth the most, now that they have been made; and the
        tokens, a row, that are expected of them."""
        best, expected, most, tokens = 0, 1.0, self._pace.worth(1.0, 1 + self._price), 1.0
        ordered = [sorted(weights, reverse=True) for weights in rows]
        going = max(sum(self._going), 1)
        for count in range(1, min(self.nodes, max(map(len, rows))) + 1):
            tokens += sum(weights[count - 1] for weights in ordered if len(weights) >= count) / going
            worth = self._pace.worth(tokens, self._ratio(count))
            if worth > most:
                best, expected, most = count, tokens, worth
        return best, expected

    def _ratio(self, guesses: int) -> float:
        """Of a round with so many guesses in each row there is, finished ones and holes included."""
        shape = len(self._going), guesses
        if shape not in self._ratios:
            self._ratios[shape] = self.costs.ratio(*shape)
        return self._ratios[shape] - self.costs.look(shape[0]) + self._price

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        if self._asleep and self._lazy and len(self._going) > 1:
            for missed, emitted, going in zip(self._missed, verdict.rows(draft), self._going, strict=True):
                if going:
                    missed += emitted
            return
        super().observe(draft, scores, verdict, rng)
        if draft.size and any(self._going):
            pairs = zip(verdict.rows(draft), self._going, strict=True)
            tokens = sum(len(emitted) for emitted, going in pairs if going) / sum(self._going)
            self._pace.took(tokens, self._ratio(draft.size))
            if self._mixed and not self._spared:
                self._promise.kept(tokens)
            self._rest.gained(tokens - self._ratio(draft.size))


def make(
    target: Callable[[], Target],
    where: str,
    options: Mapping[str, Any],
    equipped: Callable[[str], Mapping[str, Any]],
    rows: int = 1,
) -> tuple[Auto, str]:
    """The drafter, and its costs as a trace notes them: give that text as the option `costs` to have a run again.
    `where` names the model and the machine they belong to; `equipped` has the options of a drafter by name; `rows` are
    as many as there will be side by side."""
    for given in options:
        if given not in ("costs", "drafters", "longest"):
            raise unknown("option of the drafter 'auto'", given, ("costs", "drafters", "longest"))
    longest, names = options.get("longest", _LONGEST), options.get("drafters", MEMBERS)
    if not isinstance(longest, int) or longest < 1:
        raise InvalidOption(f"longest is {longest!r}; it must be 1 or more guesses")
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidOption(f"drafters is {names!r:.60}; it must be a list of names such as ['suffix', 'eagle3']")
    members = Members(tuple(names), {name: equipped(name) for name in names})
    costs = str(options["costs"]) if "costs" in options else calibration(target, where, rows, members)
    return Auto(Costs.parse(costs), drafters=names, options=members.options, longest=longest), costs


@dataclass(frozen=True)
class Members:
    """Who guesses."""

    names: Sequence[str] = MEMBERS
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What tells measured costs of theirs from those of the usual ones."""
        return "" if self.names == MEMBERS else f"-{'+'.join(self.names)}"


def calibration(target: Callable[[], Target], where: str, rows: int = 1, members: Members = Members()) -> str:
    """What rounds of up to so many rows cost: as measured on this machine before, and what is missing now."""
    path = cache_folder() / "calibrations" / f"{where}{members.label}.txt"
    try:
        kept = path.read_text(encoding="utf-8")
        known = Costs.parse(kept).rows
    except (OSError, OutriderError):
        kept, known = "", ()
    wanted = [size for size in sizes(rows) if size not in known]
    if wanted:
        found = " ".join(_noted(size, measure(target(), size, members)) for size in wanted)
        kept = f"{kept} {found}".strip()
        with suppress(OSError):  # a cache that can't be written costs a second the next time
            written(path, kept)
    return kept


def sizes(rows: int) -> list[int]:
    """The numbers of rows that are measured for up to so many: one, and each time four times as many."""
    found = [1]
    while found[-1] < min(rows, _MOST):
        found.append(min(_MORE * found[-1], _MOST) if len(found) > 1 else _FEW)
    return found


def _noted(rows: int, costs: Mapping[int, float]) -> str:
    begins = "" if rows == 1 else f"{rows}x"
    return " ".join(f"{begins}{tokens}:{ms:.3g}" for tokens, ms in sorted(costs.items()))


class _Padded(Auto):
    """Tries so many guesses in every round, whatever they are worth: for measuring. None: it rests; GLANCE: those are
    asked who ask no model, and nothing is tried."""

    wanted: int | None = None

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        self._going, self._asleep = [left >= 0 for left in room.tolist()], self.wanted is None
        rows = len(self._going)
        if self._asleep:
            if rows == 1:
                self.forget()
            return Draft.empty(rows, rng.device)
        self._catch_up()
        who = self._cheap if self.wanted == GLANCE else [True] * len(self.drafters)
        self._draft(self._merged(self._ask(who, room, rng)), rng)
        count = max(self.wanted or 0, 0)
        if not count:
            return Draft.empty(rows, rng.device)
        tokens = torch.arange(count, device=rng.device).expand(rows, -1)
        tree = Tree.of(tuple((node + 1) // 2 - 1 for node in range(count)), rng.device)
        return Draft.guess(tokens, tree, torch.ones_like(tokens, dtype=torch.bool))


def measure(target: Target, rows: int = 1, members: Members = Members()) -> dict[int, float]:
    """Milliseconds of a whole round of so many rows, drafting and bookkeeping included, by how many tokens each row has
    in its pass (0: it guesses and tries nothing, -1: those alone do who ask no model): the best of a few, since
    whatever else the machine does can only slow one down. Many rows are measured for a second or two, and once each at
    least."""
    widths = [width for width in (_WIDTHS if rows == 1 else _NARROW) if width <= target.vocabulary]
    widths = [width for width in widths if rows == 1 or rows * width <= _WIDEST or width <= 2]
    drafter = _Padded(Costs({(1, 1): 1.0, (1, 2): 1.0}), drafters=members.names, options=members.options)
    if drafter._mixed:
        widths = [GLANCE, *widths]
    length = _READ if rows == 1 else _READ // 16
    if isinstance(target, BoundedTarget):
        length = min(length, target.context // 2)
    prompts = [[index % target.vocabulary for index in range(1, length + row % 5 + 1)] for row in range(rows)]
    best = dict.fromkeys(widths, float("inf"))
    limit = (_ROUNDS * len(widths) + 2) * (max(widths) + len(widths))
    steps = decode(
        target,
        drafter,
        make_rule("exact"),
        prompts,
        sampling=Sampling(temperature=0),
        max_new_tokens=limit,
        record=Record(nodes=False),
    )
    until = 0.0
    try:
        for _ in range(rows):  # reads the prompts
            next(steps)
        until = time.perf_counter() + _SECONDS
        for number in range(_ROUNDS):
            if number and rows > 1 and time.perf_counter() > until:
                break
            for width in widths:
                drafter.wanted = None if width == 1 else width if width == GLANCE else max(width - 1, 0)
                start = time.perf_counter()
                for _ in range(rows):
                    next(steps)
                best[width] = min(best[width], (time.perf_counter() - start) * 1e3)
    except StopIteration:
        pass
    del steps  # which frees what the target holds
    return {width: cost for width, cost in best.items() if cost < float("inf")}
