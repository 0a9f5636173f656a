"""`outrider train image-...`: from nothing to weights. Pictures are fetched and drawn, or a prepared file of them is
taken; the tokenizer learns to bring them back, token models to say them, and drafters what the guided model says.

The parts are outrider.image.training.data, outrider.image.training.objectives, outrider.image.recipes and
outrider.core.training.trainer; here they are put in order.
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
from outrider.core.training.request import Request
from outrider.core.training.trainer import Plan, Trainer
from outrider.image import recipes
from outrider.image.layout_planner import LayoutPlanner, decoder
from outrider.image.prompt_encoder import PromptEncoder, most_common_words
from outrider.image.recipes import JUDGE, MODEL, home, recipe
from outrider.image.token_model import TokenModel
from outrider.image.tokenizer import Layout, Tokenizer
from outrider.image.training.classifier import taught
from outrider.image.training.data import LEARNED, SIZE, Pictures, prepared
from outrider.image.training.objectives import (
    JUDGED,
    CodecObjective,
    CodecTask,
    ImitationObjective,
    ImitationTask,
    PlanObjective,
    PlanTask,
    TokensObjective,
    TokensTask,
)

WORDS = 2800  # that a token model knows at most
GUIDANCE = 3.0  # under which drafters learn


class TrainingRequest(Request):
    """The same, of pictures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.recipes:
            recipe(name)


def train(wanted: TrainingRequest, say: Callable[[str], None] = print) -> list[Path]:
    """Train one recipe after another, and give the files of weights."""
    pictures = prepared(wanted.data, say)
    say(pictures.describe())
    return [_train(recipe(name), pictures, wanted, say) for name in wanted.recipes]


@dataclass(frozen=True)
class _Lesson:
    """What is needed to learn one part."""

    model: nn.Module
    course: TrainingTask
    file: Path  # of its weights
    keep: Save


@dataclass(frozen=True)
class _Given:
    """What a part is made of."""

    recipe: Recipe
    pictures: Pictures
    out: Path
    batch: int
    seed: int
    device: torch.device
    options: Mapping[str, Any]
    start: Path | None
    say: Callable[[str], None]

    @property
    def file(self) -> Path:
        return self.out / f"{short(self.recipe.name)}.safetensors"

    def begun(self, draft_head: DraftHead) -> None:
        """Give it the weights that it is to begin from, if there are any."""
        if self.start is not None:
            begin(draft_head, self.start, self.say)

    def keeps(self, part: str) -> Save:
        """Write a part of what learns as trained weights."""

        def keep(learned: nn.Module, told: Mapping[str, Any]) -> None:
            save(cast(DraftHead, getattr(learned, part)), self.file, {"target": MODEL, **told})

        return keep


def _train(chosen: Recipe, pictures: Pictures, wanted: TrainingRequest, say: Callable[[str], None]) -> Path:
    device, out = wanted.place, wanted.begin(home(chosen.name))
    batch = wanted.batch or chosen.batch[device.type != "cpu"]
    options = {**chosen.options, **(wanted.options or {})}
    given = _Given(chosen, pictures, out, batch, wanted.seed, device, options, wanted.start, say)
    facts = {**wanted.facts(chosen.name, pictures.describe()), "batch": batch}
    if chosen.kind is not None:
        return _teach(given, wanted, facts, say)
    if chosen.name == JUDGE:
        return _judge(given, facts, say)
    lesson = _LESSONS[chosen.name](given)
    size = sum(one.numel() for one in lesson.model.parameters())
    say(f"{chosen.name}: {size:,} parameters, batches of {batch} pictures")
    training = ModelTraining(chosen.name, lesson.model.to(device), lesson.course, lesson.keep)
    plan = wanted.plan(chosen.rate, chosen.decay, chosen.matrices)
    progress = Trainer(training, plan, out, device=device, facts=facts, quiet=wanted.quiet).run()
    best = progress.best[chosen.name]
    say(f"{chosen.name}: {progress.steps:,} steps, best {best:.4f}; weights, curve and checkpoint are in {out}")
    return lesson.file


# ---- the parts, each with what it learns from


def _codec(given: _Given) -> _Lesson:
    def keep(learned: nn.Module, told: Mapping[str, Any]) -> None:
        cast(CodecObjective, learned).codec.save(given.out, told)

    course = CodecTask(given.pictures, given.batch, given.seed, given.device)
    file = given.out / "diffusion_pytorch_model.safetensors"
    start = given.start and (given.start.parent if given.start.is_file() else given.start)
    codec = recipes.tokenizer(start) if start else Tokenizer(Layout(**given.options))
    return _Lesson(CodecObjective(codec), course, file, keep)


def _plan(given: _Given) -> _Lesson:
    codec, names = _read(given)
    model = LayoutPlanner(
        codes=names.codes,
        styles=names.styles,
        words=names.words,
        **{"levels": codec.layout.levels, "side": SIZE // codec.factor, **given.options},
    )
    given.begun(model)
    course = TokensTask(given.pictures, codec, names, given.batch, given.seed, given.device)
    return _Lesson(PlanObjective(model), PlanTask(course), given.file, given.keeps("plan"))


def _tokens(given: _Given) -> _Lesson:
    codec, names = _read(given)
    plan = recipes.plan() if given.options.get("plan") else None
    size = {} if plan is None else {"levels": plan.levels, "plan": plan.config["channels"]}
    model = TokenModel(codes=names.codes, styles=names.styles, words=names.words, **{**given.options, **size})
    given.begun(model)
    if plan is not None and model.teller is not None:
        try:
            model.teller.planner.load_state_dict(plan.state_dict())
        except RuntimeError:
            raise Incompatible("the plan was learned from other pictures; train image-plan anew") from None
    course = TokensTask(given.pictures, codec, names, given.batch, given.seed, given.device)
    return _Lesson(TokensObjective(model), course, given.file, given.keeps("tokens"))


def _draft(given: _Given) -> _Lesson:
    """A small token model that learns what the large one says, under guidance, and draws by its plan."""
    codec, teacher = recipes.tokenizer().to(given.device), recipes.tokens().to(given.device)
    names = teacher.prompt_encoder
    model = TokenModel(teacher, codes=names.codes, styles=names.styles, words=names.words, **given.options)
    given.begun(model)
    course = TokensTask(given.pictures, codec, names, given.batch, given.seed, given.device)
    network = teacher.network(torch.bfloat16, given.device)
    imitation = ImitationTask(course, network, GUIDANCE)
    return _Lesson(ImitationObjective(model, teacher), imitation, given.file, given.keeps("tokens"))


def _read(given: _Given) -> tuple[Tokenizer, PromptEncoder]:
    """The tokenizer, and the names of what is learned from."""
    codec = recipes.tokenizer().to(given.device)
    return codec, PromptEncoder(codec.layout.codes, given.pictures.styles, _words(given.pictures))


_LESSONS: Mapping[str, Callable[[_Given], _Lesson]] = {
    "image-tokenizer": _codec,
    "image-plan": _plan,
    "image-tokens": _tokens,
    "image-draft": _draft,
}


def _judge(given: _Given, facts: dict[str, Any], say: Callable[[str], None]) -> Path:
    """The judge is not learned step by step; nearly all of its time goes into looking at pictures."""
    from outrider.image.evaluation.inception_lpips import Inception, kept

    eyes = cache(lambda: Inception.fetched(given.device))
    codec = recipes.tokenizer().to(given.device)
    made, right = taught(given.pictures, codec, lambda pictures: kept(pictures, eyes), **given.options)
    save(made, given.file, {"target": MODEL, **facts, recipes.RIGHT: right})
    for about, shares in right.items():
        say(f"{given.recipe.name}: {about}: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    return given.file


def _teach(given: _Given, wanted: TrainingRequest, facts: dict[str, Any], say: Callable[[str], None]) -> Path:
    """Heads and feature drafters learn from the guided model."""
    from outrider.core.training.head_training import HeadTraining
    from outrider.image.training.teacher import GuidedTeacher, Lessons

    chosen, device = given.recipe, given.device
    assert chosen.kind is not None
    codec, tokens = recipes.tokenizer().to(device), recipes.tokens()
    network = tokens.network(torch.bfloat16, device)
    teacher = GuidedTeacher(network, tokens.prompt_encoder, GUIDANCE)
    course = TokensTask(given.pictures, codec, tokens.prompt_encoder, given.batch, wanted.seed, device)
    lessons = Lessons(teacher, course, JUDGED[device.type != "cpu"])
    draft_head = chosen.kind(decoder(network), **given.options).to(device)
    given.begun(draft_head)
    length = 1 + course.length
    plan = Plan(
        minutes=wanted.minutes,
        steps=wanted.steps,
        rate=wanted.rate or chosen.rate,
        decay=chosen.decay,
        seed=wanted.seed,
    )
    name = given.file.stem
    facts = {"target": MODEL, "guidance": GUIDANCE, **facts}
    training = HeadTraining(
        teacher,
        {name: draft_head},
        lessons,
        lessons.held,
        given.out,
        tokens=given.batch * length,
        max_length=length,
        seed=wanted.seed,
    )
    best = Trainer(training, plan, given.out, device=device, facts=facts, quiet=wanted.quiet).run().best
    say(f"{chosen.name}: {best.get(name, 0.0):.3f} codes a target call (simulated chains on held-out pictures)")
    return given.file


def _words(pictures: Pictures) -> tuple[str, ...]:
    """Those of what is learned from; of what is held out nothing is known."""
    learned = pictures.chosen(LEARNED)
    return most_common_words(((pictures.names[place], pictures.keywords[place]) for place in learned), WORDS)
