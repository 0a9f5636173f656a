"""Training recipes of the speech models by name, and functions that open their weights.

Shipped weights are in the folder `weights` as VOICE.NAME.safetensors; weights trained on this machine are in the cache
folder. Independent of how training runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.core.assets.store import Checkpoint, convert_pickle
from outrider.core.drafters.trained.eagle import Eagle3Head
from outrider.core.drafters.trained.heads import HydraHeads, MedusaHeads
from outrider.core.drafters.trained.parallel_heads import CascadedModules
from outrider.core.errors import unknown
from outrider.core.kernels.native import halves
from outrider.core.methods.trained import MEDUSA
from outrider.core.paths import cache_folder
from outrider.core.training.checkpoint import load as load_trained
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.recipes import Recipe, Shelf, short, table
from outrider.speech.codec import Codec
from outrider.speech.conditioned_heads import ConditionedHeads
from outrider.speech.phoneme_recogniser import PhonemeRecogniser
from outrider.speech.spectral_vocoder import SpectralVocoder
from outrider.speech.vocoder import Vocoder
from outrider.speech.voice import Voice

MODEL = "heart"  # the name of the voice
PREFIX = "speech-"
DRAFT = f"{PREFIX}draft"  # the smaller model
DATA = "speech-data"
HIFI_GAN, VOCOS = "hifi-gan", "vocos"
VOCODERS = (HIFI_GAN, VOCOS)  # the default first


RECIPES = table(
    Recipe(name=DATA, summary="the training speech, read by the teacher"),
    Recipe(
        name="speech-codec",
        summary="the codec: mel frames to 43 codes per second and back",
        options={"width": 256},
        rate=1e-3,
        batch=(16, 128),
        frames=True,
    ),
    Recipe(
        name="speech-recogniser",
        summary="a recogniser of the phoneme of each frame, for the decoder's perceptual loss",
        rate=2e-3,
        batch=(32, 128),
        decay=0.05,
        frames=True,
    ),
    Recipe(
        name="speech-decoder",
        summary="the codec's decoder with the perceptual loss; codes keep their meaning",
        rate=5e-4,
        batch=(16, 128),
        frames=True,
    ),
    Recipe(
        name="speech-vocoder",
        summary="the vocoder: mel frames to sound, as HiFi-GAN makes it of this voice",
        options={"width": 256, "hidden": 768, "layers": 6},
        rate=1e-3,
        batch=(8, 64),
    ),
    Recipe(
        name="speech-voice",
        summary="the voice: the token model of codes, conditioned on phonemes",
        rate=3e-3,
        batch=(3_000, 40_000),
        decay=0.1,
        matrices=3e-3,
    ),
    Recipe(
        name=DRAFT,
        summary="a small voice that drafts for it",
        options={"width": 128, "layers": 2, "heads": 2, "hidden": 320, "reading": 96},
        rate=2e-3,
        batch=(4_000, 40_000),
        decay=0.05,
    ),
    Recipe(
        name="speech-medusa",
        kind=ConditionedHeads,
        summary="Medusa: four heads on the voice's last hidden state and the conditioning of later positions",
        options={"heads": 4},
        batch=(3_000, 40_000),
    ),
    Recipe(
        name="speech-medusa-6",
        drafter=MEDUSA.name,
        kind=ConditionedHeads,
        summary="the same with six heads, the maximum",
        options={"heads": 6},
        batch=(3_000, 40_000),
    ),
    Recipe(
        name="speech-hydra",
        kind=HydraHeads,
        summary="Hydra: three heads, each of which reads the tokens drafted before it",
        options={"heads": 3, "layers": 1, "prefix": False},
        batch=(3_000, 40_000),
    ),
    Recipe(
        name="speech-eagle3",
        kind=Eagle3Head,
        summary="EAGLE-3: one layer on hidden states of three depths, unrolled over its own states in training",
        options={"rounds": 3},
        batch=(2_000, 30_000),
    ),
    Recipe(
        name="speech-llasa-plus",
        kind=CascadedModules,
        summary="Llasa+: two layers, one after the other, on the voice's last hidden states",
        batch=(3_000, 40_000),
    ),
)
KINDS: Mapping[str, Callable[..., DraftHead]] = {
    "Codec": Codec,
    "PhonemeRecogniser": PhonemeRecogniser,
    "Voice": Voice,
    "SpectralVocoder": SpectralVocoder,
    "ConditionedHeads": ConditionedHeads,
    "MedusaHeads": MedusaHeads,
    "HydraHeads": HydraHeads,
    "Eagle3Head": Eagle3Head,
    "CascadedModules": CascadedModules,
}


SHELF = Shelf("outrider.speech", MODEL, "speech", RECIPES)
recipe, home, weights = SHELF.recipe, SHELF.home, SHELF.weights


def data_folder() -> Path:
    """The folder of speech made on this machine."""
    return cache_folder() / "training" / "speech" / "read"


def training_data() -> list[Path]:
    """The training speech: the shipped codes, and the folder of speech made on this machine."""
    shipped = SHELF.shipped() / f"{MODEL}.speech.npz"
    return [*([shipped] if shipped.is_file() else []), data_folder()]


def codec(folder: Path | None = None) -> Codec:
    model = load_trained(weights("speech-codec", folder), KINDS, None)
    assert isinstance(model, Codec)
    return model


def recogniser() -> PhonemeRecogniser:
    model = load_trained(weights("speech-recogniser"), KINDS, None)
    assert isinstance(model, PhonemeRecogniser)
    return model


def voice(name: str = "speech-voice", folder: Path | None = None) -> Voice:
    """The voice, or its draft model with name="speech-draft"."""
    model = load_trained(weights(name, folder), KINDS, None)
    assert isinstance(model, Voice)
    return model


def draft_head(name: str, target: Any, folder: Path | None = None) -> DraftHead:
    """The trained draft head of a recipe, named without its prefix, such as "medusa-6"."""
    return load_trained(weights(PREFIX + name, folder), KINDS, target)


def published_head(name: str, target: Any, model: str, folder: Path | None = None, stage: str = "") -> DraftHead:
    """The draft head that a recipe, named without its prefix, trained for a stage of a published model."""
    return load_trained(SHELF.weights_for(model, PREFIX + name, folder, stage), KINDS, target)


def published_kind(recipe: Recipe) -> Callable[..., DraftHead]:
    """The class of a recipe's draft head for a published model, which has no conditioning to read."""
    assert recipe.kind is not None
    return MedusaHeads if recipe.kind is ConditionedHeads else recipe.kind


def trained_heads() -> dict[str, str]:
    """The recipes of draft heads, named without their prefix, and the drafter that uses each."""
    return {short(each.name): each.serves for each in RECIPES.values() if each.kind is not None}


def hifi_gan(device: torch.device | str = "cpu") -> Vocoder:
    """HiFi-GAN's universal generator, for any voice, fetched and converted on first use; in bfloat16, which is
    inaudible, where its products are faster."""
    tensors = Checkpoint(convert_pickle("hifi-gan"))
    model = Vocoder.from_tensors({name.removeprefix("generator."): tensors[name] for name in tensors})
    return model.bfloat16() if torch.device(device).type == "cuda" or halves() else model


def vocos(device: torch.device | str = "cpu", folder: Path | None = None) -> SpectralVocoder:
    """The small vocoder of this voice."""
    model = load_trained(weights("speech-vocoder", folder), KINDS, None)
    assert isinstance(model, SpectralVocoder)
    return model.to(device)


def vocoder(name: str, device: torch.device | str, folder: Path | None) -> Vocoder | SpectralVocoder:
    """A vocoder by its name in VOCODERS."""
    if name not in VOCODERS:
        raise unknown("vocoder", name, VOCODERS)
    return hifi_gan(device) if name == HIFI_GAN else vocos(device, folder)
