"""`outrider train speech-...`: trains each recipe of outrider.speech.recipes, from training speech to a weight file.

The data are in outrider.speech.training.data, losses and batches in outrider.speech.training.objectives, and the
training loop in outrider.core.training.trainer; this module combines them.
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
from outrider.core.training.request import TrainingRequest
from outrider.speech import recipes
from outrider.speech.codec import Codec
from outrider.speech.phoneme_recogniser import PhonemeRecogniser
from outrider.speech.recipes import DATA, MODEL, home
from outrider.speech.spectral_vocoder import SpectralVocoder
from outrider.speech.training import data, vocoder_training
from outrider.speech.training.data import Utterance
from outrider.speech.training.head_teacher import VoiceTeacher
from outrider.speech.training.objectives import (
    VALIDATION_SIZE,
    CodecObjective,
    FramesTask,
    RecogniserObjective,
    VoiceObjective,
    VoiceTask,
)
from outrider.speech.voice import Voice

_Objective = RecogniserObjective | CodecObjective | VoiceObjective


def train(request: TrainingRequest, say: Callable[[str], None] = print) -> list[Path]:
    """Train the request's recipes in order, and return their weight files (for speech-data its folder)."""
    wanted = [recipes.recipe(name) for name in request.recipes]
    if request.model is not None:
        from outrider.speech.training.published import train_head

        return [train_head(recipe, request, say) for recipe in wanted]
    return [_synthesise(request, say) if recipe.name == DATA else _train(recipe, request, say) for recipe in wanted]


def _synthesise(request: TrainingRequest, say: Callable[[str], None]) -> Path:
    folder = request.out or recipes.data_folder()
    shipped = [path for path in recipes.training_data() if path.is_file()]
    existing = {utterance.text for utterance in data.load(*shipped)} if shipped else set()
    seconds = data.synthesise(folder, request.minutes, exclude=existing, say=say)
    say(f"{seconds / 3600:.2f} hours of speech are in {folder}")
    return folder


def _train(recipe: Recipe, request: TrainingRequest, say: Callable[[str], None]) -> Path:
    device, out = request.place, request.begin(home(recipe.name))
    batch, options = request.batch_size(recipe), request.model_options(recipe)
    default = [recipes.data_folder()] if recipe.frames else recipes.training_data()
    utterances = data.load(*([request.data] if request.data else default))
    say(data.describe(utterances))
    if recipe.name == "speech-vocoder":
        return _train_vocoder(recipe, utterances, request, out, say)
    if recipe.kind is not None:
        return _train_head(recipe, utterances, options, request, out, device, say)
    model: _Objective
    task: FramesTask | VoiceTask
    if recipe.frames:
        task = FramesTask(utterances, batch, request.seed, device)
        model = _frames_objective(recipe, options, task)
    else:
        utterances, codes = _encoded(utterances, request, out, device)
        task = VoiceTask(utterances, codes, batch, request.seed, device)
        model = VoiceObjective(Voice(codes=codes, **options))
    if request.start is not None:
        begin(model.part, request.start, say)
    facts = _facts(recipe, utterances, request) | {"batch": batch}
    file = out / f"{short(recipe.name)}.safetensors"

    def save_part(objective: nn.Module, provenance: Mapping[str, Any]) -> None:
        assert isinstance(objective, _Objective)
        save(objective.part, file, provenance, finer=("encoder",))  # rounding the encoder would change codes

    request.train_model(recipe, ModelTraining(recipe.name, model.to(device), task, save_part), out, facts, say)
    return file


def _frames_objective(
    recipe: Recipe, options: Mapping[str, Any], task: FramesTask
) -> RecogniserObjective | CodecObjective:
    if recipe.name == "speech-decoder":
        return CodecObjective(recipes.codec().requires_grad_(True), recipes.recogniser(), freeze_encoder=True)
    part = (PhonemeRecogniser if recipe.name == "speech-recogniser" else Codec)(**options)
    part.mean.copy_(task.mean)
    part.scale.copy_(task.scale)
    return RecogniserObjective(part) if isinstance(part, PhonemeRecogniser) else CodecObjective(part)


def _facts(recipe: Recipe, utterances: Sequence[Utterance], request: TrainingRequest) -> dict[str, Any]:
    return {"target": MODEL, **request.facts(recipe.name, data.describe(utterances))}


def _train_head(
    recipe: Recipe,
    utterances: list[Utterance],
    options: Mapping[str, Any],
    request: TrainingRequest,
    out: Path,
    device: torch.device,
    say: Callable[[str], None],
) -> Path:
    """Train a draft head on the voice's states and distributions."""
    from outrider.core.training.head_training import HeadTraining

    assert recipe.kind is not None
    utterances, codes = _encoded(utterances, request, out, device)
    voice = recipes.voice()
    if voice.end < codes:
        raise InvalidOption(
            f"the speech has {codes:,} codes and the voice {voice.end:,}; encode it with the voice's codec"
        )
    teacher = VoiceTeacher(voice, utterances, device)
    pairs = list(zip(teacher.lessons, utterances, strict=True))
    training_lessons = [lesson for lesson, utterance in pairs if not utterance.held_out]
    validation_lessons = [lesson for lesson, utterance in pairs if utterance.held_out]
    name = short(recipe.name)
    draft_head = recipe.kind(teacher.target, **options)
    if request.start is not None:
        begin(draft_head, request.start, say)
    training = HeadTraining(
        teacher,
        {name: draft_head},
        lambda epoch, share: training_lessons,
        validation_lessons[: VALIDATION_SIZE[device.type != "cpu"]],
        out,
        tokens=request.batch_size(recipe),
        max_length=1024,
        seed=request.seed,
        losses={name: recipe.loss},
    )
    request.train_head(recipe, training, out, _facts(recipe, utterances, request), say)
    return out / f"{name}.safetensors"


def _train_vocoder(
    recipe: Recipe, utterances: list[Utterance], request: TrainingRequest, out: Path, say: Callable[[str], None]
) -> Path:
    """Train the vocoder on sound that HiFi-GAN makes of the codec's frames first."""
    device = request.place
    utterances, _ = _encoded(utterances, request, out, device)
    codec, sounds = recipes.codec().to(device), out / "sounds"
    vocoder_training.teach(utterances, codec, lambda: recipes.hifi_gan(device), sounds)
    task = vocoder_training.SoundTask(sounds, request.batch_size(recipe), request.seed, device)
    vocoder = SpectralVocoder(**request.model_options(recipe))
    vocoder.mean.copy_(task.mean)
    vocoder.scale.copy_(task.scale)
    if request.start is not None:
        begin(vocoder, request.start, say)
    file = out / f"{short(recipe.name)}.safetensors"

    def save_part(model: nn.Module, provenance: Mapping[str, Any]) -> None:
        assert isinstance(model, SpectralVocoder)
        save(model, file, provenance)

    training = vocoder_training.VocoderTraining(
        recipe.name, vocoder.to(device), task, save_part, judged=request.start is not None
    )
    facts = _facts(recipe, utterances, request) | {"sounds": len(task.training), "batch": task.size}
    request.train_model(recipe, training, out, facts, say)
    return file


def _encoded(
    utterances: list[Utterance], request: TrainingRequest, out: Path, device: torch.device
) -> tuple[list[Utterance], int]:
    """The utterances as codes, and the number of codes. Newly encoded utterances are saved beside the weights."""
    if all(len(utterance.codes) for utterance in utterances):
        known = recipes.codec().codes if request.data is None else 0  # the largest codes may not occur
        return utterances, max(known, *(1 + int(utterance.codes.max()) for utterance in utterances))
    codec = recipes.codec().to(device)
    encoded = data.encode(utterances, codec)
    data.save(out / "tokens.npz", encoded)
    return encoded, codec.codes
