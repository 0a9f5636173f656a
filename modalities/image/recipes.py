"""Training recipes of the image models by name, and functions that open their weights.

Shipped weights are in the folder `weights`: the tokenizer as a VQModel of diffusers, the others as
emoji.NAME.safetensors. Weights trained on this machine are in the cache folder. Independent of how training runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.core.drafters.trained.eagle import EagleHead
from outrider.core.drafters.trained.heads import MedusaHeads
from outrider.core.drafters.trained.spatial import SpatialHeads
from outrider.core.engine.transformer import Decoder
from outrider.core.methods import DRAFTERS, Method
from outrider.core.training.checkpoint import load as load_trained
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.recipes import NoWeights, Recipe, Shelf, short, table
from outrider.image.classifier import Classifier
from outrider.image.known_names import KnownNames
from outrider.image.layout_planner import LayoutPlanner
from outrider.image.token_model import TokenModel
from outrider.image.tokenizer import Tokenizer

MODEL = "emoji"
PREFIX = "image-"
DRAFT = f"{PREFIX}draft"  # the smaller model
DECODER = "image-decoder"
CLASSIFIER = "image-classifier"
PLAN = "image-plan"
ACCURACY = "accuracy on styles left out"  # a key in the classifier's provenance


RECIPES = table(
    Recipe(
        name="image-tokenizer",
        summary="the tokenizer: 64x64 pixels to 16x16 codes of 2,560 and back",
        options={"levels": (8, 8, 8, 5), "channels": (48, 96, 128)},
        rate=2e-3,
        batch=(32, 96),
    ),
    Recipe(
        name=DECODER,
        summary="the tokenizer's decoder alone; codes keep their meaning, and models of codes stay valid",
        rate=1.2e-3,
        batch=(32, 96),
    ),
    Recipe(
        name=PLAN,
        summary="the layout planner: predicts all codes from the prompt at once, as an input of the token model",
        options={"channels": 64},
        rate=2e-3,
        batch=(128, 512),
        decay=0.02,
    ),
    Recipe(
        name="image-tokens",
        summary="the token model: codes in raster order, given a style and a few words",
        options={"width": 256, "layers": 5, "heads": 4, "hidden": 576, "plan": 64},
        rate=3e-3,
        batch=(16, 256),
        decay=0.1,
        matrices=3e-3,
    ),
    Recipe(
        name=DRAFT,
        summary="a small token model that imitates the guided token model and drafts for it",
        options={"width": 128, "layers": 2, "heads": 2, "hidden": 320, "plan": 64, "lent": True},
        rate=2e-3,
        batch=(32, 256),
        decay=0.05,
    ),
    Recipe(
        name="image-medusa",
        summary="Medusa: four heads on the guided model's last hidden state, one for each of the next codes",
        options={"heads": 4},
        rate=1e-3,
        batch=(4, 64),
        kind=MedusaHeads,
    ),
    Recipe(
        name="image-spatial",
        summary="four heads that read the last hidden state and the one of the row above the predicted code",
        options={"heads": 4, "columns": 16},
        rate=1e-3,
        batch=(4, 64),
        kind=SpatialHeads,
    ),
    Recipe(
        name="image-eagle",
        summary="EAGLE: one layer that predicts the guided model's next hidden states",
        rate=1e-3,
        batch=(4, 64),
        kind=EagleHead,
    ),
    Recipe(
        name=CLASSIFIER,
        summary="the classifier that measures whether images match their prompts, fitted in closed form",
        options={"width": 256, "shrink": 0.3},
        rate=0.0,
        batch=(0, 0),
    ),
)
_CLASSES: tuple[Callable[..., DraftHead], ...] = (Classifier, LayoutPlanner, TokenModel)
KINDS = {
    kind.__name__: kind for kind in (*_CLASSES, *(each.kind for each in RECIPES.values() if each.kind is not None))
}


SHELF = Shelf("outrider.image", MODEL, MODEL, RECIPES)
recipe, home, weights, missing = SHELF.recipe, SHELF.home, SHELF.weights, SHELF.missing


def tokenizer_folder() -> Path:
    """The folder of the shipped tokenizer, or else of the one trained on this machine."""
    for folder in (SHELF.shipped(), home("image-tokenizer")):
        if (folder / "diffusion_pytorch_model.safetensors").is_file():
            return folder
    raise missing("image-tokenizer")


def tokenizer(folder: Path | None = None) -> Tokenizer:
    return Tokenizer.load(folder or tokenizer_folder())


def draft_head(drafter: str, target: Decoder, folder: Path | None = None) -> DraftHead:
    """The trained draft head of a drafter."""
    return load_trained(weights(recipe_for(DRAFTERS[drafter]), folder), KINDS, target)


def published_head(drafter: str, published: Any, model: str, folder: Path | None = None) -> DraftHead:
    """The trained draft head of a drafter for a published model."""
    return load_trained(SHELF.weights_for(model, recipe_for(DRAFTERS[drafter]), folder), KINDS, published)


def recipe_for(method: Method) -> str:
    """The recipe that trains the draft head of a drafter."""
    for candidate in RECIPES.values():
        if candidate.kind is method.draft_head:
            return candidate.name
    raise NoWeights(f"no image recipe trains '{method}'; the recipes are {', '.join(RECIPES)}")


def tokens(name: str = "image-tokens", path: Path | None = None, target: TokenModel | None = None) -> TokenModel:
    """The token model, or the draft model for `target` with name=DRAFT."""
    model: DraftHead = load_trained(path or weights(name), KINDS, target)
    assert isinstance(model, TokenModel)
    return model


def known_names(folder: Path | None = None) -> KnownNames:
    """The names that each style has an image of, from beside the token model's weights; none if they are not there."""
    try:
        weights_file = folder / "tokens.safetensors" if folder else weights("image-tokens")
    except NoWeights:
        return KnownNames()
    path = names_file(weights_file)
    return KnownNames.load(path) if path.is_file() else KnownNames()


def names_file(weights_file: Path) -> Path:
    """The file of known names beside a token model's weights."""
    return weights_file.with_name(weights_file.name.replace("tokens.safetensors", "names.json"))


def plan() -> LayoutPlanner:
    """The layout planner to train a token model with: the one trained on this machine, or else the shipped token
    model's."""
    path = home(PLAN) / f"{short(PLAN)}.safetensors"
    if path.is_file():
        planner: DraftHead = load_trained(path, KINDS, None)
        assert isinstance(planner, LayoutPlanner)
        return planner
    try:
        teller = tokens().teller
    except NoWeights:
        teller = None
    if teller is None:
        raise missing(PLAN)
    return teller.planner


def classifier_file(folder: Path | None = None) -> Path:
    return weights(CLASSIFIER, folder)


def classifier(folder: Path | None = None) -> Classifier:
    """The classifier of images by name."""
    model: DraftHead = load_trained(classifier_file(folder), KINDS, None)
    assert isinstance(model, Classifier)
    return model
