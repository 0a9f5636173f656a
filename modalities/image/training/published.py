"""Draft heads for published image models: the model draws images for prompts, and a head learns its distributions on
them. Images are kept, so that a run resumes with them and the next head needs none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from outrider.core.assets.store import write_atomically
from outrider.core.errors import InvalidOption
from outrider.core.training.checkpoint import begin
from outrider.core.training.dataset import Lesson
from outrider.core.training.head_training import HeadTraining
from outrider.core.training.recipes import Recipe, short
from outrider.core.training.request import TrainingRequest
from outrider.image import recipes
from outrider.image.hub.model import PublishedModel, load
from outrider.image.training.teacher import GuidedTeacher

_SHARE = 0.5  # of the time that images may take
_FEWEST, _MOST = 8, 1024  # images
_HELD = 8  # every so many images validate


def train_head(recipe: Recipe, request: TrainingRequest, say: Callable[[str], None]) -> Path:
    """Train a draft head for a published model; its weight file."""
    assert request.model is not None
    if recipe.kind is None:
        heads = [one.name for one in recipes.RECIPES.values() if one.kind is not None]
        raise InvalidOption(f"{recipe.name} is a part of our own model; for a published one train {', '.join(heads)}")
    if not request.prompts:
        raise InvalidOption("images of a published model need prompts; give --prompts FILE, one prompt a line")
    im = load(request.model, device=request.place, **request.class_options)
    network = im.published.network  # raises where heads have nothing to share
    out = request.begin(recipes.home_for(request.model, recipe.name))
    pictures = _pictures(im, request, out if request.out else out.parent, say)
    root = (im.root,)
    pictures = [(prompt, codes[:-1]) for prompt, codes in pictures]  # some classes have no position for the last code
    lessons = [Lesson(root, tuple(codes), "image") for _, codes in pictures]
    teacher = GuidedTeacher(network, lambda prompts: im.target(prompts, im.guidance))
    read = {prompt: im.read(prompt) for prompt, _ in pictures}
    teacher.prompts = {(*root, *codes): read[prompt] for prompt, codes in pictures}
    options = request.model_options(recipe)
    if "columns" in options:
        options["columns"] = im.raster.width
    name, length = short(recipe.name), 1 + len(im.raster)
    head = recipe.kind(im.published, **options).to(request.place)
    if request.start is not None:
        begin(head, request.start, say)
    training = [lesson for number, lesson in enumerate(lessons) if number % _HELD]
    per_batch = min(request.batch_size(recipe), len(training))
    run = HeadTraining(
        teacher,
        {name: head},
        lambda epoch, share: training,
        lessons[::_HELD],
        out,
        tokens=per_batch * length,
        max_length=length,
        seed=request.seed,
    )
    data = f"{len(lessons)} images of {len(read)} prompts"
    facts = {"target": request.model, "guidance": im.guidance, **request.facts(recipe.name, data), "batch": per_batch}
    request.train_head(recipe, run, out, facts, say)
    return out / f"{name}.safetensors"


def _pictures(
    im: PublishedModel, request: TrainingRequest, folder: Path, say: Callable[[str], None]
) -> list[tuple[str, list[int]]]:
    """Prompts with the codes of an image each: those kept in the folder, or else new ones."""
    prompts = list(request.prompts)
    file, key = (
        folder / "images.json",
        {"model": request.model, **request.class_options, "prompts": prompts, "seed": request.seed},
    )
    kept = json.loads(file.read_text("utf-8")) if file.is_file() and not request.fresh else {}
    if kept.get("of") == key:
        return [(prompts[at], codes) for at, codes in kept["images"]]
    began, images = time.monotonic(), list[tuple[int, list[int]]]()
    for number in count():
        spent = time.monotonic() - began > 60 * _SHARE * request.minutes
        if number >= _MOST or (spent and number >= _FEWEST):
            break
        at = number % len(prompts)
        result = im.generate(prompts[at], temperature=1.0, seed=request.seed + number)
        images.append((at, result.tokens))
        if number + 1 == _FEWEST:
            each = (time.monotonic() - began) / _FEWEST
            say(f"an image takes {each:.1f} s; drawing at most {60 * _SHARE * request.minutes / each:,.0f} of them")
    write_atomically(file, json.dumps({"of": key, "images": images}))
    return [(prompts[at], codes) for at, codes in images]
