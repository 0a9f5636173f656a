"""What rounds of `drafter="auto"` cost on a machine: measured once, and kept in a file. Knows targets and drafters
through the protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.assets.store import written
from outrider.core.cost.break_even import GLANCE, LOOK, Costs
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.combined.auto import Auto
from outrider.core.errors import OutriderError
from outrider.core.protocol import BoundedTarget, Drafter, Target
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact
from outrider.core.step_recorder import Record
from outrider.core.tree import Tree

_WIDTHS = (LOOK, *range(1, 10), 12, 16, 17, 24, 32)  # tokens of one row; products go by fours, sixes or eights
_NARROW = (LOOK, 1, 2, 3, 5, 9, 17)  # and of each of several
_WIDEST = 192  # tokens of all rows together, if there are more than two in each
_FEW, _MORE, _MOST = 2, 4, 64  # rows that are measured: two, and on in steps
_READ = 256  # tokens of the prompt to measure behind; fewer each, where rows are several
_ROUNDS, _SECONDS = 8, 1.5


def calibration(
    path: Path, target: Callable[[], Target], members: Callable[[], Mapping[str, Drafter]], rows: int = 1
) -> str:
    """The costs of rounds with up to this many rows: those that the file holds, and what it lacks measured now."""
    try:
        kept = path.read_text(encoding="utf-8")
        known = Costs.parse(kept).rows
    except (OSError, OutriderError):
        kept, known = "", ()
    wanted = [size for size in sizes(rows) if size not in known]
    if wanted:
        measured = " ".join(_noted(size, measure(target(), members(), size)) for size in wanted)
        kept = f"{kept} {measured}".strip()
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


def measure(target: Target, members: Mapping[str, Drafter], rows: int = 1) -> dict[int, float]:
    """Milliseconds of a whole round of so many rows, drafting and bookkeeping included, by how many tokens each row has
    in its pass (0: it guesses and tries nothing, -1: those alone do who ask no model): the best of a few, since
    whatever else the machine does can only slow one down. Many rows are measured for a second or two, and once each at
    least."""
    widths = [width for width in (_WIDTHS if rows == 1 else _NARROW) if width <= target.vocabulary]
    widths = [width for width in widths if rows == 1 or rows * width <= _WIDEST or width <= 2]
    drafter = _Padded(costs=Costs({(1, 1): 1.0, (1, 2): 1.0}), drafters=members)
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
        Exact(),
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
