"""Measures what a drafter goes by, the sublayers to skip or the acceptance of a tree's ranks, and keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.bench.timing import pass_cost
from outrider.core.distribution import Sampling
from outrider.core.drafters.draft_model import sequoia
from outrider.core.drafters.self_speculative.layer_search import search
from outrider.core.errors import unknown
from outrider.core.methods import DRAFTERS, Input
from outrider.core.protocol import Target
from outrider.text.drafter_inputs import named_draft_model
from outrider.text.measurements import measured

if TYPE_CHECKING:
    from outrider.text.model import TextModel

_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
Progress = Iterator[tuple[int, int, str]]
Prompts = Sequence[Sequence[int]]


def calibrate(
    model: TextModel,
    drafter: str,
    prompts: Sequence[str],
    *,
    draft_model: Any = None,
    temperature: float = 0.0,
    tokens: int = 64,
    trials: int = 100,
) -> Iterator[tuple[int, int, str]]:
    """Measure on prompts what a drafter goes by, and keep it. Yields the progress, its total, and the result so far."""
    how = {name: _HOW[kind] for name, row in DRAFTERS.items() for kind in row.inputs.values() if kind in _HOW}
    if drafter not in how:
        raise unknown("drafter to calibrate", drafter, how)
    path = measured(model, drafter)
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = [model.encode(prompt) for prompt in prompts]
    small = partial(named_draft_model, model, draft_model)
    yield from how[drafter](model, path, ids, small, temperature, tokens, trials)


def _skip(model: TextModel, path: Path, prompts: Prompts, _: Any, __: float, tokens: int, trials: int) -> Progress:
    for number, result in enumerate(search(model.target(), prompts, tokens=tokens, trials=trials), 1):
        result.save(path)
        yield number, trials, f"{len(result.skip)} sublayers, {result.speedup:.2f}x predicted"


def _acceptance(
    model: TextModel,
    path: Path,
    prompts: Prompts,
    draft_model: Callable[[], Target],
    temperature: float,
    tokens: int,
    _: int,
) -> Progress:
    small = draft_model()
    sampling = Sampling(temperature=temperature, end=model.end)
    prompt = sorted(prompts, key=len)[len(prompts) // 2]
    cost, own = pass_cost(model.target(), prompt), pass_cost(small, prompt)
    passes = tuple((width, cost.relative(width)) for width in _WIDTHS)
    counted = sequoia.measure(model.target(), small, prompts, sampling=sampling, tokens=tokens)
    for number, counts in enumerate(counted, 1):
        result = sequoia.Calibration(counts, own(1) / cost(1), passes)
        result.save(path)
        yield number, len(prompts), "acceptance " + " ".join(f"{chance:.2f}" for chance in result.acceptance[:4])


_HOW: dict[Input, Callable[..., Progress]] = {Input.SKIP: _skip, Input.ACCEPTANCE: _acceptance}
