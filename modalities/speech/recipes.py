"""What is trained for speech, by name: how a part is made, and where its weights are.

Weights that ship stand in the folder `weights` as VOICE.PART.safetensors; those that were trained here, in the cache
folder. Knows nothing of how training runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.core.assets.store import Checkpoint, unpickled
from outrider.core.drafters.trained.eagle import Eagle3Head
from outrider.core.drafters.trained.heads import HydraHeads
from outrider.core.kernels.native import halves
from outrider.core.training.checkpoint import load as load_trained
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.recipes import Recipe, Shelf, short, table
from outrider.speech.codec import Codec
from outrider.speech.conditioned_heads import ConditionedHeads
from outrider.speech.training import data
from outrider.speech.training.phoneme_recogniser import PhonemeRecogniser
from outrider.speech.vocoder import Vocoder
from outrider.speech.voice import Voice

MODEL = "heart"  # the voice that is learned from
PREFIX = "speech-"
DATA = "speech-data"


RECIPES = table(
    Recipe(name=DATA, summary="speech to learn from, read aloud by the teacher"),
    Recipe(
        name="speech-codec",
        summary="speech to 43 tokens a second and back",
        options={"width": 256},
        rate=1e-3,
        batch=(16, 128),
        frames=True,
    ),
    Recipe(
        name="speech-listener",
        summary="which phoneme is said in a frame: what the decoder is to be understood by",
        rate=2e-3,
        batch=(32, 128),
        decay=0.05,
        frames=True,
    ),
    Recipe(
        name="speech-decoder",
        summary="the codec's decoder alone, so that the listener hears the same; codes stay what they are",
        rate=5e-4,
        batch=(16, 128),
        frames=True,
    ),
    Recipe(
        name="speech-voice",
        summary="the model of those tokens that text asks for",
        rate=3e-3,
        batch=(3_000, 40_000),
        decay=0.1,
        matrices=3e-3,
    ),
    Recipe(
        name="speech-draft",
        summary="a small voice, which drafts for it",
        options={"width": 128, "layers": 2, "heads": 2, "hidden": 320, "reading": 96},
        rate=2e-3,
        batch=(4_000, 40_000),
        decay=0.05,
    ),
    Recipe(
        name="speech-medusa",
        kind=ConditionedHeads,
        summary="four heads on the voice's last state, each told what its token will be about",
        options={"heads": 4},
        batch=(3_000, 40_000),
    ),
    Recipe(
        name="speech-medusa-6",
        drafter="medusa",
        kind=ConditionedHeads,
        summary="six of these heads, as far ahead as the voice is told",
        options={"heads": 6},
        batch=(3_000, 40_000),
    ),
    Recipe(
        name="speech-hydra",
        kind=HydraHeads,
        summary="three heads, each of which sees the tokens drafted before it",
        options={"heads": 3, "layers": 1, "prefix": False},
        batch=(3_000, 40_000),
    ),
    Recipe(
        name="speech-eagle3",
        kind=Eagle3Head,
        summary="one layer on states of three depths, unrolled over its own states",
        options={"rounds": 3},
        batch=(2_000, 30_000),
    ),
)
KINDS: Mapping[str, Callable[..., DraftHead]] = {
    "Codec": Codec,
    "PhonemeRecogniser": PhonemeRecogniser,
    "Voice": Voice,
    "ConditionedHeads": ConditionedHeads,
    "HydraHeads": HydraHeads,
    "Eagle3Head": Eagle3Head,
}


SHELF = Shelf("outrider.speech", MODEL, "speech", RECIPES)
recipe, home, weights = SHELF.recipe, SHELF.home, SHELF.weights


def learned_from() -> list[Path]:
    """The speech that is learned from: ours, as tokens, and what was read aloud here."""
    ours = SHELF.shipped() / f"{MODEL}.speech.npz"
    return [*([ours] if ours.is_file() else []), data.home()]


def codec(folder: Path | None = None) -> Codec:
    found = load_trained(weights("speech-codec", folder), KINDS, None)
    assert isinstance(found, Codec)
    return found


def listener() -> PhonemeRecogniser:
    found = load_trained(weights("speech-listener"), KINDS, None)
    assert isinstance(found, PhonemeRecogniser)
    return found


def voice(name: str = "speech-voice", folder: Path | None = None) -> Voice:
    """A voice: the target, or the one that drafts."""
    found = load_trained(weights(name, folder), KINDS, None)
    assert isinstance(found, Voice)
    return found


def draft_head(name: str, target: Any, folder: Path | None = None) -> DraftHead:
    """What a drafter guesses with: of the recipe of its own name, or another that serves it."""
    return load_trained(weights(PREFIX + name, folder), KINDS, target)


def taught() -> dict[str, str]:
    """What learns from the voice, and the drafter that each serves."""
    return {short(one.name): one.serves for one in RECIPES.values() if one.kind is not None}


def vocoder(device: torch.device | str = "cpu") -> Vocoder:
    """HiFi-GAN's universal generator, fetched and converted the first time; in 16 bits, which nobody hears, where those
    are multiplied faster."""
    tensors = Checkpoint(unpickled("hifi-gan"))
    made = Vocoder.of({name.removeprefix("generator."): tensors[name] for name in tensors})
    return made.bfloat16() if torch.device(device).type == "cuda" or halves() else made
