"""What a published model generates for prompts, for draft heads to learn from. It is kept, so that a run resumes with
it and the next head needs none. Independent of what tokens mean."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

from outrider.core.assets.store import write_atomically
from outrider.core.errors import InvalidOption
from outrider.core.training.dataset import Lesson
from outrider.core.training.recipes import Recipe
from outrider.core.training.request import TrainingRequest

Output = TypeVar("Output")  # JSON: tokens, or those of each stage
_SHARE = 0.5  # of the time that outputs may take
_FEWEST, _MOST = 8, 1024  # outputs
_HELD = 8  # every so many outputs validate


def check_head(recipe: Recipe, request: TrainingRequest, heads: Sequence[str]) -> None:
    """Refuse a recipe that is no draft head of a published model, and a request without prompts."""
    if recipe.name not in heads:
        raise InvalidOption(f"{recipe.name} is a part of our own model; for a published one train {', '.join(heads)}")
    if not request.prompts:
        raise InvalidOption("heads of a published model need prompts; give --prompts FILE, one prompt a line")


def outputs(
    file: Path,
    request: TrainingRequest,
    generate: Callable[[str, int], Output],
    what: str,
    say: Callable[[str], None],
) -> list[tuple[str, Output]]:
    """Prompts with an output each: those in the file, or else new ones, of a prompt and a seed. `what` names one in
    messages."""
    prompts = list(request.prompts)
    key = {"model": request.model, **request.class_options, "prompts": prompts, "seed": request.seed}
    kept = json.loads(file.read_text("utf-8")) if file.is_file() and not request.fresh else {}
    if kept.get("of") == key:
        return [(prompts[at], output) for at, output in kept["outputs"]]
    began, made = time.monotonic(), list[tuple[int, Output]]()
    for number in count():
        spent = time.monotonic() - began > 60 * _SHARE * request.minutes
        if number >= _MOST or (spent and number >= _FEWEST):
            break
        at = number % len(prompts)
        made.append((at, generate(prompts[at], request.seed + number)))
        if number + 1 == _FEWEST:
            each = (time.monotonic() - began) / _FEWEST
            say(f"{what} takes {each:.1f} s; making at most {60 * _SHARE * request.minutes / each:,.0f} of them")
    write_atomically(file, json.dumps({"of": key, "outputs": made}))
    return [(prompts[at], output) for at, output in made]


def divided(lessons: Sequence[Lesson]) -> tuple[list[Lesson], list[Lesson]]:
    """Lessons for training, and those that validate."""
    return [lesson for number, lesson in enumerate(lessons) if number % _HELD], list(lessons[::_HELD])
