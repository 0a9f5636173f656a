"""Draft heads for published models of speech that are one stream of codes: the model reads prompts aloud, and a head
learns its distributions on what it said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from outrider.core.errors import InvalidOption
from outrider.core.training.checkpoint import begin
from outrider.core.training.dataset import Lesson, TargetTeacher
from outrider.core.training.head_training import HeadTraining
from outrider.core.training.own_outputs import check_head, divided, outputs
from outrider.core.training.recipes import Recipe, short
from outrider.core.training.request import TrainingRequest
from outrider.speech import recipes
from outrider.speech.hub.model import OneStream, load


def train_head(recipe: Recipe, request: TrainingRequest, say: Callable[[str], None]) -> Path:
    """Train a draft head for a published model; its weight file."""
    assert request.model is not None
    check_head(recipe, request, [one.name for one in recipes.RECIPES.values() if one.kind is not None])
    sp = load(request.model, device=request.place, **request.class_options)
    model = sp.published
    if not isinstance(model, OneStream):
        raise InvalidOption(
            f"{request.model} has several codebooks or stages; heads are trained for models whose codes are one "
            "stream, such as Llasa and Orpheus"
        )
    out = request.begin(recipes.SHELF.home_for(request.model, recipe.name))
    spoken = outputs(
        (out if request.out else out.parent) / "sentences.json",
        request,
        lambda prompt, seed: sp.generate(prompt, temperature=model.temperature, seed=seed).tokens[0],
        "a sentence",
        say,
    )
    training, held_out = divided([Lesson(tuple(model.read(prompt)), tuple(ids), "speech") for prompt, ids in spoken])
    name, target = short(recipe.name), model.target()
    vocabulary = torch.tensor(sorted(model.predicted), device=request.place)
    head = recipes.published_kind(recipe)(target, vocabulary=vocabulary, **request.model_options(recipe))
    head = head.to(request.place)
    if request.start is not None:
        begin(head, request.start, say)
    run = HeadTraining(
        TargetTeacher(target),
        {name: head},
        lambda epoch, share: training,
        held_out,
        out,
        tokens=request.batch_size(recipe),
        max_length=min(max(lesson.size for lesson in (*training, *held_out)), model.context - 1),
        seed=request.seed,
        losses={name: recipe.loss},
    )
    data = f"{len(spoken)} readings of {len(set(request.prompts))} prompts"
    facts = {"target": request.model, **request.facts(recipe.name, data), "batch": request.batch_size(recipe)}
    request.train_head(recipe, run, out, facts, say)
    return out / f"{name}.safetensors"
