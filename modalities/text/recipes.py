"""What is trained for text, by the drafter's name: how a pupil is made, what it minimises, and where its weights are.

Weights that ship stand in the folder `weights` as TARGET.DRAFTER.safetensors; those that were trained here, in the
cache folder. Whoever asks for such a drafter and gives no `model` gets them. Knows nothing of how training runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.core.assets import cache_folder
from outrider.core.drafters.distilled import SmallModel
from outrider.core.drafters.feature import Eagle3Head
from outrider.core.drafters.heads import HydraHeads, MedusaHeads
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption, unknown
from outrider.core.methods import DRAFTERS
from outrider.core.target import Target
from outrider.core.train import Pupil


class NoWeights(InvalidOption):
    """A drafter that has to be trained first."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one drafter's pupil is made and trained. `kind` is made as kind(target, vocabulary=..., **options)."""

    name: str  # the drafter's
    kind: Callable[..., Pupil]
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "kl"
    rate: float = 1e-3
    reduced: bool = True  # does it guess over a reduced vocabulary?

    def make(self, target: Decoder, vocabulary: Tensor | None, **options: Any) -> Pupil:
        given = dict(self.options) | options
        if self.reduced and vocabulary is not None:
            given["vocabulary"] = vocabulary
        return self.kind(target, **given)


def _table(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


RECIPES = _table(
    Recipe(
        name="draft-model",
        kind=SmallModel,
        summary="three of the target's own layers with learned low-rank corrections, and its commonest output rows",
        options={"layers": (0, 1, -1), "rank": 128},
        rate=2e-3,
    ),
    Recipe(
        name="medusa",
        kind=MedusaHeads,
        summary="four heads on the last state, none of which knows of the others",
        options={"heads": 4},
        rate=1e-3,
    ),
    Recipe(
        name="hydra",
        kind=HydraHeads,
        summary="three heads, each of which sees the tokens drafted before it",
        options={"heads": 3, "layers": 1, "prefix": False},
        rate=1e-3,
    ),
    Recipe(
        name="eagle3",
        kind=Eagle3Head,
        summary="one layer on states of three depths, unrolled over its own states",
        options={"rounds": 3},
        rate=1e-3,
    ),
)

KINDS: dict[str, Callable[..., Pupil]] = {kind.__name__: kind for kind in (recipe.kind for recipe in RECIPES.values())}


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def home(target: str) -> Path:
    """The folder of a target's training: its answers, and a folder for each run."""
    return cache_folder() / "training" / target.replace("/", "--")


def find(target: str, drafter: str) -> Path | None:
    """The weights of a drafter for a target: those that ship with us, else those that were trained here. Drafters that
    grow another tree with the same pupil share them."""
    folder, name = Path(str(resources.files("outrider.text"))) / "weights", target.replace("/", "--")
    kind = DRAFTERS[drafter].pupil if drafter in DRAFTERS else None
    alike = [one.name for one in RECIPES.values() if one.name != drafter and one.kind is kind]
    for wanted in (drafter, *alike):
        shipped, trained = folder / f"{name}.{wanted}.safetensors", home(target) / wanted / f"{wanted}.safetensors"
        for path in (shipped, trained):
            if path.is_file() and path.with_suffix(".json").is_file():
                return path
    return None


def load(path: Path, drafter: str, target: Target) -> Pupil:
    """Trained weights for a target."""
    from outrider.core.trained import load as load_trained

    if not isinstance(target, Decoder):
        raise Incompatible(
            f"weights for {drafter} are made for targets that run on our own decoder, and this one runs on "
            f"{type(target).__name__}"
        )
    if not path.is_file():
        raise InvalidOption(f"there is no file {path}; give a file of trained weights")
    return load_trained(path, KINDS, target)


def missing(target: str, drafter: str) -> NoWeights:
    """What to say where there are no weights."""
    if drafter in RECIPES:
        return NoWeights(
            f"there are no weights of {drafter} for {target}; train them with "
            f"`outrider train {drafter} --model {target}`, or name a file of them"
        )
    return NoWeights(f"the drafter '{drafter}' needs model=..., a smaller model of the same vocabulary")
