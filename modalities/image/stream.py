"""Streams of images: the steps of the decoding loop, and the partial image after each.

Independent of prompts and of how targets and drafters are constructed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outrider.core.async_stream import pieces
from outrider.core.decode import decode
from outrider.core.methods.resolve import Resolved
from outrider.core.protocol import Drafter, Rule, Target
from outrider.core.step_recorder import Record
from outrider.core.trace import FinishReason, Step, Trace, conditions, finish_reason
from outrider.core.validation import copies_of
from outrider.image.grid import Grid
from outrider.image.options import Options

if TYPE_CHECKING:
    from PIL.Image import Image


class StreamModel(Protocol):
    """The part of an image model that a stream uses."""

    name: str
    dtype: str
    raster: Grid

    @property
    def root(self) -> int: ...  # the code before the first one
    @property
    def white(self) -> int: ...  # fills positions that are not decoded yet

    def target(
        self, prompt_ids: Sequence[Sequence[int]], guidance: float, unconditional: Sequence[int] | None = None
    ) -> Target: ...
    def drafter(
        self, options: Options, prompt_ids: Sequence[Sequence[int]], unconditional: Sequence[int] | None = None
    ) -> Resolved[Drafter | None]: ...
    def rule(self, options: Options) -> Resolved[Rule]: ...
    def to_images(self, grids: Tensor) -> list[Image]: ...


@dataclass(frozen=True)
class Result:
    """The image of one prompt."""

    prompt: str
    image: Image
    grid: Tensor  # [rows, columns] codes
    tokens: list[int]  # decoded tokens in raster order, end-of-row markers included
    trace: Trace
    finish_reason: FinishReason | None  # None: cancelled, and the rest of the image is white

    @property
    def images(self) -> list[Image]:
        return [self.image]

    def __repr__(self) -> str:
        return f"Result({self.prompt!r:.60}, {len(self.tokens)} codes, {self.trace.method})"


@dataclass(frozen=True)
class Piece:
    """One step of the loop, for one batch row."""

    row: int
    step: Step
    count: int  # tokens of the row so far
    finish_reason: FinishReason | None
    _stream: Stream = field(repr=False)

    def image(self) -> Image:
        """The image after this step, white where nothing is decoded yet. It is decoded on each call."""
        return self._stream.image(self.row, self.count)


class Stream(Iterator[Piece]):
    """An iterator over the pieces of a running generation; `close` stops it. `images` is the number per prompt."""

    def __init__(
        self,
        model: StreamModel,
        options: Options,
        prompts: list[str],
        prompt_ids: list[list[int]],
        unconditional: list[int] | None = None,
        images: int | None = None,
    ) -> None:
        copies = copies_of(images, "num_images_per_prompt")
        self.prompts = prompts = [prompt for prompt in prompts for _ in range(copies)]
        prompt_ids = [ids for ids in prompt_ids for _ in range(copies)]
        self._model, self._options = model, options
        drafter, rule = model.drafter(options, prompt_ids, unconditional), model.rule(options)
        self._method, self._rule, self._lossless = drafter.name, rule.name, rule.made.lossless
        self._seed = options.drawn_seed()
        self._seeds = None if images is None else [self._seed + row % copies for row in range(len(prompts))]
        self._codes: list[list[int]] = [[] for _ in prompts]
        self._reasons: list[FinishReason | None] = [None for _ in prompts]
        self._steps: list[Step] = []
        target = model.target(prompt_ids, options.guidance_scale, unconditional)
        self._weight_bytes = target.weight_bytes
        self._pieces = self._run(
            decode(
                target,
                drafter.made,
                rule.made,
                [[model.root]] * len(prompts),
                sampling=options.sampling(),
                max_new_tokens=len(model.raster),
                seed=self._seed if self._seeds is None else self._seeds,
                record=Record(entropy=options.entropy, logprobs=options.logprobs),
            )
        )

    def _run(self, steps: Iterator[Step]) -> Generator[Piece]:
        try:
            for step in steps:
                self._steps.append(step)
                codes = self._codes[step.row]
                codes += step.emitted
                reason = self._reasons[step.row] = finish_reason(step.finish)
                yield Piece(step.row, step, len(codes), reason, self)
        finally:
            if isinstance(steps, Generator):
                steps.close()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Stop the generation."""
        self._pieces.close()

    def __aiter__(self) -> AsyncGenerator[Piece, None]:
        return pieces(self)

    def grid(self, row: int, count: int | None = None) -> Tensor:
        """The codes [rows, columns] of the first `count` tokens of a batch row, white after them."""
        raster = self._model.raster
        codes = self._codes[row][:count]
        filled = [*codes, *[self._model.white] * (len(raster) - len(codes))]
        return torch.tensor(filled).view(raster.rows, raster.width)[:, : raster.columns]

    def image(self, row: int, count: int) -> Image:
        return self._model.to_images(self.grid(row, count)[None])[0]

    @property
    def trace(self) -> Trace:
        """The trace of all rows so far."""
        facts: dict[str, str | int | float | bool | None] = {"model": self._model.name, "dtype": self._model.dtype}
        return Trace(
            steps=tuple(self._steps),
            method=self._method,
            rule=self._rule,
            lossless=self._lossless,
            seed=self._seed,
            options=facts | self._options.facts(),
            **conditions(self._weight_bytes),
        )

    def _own(self, trace: Trace, row: int) -> Trace:
        own = trace.row(row)
        return own if self._seeds is None else replace(own, seed=self._seeds[row])

    @property
    def results(self) -> list[Result]:
        """The results so far, one per image."""
        trace = self.trace
        grids = torch.stack([self.grid(row) for row in range(len(self.prompts))])
        return [
            Result(prompt, image, grid, list(self._codes[row]), self._own(trace, row), self._reasons[row])
            for row, (prompt, image, grid) in enumerate(
                zip(self.prompts, self._model.to_images(grids), grids, strict=True)
            )
        ]
