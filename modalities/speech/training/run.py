"""`outrider train speech-...`: from nothing to weights. The teacher reads sentences aloud, or prepared speech is taken;
the codec learns to bring it back, voices to say its tokens.

The parts are outrider.speech.training.data, outrider.speech.recipes, outrider.speech.training.objectives and
outrider.core.training.trainer; here they are put in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.core.errors import InvalidOption
from outrider.core.training.checkpoint import begin, save
from outrider.core.training.model_training import ModelTraining
from outrider.core.training.recipes import Recipe, short
from outrider.core.training.request import Request
from outrider.core.training.trainer import Plan, Trainer
from outrider.speech import recipes
from outrider.speech.codec import Codec
from outrider.speech.recipes import DATA, MODEL, home, recipe
from outrider.speech.training import data
from outrider.speech.training.data import Utterance
from outrider.speech.training.head_teacher import VoiceTeacher
from outrider.speech.training.objectives import (
    JUDGED,
    CodecObjective,
    FramesTask,
    RecogniserObjective,
    VoiceObjective,
    VoiceTask,
)
from outrider.speech.training.phoneme_recogniser import PhonemeRecogniser
from outrider.speech.voice import Voice

_Learning = RecogniserObjective | CodecObjective | VoiceObjective


class TrainingRequest(Request):
    """The same, of speech."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.recipes:
            recipe(name)


def train(wanted: TrainingRequest, say: Callable[[str], None] = print) -> list[Path]:
    """Train one recipe after another, and give the files of weights (of the speech, its folder)."""
    return [_read(wanted, say) if name == DATA else _train(recipe(name), wanted, say) for name in wanted.recipes]


def _read(wanted: TrainingRequest, say: Callable[[str], None]) -> Path:
    folder = wanted.out or data.home()
    ours = [path for path in recipes.learned_from() if path.is_file()]
    there = {one.text for one in data.load(*ours)} if ours else set()
    seconds = data.synthesise(folder, wanted.minutes, but=there, say=say)
    say(f"{seconds / 3600:.2f} hours of speech are in {folder}")
    return folder


def _train(chosen: Recipe, wanted: TrainingRequest, say: Callable[[str], None]) -> Path:
    device, out = wanted.place, wanted.begin(home(chosen.name))
    batch = wanted.batch or chosen.batch[device.type != "cpu"]
    options = {**chosen.options, **(wanted.options or {})}
    ours = [data.home()] if chosen.frames else recipes.learned_from()
    utterances = data.load(*([wanted.data] if wanted.data else ours))
    say(data.describe(utterances))
    if chosen.kind is not None:
        return _teach(chosen, utterances, options, wanted, out, device, say)
    model: _Learning
    course: FramesTask | VoiceTask
    if chosen.frames:
        course = FramesTask(utterances, batch, wanted.seed, device)
        model = _of_frames(chosen, options, course)
    else:
        utterances, codes = _tokens(utterances, wanted, out, device)
        course = VoiceTask(utterances, codes, batch, wanted.seed, device)
        model = VoiceObjective(Voice(codes=codes, **options))
    if wanted.start is not None:
        begin(model.part, wanted.start, say)
    facts = _facts(chosen, utterances, wanted) | {"batch": batch}
    file = out / f"{short(chosen.name)}.safetensors"

    def keep(learned: nn.Module, told: Mapping[str, Any]) -> None:
        assert isinstance(learned, _Learning)
        save(learned.part, file, told, finer=("encoder",))  # what codes are must not change by rounding

    say(f"{chosen.name}: {sum(one.numel() for one in model.parameters()):,} parameters")
    training = ModelTraining(chosen.name, model.to(device), course, keep)
    plan = wanted.plan(chosen.rate, chosen.decay, chosen.matrices)
    progress = Trainer(training, plan, out, device=device, facts=facts, quiet=wanted.quiet).run()
    best = progress.best[chosen.name]
    say(f"{chosen.name}: {progress.steps:,} steps, best {best:.4f}; weights, curve and checkpoint are in {out}")
    return file


def _of_frames(chosen: Recipe, options: Mapping[str, Any], course: FramesTask) -> RecogniserObjective | CodecObjective:
    if chosen.name == "speech-decoder":
        return CodecObjective(recipes.codec().requires_grad_(True), recipes.listener(), stays=True)
    part = (PhonemeRecogniser if chosen.name == "speech-listener" else Codec)(**options)
    part.mean.copy_(course.mean)
    part.scale.copy_(course.scale)
    return RecogniserObjective(part) if isinstance(part, PhonemeRecogniser) else CodecObjective(part)


def _facts(chosen: Recipe, utterances: Sequence[Utterance], wanted: TrainingRequest) -> dict[str, Any]:
    return {"target": MODEL, **wanted.facts(chosen.name, data.describe(utterances))}


def _teach(
    chosen: Recipe,
    utterances: list[Utterance],
    options: Mapping[str, Any],
    wanted: TrainingRequest,
    out: Path,
    device: torch.device,
    say: Callable[[str], None],
) -> Path:
    """Have the voice teach a drafter."""
    from outrider.core.training.head_training import HeadTraining

    assert chosen.kind is not None
    utterances, codes = _tokens(utterances, wanted, out, device)
    voice = recipes.voice()
    if voice.end < codes:
        raise InvalidOption(f"the voice has {voice.end:,} codes and the speech {codes:,}: they don't belong together")
    teacher = VoiceTeacher(voice, utterances, device)
    learned = [lesson for lesson, one in zip(teacher.lessons, utterances, strict=True) if not one.held]
    held = [lesson for lesson, one in zip(teacher.lessons, utterances, strict=True) if one.held]
    name = short(chosen.name)
    draft_head = chosen.kind(teacher.target, **options)
    if wanted.start is not None:
        begin(draft_head, wanted.start, say)
    training = HeadTraining(
        teacher,
        {name: draft_head},
        lambda epoch, share: learned,
        held[: JUDGED[device.type != "cpu"]],
        out,
        tokens=wanted.batch or chosen.batch[device.type != "cpu"],
        max_length=1024,
        seed=wanted.seed,
        losses={name: chosen.loss},
    )
    plan = Plan(minutes=wanted.minutes, steps=wanted.steps, rate=wanted.rate or chosen.rate, seed=wanted.seed)
    facts = _facts(chosen, utterances, wanted)
    trainer = Trainer(training, plan, out, device=device, facts=facts, quiet=wanted.quiet)
    for one, best in trainer.run().best.items():
        say(f"{one}: {best:.3f} tokens a target call (simulated chains on held-out speech); weights are in {out}")
    return out / f"{name}.safetensors"


def _tokens(
    utterances: list[Utterance], wanted: TrainingRequest, out: Path, device: torch.device
) -> tuple[list[Utterance], int]:
    """Utterances as tokens, and how many codes there are; what had to be coded is kept beside the weights."""
    if all(len(one.codes) for one in utterances):
        ours = recipes.codec().codes if wanted.data is None else 0  # some may never have been said
        return utterances, max(ours, *(1 + int(one.codes.max()) for one in utterances))
    codec = recipes.codec().to(device)
    coded = data.encoded(utterances, codec)
    data.save(out / "tokens.npz", coded)
    return coded, codec.codes
