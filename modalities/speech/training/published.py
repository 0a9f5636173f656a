"""Draft heads for published models of speech: the model reads prompts aloud, and a head of each of its stages learns
the distributions of that stage on what was said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core.drafters.trained.heads import MedusaHeads
from outrider.core.engine.adapters.frames import first_turn
from outrider.core.engine.adapters.model_parts import SharingTarget
from outrider.core.errors import InvalidOption
from outrider.core.training.checkpoint import begin
from outrider.core.training.dataset import Lesson, TargetTeacher
from outrider.core.training.head_training import HeadTraining
from outrider.core.training.own_outputs import check_head, divided, outputs
from outrider.core.training.recipes import Recipe, short
from outrider.core.training.request import TrainingRequest
from outrider.speech import recipes
from outrider.speech.hub.model import HeadStage, Published, Stage, TakesHeads, load


class StageTeacher(TargetTeacher):
    """The targets of a stage as a teacher: each row is read by that of the prompt whose tokens it begins."""

    def __init__(self, target: SharingTarget, said: Sequence[tuple[Stage, Lesson]]) -> None:
        super().__init__(target)
        self._said = [(stage, lesson.prompt + lesson.answer) for stage, lesson in said]

    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        longest, parts = max(map(len, rows)), list[Mapping[str, Tensor]]()
        for row in map(tuple, rows):
            stage = next(stage for stage, whole in self._said if whole[: len(row)] == row)
            parts.append(TargetTeacher(cast(SharingTarget, stage.target())).states([row], needs))
        padded = {tap: [pad(part[tap], (0, 0, 0, longest - part[tap].shape[1])) for part in parts] for tap in parts[0]}
        dtype = self.target.network.dtype  # guidance combines states in 32 bits
        return {tap: torch.cat(each).to(dtype) for tap, each in padded.items()}


def train_head(recipe: Recipe, request: TrainingRequest, say: Callable[[str], None]) -> Path:
    """Train draft heads for the stages of a published model; the weight file of the last."""
    assert request.model is not None
    check_head(recipe, request, [one.name for one in recipes.RECIPES.values() if one.kind is not None])
    sp = load(request.model, device=request.place, **request.class_options)
    model = sp.published
    if not isinstance(model, TakesHeads):
        raise InvalidOption(f"there are no draft heads for {request.model}")
    out = request.begin(recipes.SHELF.home_for(request.model, recipe.name))
    spoken = outputs(
        (out if request.out else out.parent) / "spoken.json",
        request,
        lambda prompt, seed: sp.generate(prompt, temperature=model.temperature, seed=seed).tokens,
        "a sentence",
        say,
    )
    for name, heads in model.head_stages.items():
        minutes = request.minutes / len(model.head_stages)
        part = replace(request, recipes=(recipe.name,), out=out / name, minutes=minutes)
        file = _train(recipe, part, heads, lessons(model, name, spoken), say)
    return file


def lessons(model: Published, name: str, spoken: Sequence[tuple[str, list[list[int]]]]) -> list[tuple[Stage, Lesson]]:
    """What was said in the stages whose heads have this name, of prompts and the tokens of all their stages."""
    found = []
    for prompt, parts in spoken:
        stages = model.stages(prompt, None)
        stage: Stage = next(stages)
        for number, tokens in enumerate(parts, 1):
            if stage.heads == name:
                found.append((stage, Lesson(stage.root, tuple(tokens), "speech")))
            if number < len(parts):
                stage = stages.send(tokens)
        stages.close()
    return found


def _train(
    recipe: Recipe,
    request: TrainingRequest,
    heads: HeadStage,
    said: Sequence[tuple[Stage, Lesson]],
    say: Callable[[str], None],
) -> Path:
    assert request.out is not None and request.model is not None
    if not said:
        raise InvalidOption(f"{request.model} said nothing to learn from; give other prompts")
    out, name, target = request.begin(request.out), short(recipe.name), heads.target()
    training, held_out = divided([lesson for _, lesson in said])
    alike = all(stage.target is heads.target for stage, _ in said)
    vocabulary = 0 if heads.predicted is None else torch.tensor(sorted(heads.predicted), device=request.place)
    head = recipes.published_kind(recipe)(target, vocabulary=vocabulary, **request.model_options(recipe))
    if heads.books > 1 and isinstance(head, MedusaHeads):
        head.take_turns(first_turn(target.network.config, heads.books), heads.books)
    head = head.to(request.place)
    if request.start is not None:
        begin(head, request.start, say)
    longest = max(lesson.size for lesson in (*training, *held_out))
    run = HeadTraining(
        TargetTeacher(target) if alike else StageTeacher(target, said),
        {name: head},
        lambda epoch, share: training,
        held_out,
        out,
        tokens=request.batch_size(recipe),
        max_length=longest if heads.context is None else min(longest, heads.context - 1),
        seed=request.seed,
        losses={name: recipe.loss},
    )
    data = f"{len(said)} readings of {len(set(request.prompts))} prompts"
    facts = {"target": request.model, **request.facts(recipe.name, data), "batch": request.batch_size(recipe)}
    request.train_head(recipe, run, out, facts, say)
    return out / f"{name}.safetensors"
