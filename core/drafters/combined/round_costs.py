"""Measures what rounds of `drafter="auto"` cost on a machine, and keeps the result in a file. Uses targets and drafters
through the protocol only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.assets.files import write_atomically
from outrider.core.cost.break_even import DRAFTED, DRAFTED_CHEAPLY, Costs
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

_WIDTHS = (DRAFTED, *range(1, 10), 12, 16, 17, 24, 32)  # tokens of a single row; kernels work in groups of 4, 6 or 8
_NARROW = (DRAFTED, 1, 2, 3, 5, 9, 17)  # tokens per row of a batch
_WIDEST = 192  # tokens of all rows together, if rows have more than two each
_FEW, _MORE, _MOST = 2, 4, 64  # measured batches have 2 rows, then 4 times as many each, up to 64
_READ = 256  # prompt tokens of a single row; a sixteenth of it per row of a batch
_ROUNDS, _SECONDS = 8, 1.5
_ENOUGH, _LONG = 3, 6.0  # of a single row: rounds after which a slow model is measured no more, in seconds


def calibration(
    path: Path, target: Callable[[], Target], members: Callable[[], Mapping[str, Drafter]], rows: int = 1
) -> str:
    """The costs of rounds with up to `rows` rows, from the file; missing ones are measured and added to it."""
    try:
        text = path.read_text(encoding="utf-8")
        known = Costs.parse(text).rows
    except (OSError, OutriderError):
        text, known = "", ()
    wanted = [size for size in sizes(rows) if size not in known]
    if wanted:
        measured = " ".join(_noted(size, measure(target(), members(), size)) for size in wanted)
        text = f"{text} {measured}".strip()
        with suppress(OSError, OutriderError):  # a cache that can't be written costs a second the next time
            write_atomically(path, text)
    return text


def sizes(rows: int) -> list[int]:
    """The numbers of rows to measure for batches of up to `rows`: 1, 2, 8, ... up to 64."""
    measured = [1]
    while measured[-1] < min(rows, _MOST):
        measured.append(min(_MORE * measured[-1], _MOST) if len(measured) > 1 else _FEW)
    return measured


def _noted(rows: int, costs: Mapping[int, float]) -> str:
    """Costs in the notation of `Costs.parse`."""
    prefix = "" if rows == 1 else f"{rows}x"
    return " ".join(f"{prefix}{tokens}:{ms:.3g}" for tokens, ms in sorted(costs.items()))


class _Padded(Auto):
    """For measuring: drafts `wanted` guesses in every round, whatever they are worth. None: a paused round; 0 or
    DRAFTED_CHEAPLY: all drafters, or those without a model, are queried and nothing is drafted."""

    wanted: int | None = None

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        self._going, self._paused = [left >= 0 for left in room.tolist()], self.wanted is None
        rows = len(self._going)
        if self._paused:
            if rows == 1:
                self.forget()
            return Draft.empty(rows, rng.device)
        self._catch_up()
        chosen = self._cheap if self.wanted == DRAFTED_CHEAPLY else [True] * len(self.drafters)
        self._draft(self._merged(self._query(chosen, room, rng)), rng)
        count = max(self.wanted or 0, 0)
        if not count:
            return Draft.empty(rows, rng.device)
        tokens = torch.arange(count, device=rng.device).expand(rows, -1)
        tree = Tree.of(tuple((node + 1) // 2 - 1 for node in range(count)), rng.device)
        return Draft.guess(tokens, tree, torch.ones_like(tokens, dtype=torch.bool))


def measure(target: Target, members: Mapping[str, Drafter], rows: int = 1) -> dict[int, float]:
    """Milliseconds of a whole round, drafting and bookkeeping included, by tokens per row, DRAFTED and DRAFTED_CHEAPLY:
    the best of several, since other load only slows a machine down. Batches are measured at least once per width, a
    single row _ENOUGH times, and for some seconds."""
    widths = [width for width in (_WIDTHS if rows == 1 else _NARROW) if width <= target.vocabulary]
    widths = [width for width in widths if rows == 1 or rows * width <= _WIDEST or width <= 2]
    drafter = _Padded(costs=Costs({(1, 1): 1.0, (1, 2): 1.0}), drafters=members)
    if drafter._mixed:
        widths = [DRAFTED_CHEAPLY, *widths]
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
    try:
        for _ in range(rows):  # reads the prompts
            next(steps)
        least, seconds = (_ENOUGH, _LONG) if rows == 1 else (1, _SECONDS)
        until = time.perf_counter() + seconds
        for number in range(_ROUNDS):
            if number >= least and time.perf_counter() > until:
                break
            for width in widths:
                drafter.wanted = None if width == 1 else width if width == DRAFTED_CHEAPLY else max(width - 1, 0)
                start = time.perf_counter()
                for _ in range(rows):
                    next(steps)
                best[width] = min(best[width], (time.perf_counter() - start) * 1e3)
    except StopIteration:
        pass
    del steps  # frees the target's cache
    return {width: cost for width, cost in best.items() if cost < float("inf")}
