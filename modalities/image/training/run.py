"""`outrider train image-...`: trains each recipe of outrider.image.recipes, from the training set to a weight file.

The data are in outrider.image.training.data, losses and batches in outrider.image.training.objectives, and the training
loop in outrider.core.training.trainer; this module combines them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from outrider.core.errors import Incompatible
from outrider.core.training.checkpoint import begin, save
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.model_training import ModelTraining, Save, TrainingTask
from outrider.core.training.recipes import Recipe, short
from outrider.core.training.request import TrainingRequest
from outrider.image import recipes
from outrider.image.known_names import KnownNames
from outrider.image.layout_planner import LayoutPlanner, decoder
from outrider.image.prompt_encoder import PromptEncoder, most_common_words
from outrider.image.recipes import CLASSIFIER, MODEL, home
from outrider.image.token_model import TokenModel
from outrider.image.tokenizer import Layout, Tokenizer
from outrider.image.training.classifier import train_classifier
from outrider.image.training.data import SIZE, TRAIN, Pictures, load_or_render
from outrider.image.training.objectives import (
    VALIDATION_SIZE,
    ImitationObjective,
    ImitationTask,
    PlanObjective,
    PlanTask,
    TokensObjective,
    TokensTask,
)
from outrider.image.training.tokenizer_objective import CodecObjective, CodecTask

WORDS = 2800  # the vocabulary size of prompts
GUIDANCE = 3.0  # at which drafters are trained


def train(request: TrainingRequest, say: Callable[[str], None] = print) -> list[Path]:
    """Train the request's recipes in order and return their weight files."""
    wanted = [recipes.recipe(name) for name in request.recipes]
    if request.model is not None:
        from outrider.image.training.published import train_head

        return [train_head(recipe, request, say) for recipe in wanted]
    pictures = load_or_render(request.data, say)
    say(pictures.describe())
    return [_train(recipe, pictures, request, say) for recipe in wanted]


@dataclass(frozen=True)
class _Job:
    """A model with its task, its weight file and the function that writes it."""

    model: nn.Module
    task: TrainingTask
    file: Path
    save: Save


@dataclass(frozen=True)
class _Context:
    """A recipe with the data and settings to train it with."""

    recipe: Recipe
    pictures: Pictures
    out: Path
    batch: int
    seed: int
    device: torch.device
    options: Mapping[str, Any]
    start: Path | None
    hold_out: bool
    say: Callable[[str], None]

    @property
    def file(self) -> Path:
        return self.out / f"{short(self.recipe.name)}.safetensors"

    def begin(self, model: DraftHead) -> None:
        """Load the weights to start from, if any were given, into the model."""
        if self.start is not None:
            begin(model, self.start, self.say)

    def saver(self, part: str) -> Save:
        """A function that writes an attribute of the trained objective to the weight file."""

        def save_part(objective: nn.Module, provenance: Mapping[str, Any]) -> None:
            save(cast(DraftHead, getattr(objective, part)), self.file, {"target": MODEL, **provenance})

        return save_part

    def tokens_task(self, codec: Tokenizer, prompt_encoder: PromptEncoder) -> TokensTask:
        return TokensTask(
            self.pictures, codec, prompt_encoder, self.batch, self.seed, self.device, hold_out=self.hold_out
        )


def _train(recipe: Recipe, pictures: Pictures, request: TrainingRequest, say: Callable[[str], None]) -> Path:
    device, out = request.place, request.begin(home(recipe.name))
    batch, options = request.batch_size(recipe), request.model_options(recipe)
    context = _Context(
        recipe, pictures, out, batch, request.seed, device, options, request.start, request.hold_out, say
    )
    facts = {**request.facts(recipe.name, pictures.describe()), "batch": batch, "hold_out": request.hold_out}
    if recipe.kind is not None:
        return _train_head(context, request, facts)
    if recipe.name == CLASSIFIER:
        return _train_classifier(context, facts)
    job = _JOBS[recipe.name](context)
    training = ModelTraining(recipe.name, job.model.to(device), job.task, job.save)
    request.train_model(recipe, training, out, facts, say)
    return job.file


# ---- models trained on images


def _tokenizer(context: _Context) -> _Job:
    def save_codec(objective: nn.Module, provenance: Mapping[str, Any]) -> None:
        cast(CodecObjective, objective).codec.save(context.out, provenance)

    task = CodecTask(context.pictures, context.batch, context.seed, context.device)
    file = context.out / "diffusion_pytorch_model.safetensors"
    start = context.start and (context.start.parent if context.start.is_file() else context.start)
    only_decoder = context.recipe.name == recipes.DECODER
    codec = recipes.tokenizer(start) if start or only_decoder else Tokenizer(Layout(**context.options))
    return _Job(CodecObjective(codec, only_decoder=only_decoder), task, file, save_codec)


def _plan(context: _Context) -> _Job:
    codec, prompt_encoder = _encoders(context)
    model = LayoutPlanner(
        codes=prompt_encoder.codes,
        styles=prompt_encoder.styles,
        words=prompt_encoder.words,
        **{"levels": codec.layout.levels, "side": SIZE // codec.factor, **context.options},
    )
    context.begin(model)
    task = PlanTask(context.tokens_task(codec, prompt_encoder))
    return _Job(PlanObjective(model), task, context.file, context.saver("plan"))


def _tokens(context: _Context) -> _Job:
    codec, prompt_encoder = _encoders(context)
    plan = recipes.plan() if context.options.get("plan") else None
    options = {**context.options}
    if plan is not None:
        options |= {"levels": plan.levels, "plan": plan.config["channels"]}
    model = _token_model(prompt_encoder, options)
    context.begin(model)
    if plan is not None and model.teller is not None:
        try:
            model.teller.planner.load_state_dict(plan.state_dict())
        except RuntimeError:
            raise Incompatible(
                "the layout planner was trained on another set of images; train image-plan again"
            ) from None
    task, pictures = context.tokens_task(codec, prompt_encoder), context.pictures
    learned = ((pictures.names[index], int(pictures.style[index])) for index in task.batches.training)
    KnownNames.of(pictures.styles, learned).save(recipes.names_file(context.file))
    return _Job(TokensObjective(model), task, context.file, context.saver("tokens"))


def _draft(context: _Context) -> _Job:
    codec, teacher = recipes.tokenizer().to(context.device), recipes.tokens().to(context.device)
    model = _token_model(teacher.prompt_encoder, context.options, teacher)
    context.begin(model)
    tokens_task = context.tokens_task(codec, teacher.prompt_encoder)
    task = ImitationTask(tokens_task, teacher.network(torch.bfloat16, context.device), GUIDANCE)
    return _Job(ImitationObjective(model, teacher), task, context.file, context.saver("tokens"))


def _token_model(encoder: PromptEncoder, options: Mapping[str, Any], target: TokenModel | None = None) -> TokenModel:
    return TokenModel(target, codes=encoder.codes, styles=encoder.styles, words=encoder.words, **options)


def _encoders(context: _Context) -> tuple[Tokenizer, PromptEncoder]:
    """The tokenizer, and the prompt encoder of the training images' styles and words."""
    codec = recipes.tokenizer().to(context.device)
    return codec, PromptEncoder(codec.layout.codes, context.pictures.styles, _words(context.pictures, context.hold_out))


_JOBS: Mapping[str, Callable[[_Context], _Job]] = {
    "image-tokenizer": _tokenizer,
    recipes.DECODER: _tokenizer,
    "image-plan": _plan,
    "image-tokens": _tokens,
    recipes.DRAFT: _draft,
}


# ---- the classifier, and draft heads


def _train_classifier(context: _Context, facts: dict[str, Any]) -> Path:
    """Fit the classifier in closed form; nearly all of the time goes into the features of images."""
    from outrider.image.inception_lpips import Inception, cached_features

    inception = cache(lambda: Inception.pretrained(context.device))
    codec = recipes.tokenizer().to(context.device)
    classifier, accuracy = train_classifier(
        context.pictures, codec, lambda pictures: cached_features(pictures, inception), **context.options
    )
    save(classifier, context.file, {"target": MODEL, **facts, recipes.ACCURACY: accuracy})
    for group, shares in accuracy.items():
        text = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        context.say(f"{context.recipe.name}: {group}: {text}")
    return context.file


def _train_head(context: _Context, request: TrainingRequest, facts: dict[str, Any]) -> Path:
    """Train heads or a feature drafter on the guided token model's states and distributions."""
    from outrider.core.engine.adapters.guidance import Guided
    from outrider.core.training.head_training import HeadTraining
    from outrider.image.training.teacher import GuidedTeacher, Lessons

    recipe, device = context.recipe, context.device
    assert recipe.kind is not None
    codec, tokens = recipes.tokenizer().to(device), recipes.tokens()
    network = tokens.network(torch.bfloat16, device)
    empty = tokens.prompt_encoder.unconditional
    teacher = GuidedTeacher(network, lambda prompts: Guided(decoder(network), prompts, empty, GUIDANCE))
    task = context.tokens_task(codec, tokens.prompt_encoder)
    lessons = Lessons(teacher, task, VALIDATION_SIZE[device.type != "cpu"])
    draft_head = recipe.kind(decoder(network), **context.options).to(device)
    context.begin(draft_head)
    length = 1 + task.length
    training = HeadTraining(
        teacher,
        {context.file.stem: draft_head},
        lessons,
        lessons.validation,
        context.out,
        tokens=context.batch * length,
        max_length=length,
        seed=request.seed,
    )
    request.train_head(recipe, training, context.out, {"target": MODEL, "guidance": GUIDANCE, **facts}, context.say)
    return context.file


def _words(pictures: Pictures, hold_out: bool = True) -> tuple[str, ...]:
    """The most common words of the training images' names and keywords."""
    indices = pictures.indices(TRAIN) if hold_out else range(len(pictures))
    return most_common_words(((pictures.names[index], pictures.keywords[index]) for index in indices), WORDS)
