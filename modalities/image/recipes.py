"""What is trained for images, by name; where its weights are; and how they are opened.

Weights that ship stand in the folder `weights`: the tokenizer's as diffusers' VQModel reads them, the others as
emoji.NAME.safetensors. Those that were trained here stand in the cache folder. Knows nothing of how training runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.core.drafters.trained.eagle import EagleHead
from outrider.core.drafters.trained.heads import MedusaHeads
from outrider.core.drafters.trained.spatial import SpatialHeads
from outrider.core.engine.transformer import Decoder
from outrider.core.methods import DRAFTERS
from outrider.core.training.checkpoint import load as load_trained
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.recipes import NoWeights, Recipe, Shelf, short, table
from outrider.image.layout_planner import LayoutPlanner
from outrider.image.token_model import TokenModel
from outrider.image.tokenizer import Tokenizer
from outrider.image.training.classifier import Classifier

MODEL = "emoji"
PREFIX = "image-"
JUDGE = "image-classifier"
PLAN = "image-plan"
RIGHT = "right on styles it has not seen"  # what is noted with the judge


RECIPES = table(
    Recipe(
        name="image-tokenizer",
        summary="pictures of 64x64 to 16x16 codes of 1,000 and back",
        options={"channels": (32, 64, 80)},
        rate=2e-3,
        batch=(32, 128),
    ),
    Recipe(
        name=PLAN,
        summary="what a picture of some words looks like from afar, by which the model of codes draws",
        options={"channels": 64},
        rate=2e-3,
        batch=(128, 512),
        decay=0.02,
    ),
    Recipe(
        name="image-tokens",
        summary="the model of those codes that a style and a few words ask for",
        options={"width": 256, "layers": 5, "heads": 4, "hidden": 576, "plan": 64},
        rate=3e-3,
        batch=(16, 256),
        decay=0.1,
        matrices=3e-3,
    ),
    Recipe(
        name="image-draft",
        summary="a small model that learns what it says under guidance, and drafts for it",
        options={"width": 128, "layers": 2, "heads": 2, "hidden": 320, "plan": 64, "lent": True},
        rate=2e-3,
        batch=(32, 256),
        decay=0.05,
    ),
    Recipe(
        name="image-medusa",
        summary="four heads on the guided model's last state, each for one of the next codes",
        options={"heads": 4},
        rate=1e-3,
        batch=(4, 64),
        kind=MedusaHeads,
    ),
    Recipe(
        name="image-spatial",
        summary="four heads that see the last state and the one above the code they guess",
        options={"heads": 4, "columns": 16},
        rate=1e-3,
        batch=(4, 64),
        kind=SpatialHeads,
    ),
    Recipe(
        name="image-eagle",
        summary="one layer that foresees the guided model's next states",
        rate=1e-3,
        batch=(4, 64),
        kind=EagleHead,
    ),
    Recipe(
        name=JUDGE,
        summary="a judge of whether pictures show what was asked for, worked out at once",
        options={"width": 256, "shrink": 0.3},
        rate=0.0,
        batch=(0, 0),
    ),
)
_CLASSES: tuple[Callable[..., DraftHead], ...] = (Classifier, LayoutPlanner, TokenModel)
KINDS = {one.__name__: one for one in (*_CLASSES, *(one.kind for one in RECIPES.values() if one.kind is not None))}


SHELF = Shelf("outrider.image", MODEL, MODEL, RECIPES)
recipe, home, weights, missing = SHELF.recipe, SHELF.home, SHELF.weights, SHELF.missing


def tokenizer_folder() -> Path:
    """Where the tokenizer is: ours, else the one that was trained here."""
    for folder in (SHELF.shipped(), home("image-tokenizer")):
        if (folder / "diffusion_pytorch_model.safetensors").is_file():
            return folder
    raise missing("image-tokenizer")


def tokenizer(folder: Path | None = None) -> Tokenizer:
    return Tokenizer.load(folder or tokenizer_folder())


def draft_head(drafter: str, target: Decoder, folder: Path | None = None) -> DraftHead:
    """What a trained drafter guesses with: the weights of the recipe that makes its kind."""
    kind = DRAFTERS[drafter].draft_head
    for one in RECIPES.values():
        if one.kind is kind:
            return load_trained(weights(one.name, folder), KINDS, target)
    raise NoWeights(f"nobody has made a recipe of '{drafter}' for pictures; there is {', '.join(RECIPES)}")


def tokens(name: str = "image-tokens", path: Path | None = None, target: TokenModel | None = None) -> TokenModel:
    """A token model: the target, or the one that drafts for `target`."""
    found: DraftHead = load_trained(path or weights(name), KINDS, target)
    assert isinstance(found, TokenModel)
    return found


def plan() -> LayoutPlanner:
    """A plan by which a token model is to learn to draw: the one that was trained here, else that of our own model."""
    path = home(PLAN) / f"{short(PLAN)}.safetensors"
    if path.is_file():
        found: DraftHead = load_trained(path, KINDS, None)
        assert isinstance(found, LayoutPlanner)
        return found
    try:
        teller = tokens().teller
    except NoWeights:
        teller = None
    if teller is None:
        raise missing(PLAN)
    return teller.planner


def classifier_file(folder: Path | None = None) -> Path:
    return weights(JUDGE, folder)


def classifier(folder: Path | None = None) -> Classifier:
    """The judge of what pictures show."""
    found: DraftHead = load_trained(classifier_file(folder), KINDS, None)
    assert isinstance(found, Classifier)
    return found
