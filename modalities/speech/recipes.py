"""What is trained for speech, by name: how a part is made, and where its weights are.

Weights that ship stand in the folder `weights` as VOICE.PART.safetensors; those that were trained here, in the cache
folder. Knows nothing of how training runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from outrider.core.assets import Checkpoint, cache_folder, unpickled
from outrider.core.drafters.feature import Eagle3Head
from outrider.core.drafters.heads import HydraHeads
from outrider.core.engine.native import halves
from outrider.core.errors import InvalidOption, unknown
from outrider.core.train import Pupil
from outrider.core.trained import load as load_trained
from outrider.speech import data
from outrider.speech.codec import Codec
from outrider.speech.heads import ToldHeads
from outrider.speech.listener import Listener
from outrider.speech.vocoder import Vocoder
from outrider.speech.voice import Voice

MODEL = "heart"  # the voice that is learned from
PREFIX = "speech-"
DATA = "speech-data"


class NoWeights(InvalidOption):
    """Something that has to be trained first."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one of the parts is made and trained. `options` are those of its class."""

    name: str
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 1e-3
    batch: tuple[int, int] = (1, 1)  # on a CPU and elsewhere: crops of a codec, tokens of a voice
    decay: float = 0.01
    matrices: float | None = None  # the rate of blocks' matrices under Muon; None: AdamW teaches all
    kind: Callable[..., Pupil] | None = None  # of what learns from the voice: made as kind(target, **options)
    loss: str = "kl"
    drafter: str = ""  # whom it serves, where that isn't what the recipe is called
    frames: bool = False  # is it frames that it learns from? Else tokens

    @property
    def serves(self) -> str:
        return self.drafter or self.name.removeprefix(PREFIX)


def _table(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


RECIPES = _table(
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
        kind=ToldHeads,
        summary="four heads on the voice's last state, each told what its token will be about",
        options={"heads": 4},
        batch=(3_000, 40_000),
    ),
    Recipe(
        name="speech-medusa-6",
        drafter="medusa",
        kind=ToldHeads,
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
KINDS: Mapping[str, Callable[..., Pupil]] = {
    "Codec": Codec,
    "Listener": Listener,
    "Voice": Voice,
    "ToldHeads": ToldHeads,
    "HydraHeads": HydraHeads,
    "Eagle3Head": Eagle3Head,
}


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def home(name: str) -> Path:
    """The folder of a recipe's training."""
    return cache_folder() / "training" / "speech" / name


def _shipped() -> Path:
    return Path(str(resources.files("outrider.speech"))) / "weights"


def learned_from() -> list[Path]:
    """The speech that is learned from: ours, as tokens, and what was read aloud here."""
    ours = _shipped() / f"{MODEL}.speech.npz"
    return [*([ours] if ours.is_file() else []), data.home()]


def weights(name: str, folder: Path | None = None) -> Path:
    """The file of a recipe's weights: those in a folder of one's own, else ours, else those that were trained here."""
    short = name.removeprefix(PREFIX)
    places = [_shipped() / f"{MODEL}.{short}.safetensors", home(name) / f"{short}.safetensors"]
    for path in [folder / f"{short}.safetensors"] if folder else places:
        if path.is_file() and path.with_suffix(".json").is_file():
            return path
    raise NoWeights(f"there are no weights of {name} yet; train them with `outrider train {name}`")


def codec(folder: Path | None = None) -> Codec:
    found = load_trained(weights("speech-codec", folder), KINDS, None)
    assert isinstance(found, Codec)
    return found


def listener() -> Listener:
    found = load_trained(weights("speech-listener"), KINDS, None)
    assert isinstance(found, Listener)
    return found


def voice(name: str = "speech-voice", folder: Path | None = None) -> Voice:
    """A voice: the target, or the one that drafts."""
    found = load_trained(weights(name, folder), KINDS, None)
    assert isinstance(found, Voice)
    return found


def pupil(name: str, target: Any, folder: Path | None = None) -> Pupil:
    """What a drafter guesses with: of the recipe of its own name, or another that serves it."""
    return load_trained(weights(PREFIX + name, folder), KINDS, target)


def taught() -> dict[str, str]:
    """What learns from the voice, and the drafter that each serves."""
    return {one.name.removeprefix(PREFIX): one.serves for one in RECIPES.values() if one.kind is not None}


def vocoder(device: torch.device | str = "cpu") -> Vocoder:
    """HiFi-GAN's universal generator, fetched and converted the first time; in 16 bits, which nobody hears, where those
    are multiplied faster."""
    tensors = Checkpoint(unpickled("hifi-gan"))
    made = Vocoder.of({name.removeprefix("generator."): tensors[name] for name in tensors})
    return made.bfloat16() if torch.device(device).type == "cuda" or halves() else made
