"""Draft heads for published image models: the model draws images for prompts, and a head learns its guided
distributions on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.core.training.checkpoint import begin
from outrider.core.training.dataset import Lesson
from outrider.core.training.head_training import HeadTraining
from outrider.core.training.own_outputs import check_head, divided, outputs
from outrider.core.training.recipes import Recipe, short
from outrider.core.training.request import TrainingRequest
from outrider.image import recipes
from outrider.image.hub.model import load
from outrider.image.training.teacher import GuidedTeacher


def train_head(recipe: Recipe, request: TrainingRequest, say: Callable[[str], None]) -> Path:
    """Train a draft head for a published model; its weight file."""
    assert request.model is not None
    check_head(recipe, request, [one.name for one in recipes.RECIPES.values() if one.kind is not None])
    assert recipe.kind is not None
    im = load(request.model, device=request.place, **request.class_options)
    network = im.published.network  # raises where heads have nothing to share
    out = request.begin(recipes.SHELF.home_for(request.model, recipe.name))
    pictures = outputs(
        (out if request.out else out.parent) / "images.json",
        request,
        lambda prompt, seed: im.generate(prompt, temperature=1.0, seed=seed).tokens,
        "an image",
        say,
    )
    root = (im.root,)
    pictures = [(prompt, codes[:-1]) for prompt, codes in pictures]  # some classes have no position for the last code
    training, held_out = divided([Lesson(root, tuple(codes), "image") for _, codes in pictures])
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
    per_batch = min(request.batch_size(recipe), len(training))
    run = HeadTraining(
        teacher,
        {name: head},
        lambda epoch, share: training,
        held_out,
        out,
        tokens=per_batch * length,
        max_length=length,
        seed=request.seed,
    )
    data = f"{len(pictures)} images of {len(read)} prompts"
    facts = {"target": request.model, "guidance": im.guidance, **request.facts(recipe.name, data), "batch": per_batch}
    request.train_head(recipe, run, out, facts, say)
    return out / f"{name}.safetensors"
