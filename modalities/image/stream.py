"""A picture under way: the loop's steps, and what can be seen of the picture so far.

Knows nothing of prompts or of how targets and drafters are made.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.device import peak_memory
from outrider.core.methods.resolve import Resolved
from outrider.core.protocol import Drafter, Rule, Target
from outrider.core.step_recorder import Record
from outrider.core.trace import Finish, Step, Trace, machine, versions
from outrider.image.grid import Grid
from outrider.image.options import Options

if TYPE_CHECKING:
    from PIL.Image import Image


class Painter(Protocol):
    """What a stream asks of a model of pictures."""

    name: str
    dtype: str
    raster: Grid

    @property
    def root(self) -> int: ...  # a picture begins as if behind this code
    @property
    def white(self) -> int: ...  # stands where nothing is known yet

    def target(self, asked: Sequence[Sequence[int]], guidance: float) -> Target: ...
    def drafter(self, options: Options, asked: Sequence[Sequence[int]]) -> Resolved[Drafter | None]: ...
    def rule(self, options: Options) -> Resolved[Rule]: ...
    def pictures(self, grids: Tensor) -> list[Image]: ...


@dataclass(frozen=True)
class Result:
    """One prompt's outcome."""

    prompt: str
    image: Image
    grid: Tensor  # [rows, columns] the codes
    tokens: list[int]  # the same in raster order, as far as they were decoded
    trace: Trace
    finish: Finish | None  # None: it was broken off, and the rest of the picture is white

    @property
    def images(self) -> list[Image]:
        return [self.image]


@dataclass(frozen=True)
class Piece:
    """What one step added to one row's picture."""

    row: int
    step: Step
    count: int  # codes so far
    finish: Finish | None
    _stream: Stream = field(repr=False)

    def image(self) -> Image:
        """The picture so far, white where nothing is known yet. Worked out when it is asked for."""
        return self._stream.seen(self.row, self.count)


class Stream(Iterator[Piece]):
    """A generation under way; closing it ends it."""

    def __init__(self, model: Painter, options: Options, prompts: list[str], asked: list[list[int]]) -> None:
        self.prompts = prompts
        self._model, self._options = model, options
        drafter, rule = model.drafter(options, asked), model.rule(options)
        self._method, self._rule, self._lossless = drafter.name, rule.name, rule.made.lossless
        self._seed = options.drawn_seed()
        self._codes: list[list[int]] = [[] for _ in prompts]
        self._ends: list[Finish | None] = [None for _ in prompts]
        self._steps: list[Step] = []
        self._pieces = self._run(
            decode(
                model.target(asked, options.guidance),
                drafter.made,
                rule.made,
                [[model.root]] * len(prompts),
                sampling=options.sampling(),
                max_new_tokens=len(model.raster),
                seed=self._seed,
                record=Record(entropy=options.entropy, logprobs=options.logprobs),
            )
        )

    def _run(self, steps: Iterator[Step]) -> Generator[Piece]:
        try:
            for step in steps:
                self._steps.append(step)
                codes = self._codes[step.row]
                codes += step.emitted
                self._ends[step.row] = step.finish
                yield Piece(step.row, step, len(codes), step.finish, self)
        finally:
            if isinstance(steps, Generator):
                steps.close()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End it here."""
        self._pieces.close()

    def grid(self, row: int, count: int | None = None) -> Tensor:
        """[rows, columns] the first codes of a row's picture, white behind them."""
        raster = self._model.raster
        codes = self._codes[row][:count]
        filled = [*codes, *[self._model.white] * (len(raster) - len(codes))]
        return torch.tensor(filled).view(raster.rows, raster.width)[:, : raster.columns]

    def seen(self, row: int, count: int) -> Image:
        return self._model.pictures(self.grid(row, count)[None])[0]

    @property
    def trace(self) -> Trace:
        """Of all rows, as far as it has come."""
        facts: dict[str, str | int | float | bool | None] = {"model": self._model.name, "dtype": self._model.dtype}
        return Trace(
            steps=tuple(self._steps),
            method=self._method,
            rule=self._rule,
            lossless=self._lossless,
            seed=self._seed,
            options=facts | self._options.facts(),
            machine=machine(),
            versions=versions(),
            memory=peak_memory(),
        )

    @property
    def results(self) -> list[Result]:
        """One for each prompt, as far as it has come."""
        trace = self.trace
        grids = torch.stack([self.grid(row) for row in range(len(self.prompts))])
        return [
            Result(prompt, image, grid, list(self._codes[row]), trace.row(row), self._ends[row])
            for row, (prompt, image, grid) in enumerate(
                zip(self.prompts, self._model.pictures(grids), grids, strict=True)
            )
        ]
