"""Recipes by which the parts of a modality are trained, and where their weights are: those that ship, else those that
were trained here. Knows nothing of what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from outrider.core.errors import InvalidOption, unknown
from outrider.core.paths import cache_folder
from outrider.core.training.draft_head import DraftHead


class NoWeights(InvalidOption):
    """Something that has to be trained first."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one of the parts is made and trained. `options` are those of its class."""

    name: str
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 1e-3
    batch: tuple[int, int] = (1, 1)  # on a CPU and elsewhere: pictures, crops of a codec, tokens of a voice
    decay: float = 0.01
    matrices: float | None = None  # the rate of blocks' matrices under Muon; None: AdamW teaches all
    kind: Callable[..., DraftHead] | None = None  # of what learns from the target: made as kind(target, **options)
    loss: str = "kl"
    drafter: str = ""  # whom it serves, where that isn't what the recipe is called
    frames: bool = False  # is it frames that it learns from? Else tokens

    @property
    def serves(self) -> str:
        return self.drafter or short(self.name)


def short(name: str) -> str:
    """A recipe's name without the modality's."""
    return name.partition("-")[2]


def table(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


@dataclass(frozen=True)
class Shelf:
    """A modality's recipes, and where what they made lies."""

    package: str  # that weights ship in
    model: str  # what the files of those that ship begin with
    trainings: str  # the folder in the cache
    recipes: Mapping[str, Recipe]

    def recipe(self, name: str) -> Recipe:
        if name not in self.recipes:
            raise unknown("recipe", name, self.recipes)
        return self.recipes[name]

    def home(self, name: str) -> Path:
        """The folder of a recipe's training."""
        return cache_folder() / "training" / self.trainings / name

    def shipped(self) -> Path:
        return Path(str(resources.files(self.package))) / "weights"

    def weights(self, name: str, folder: Path | None = None) -> Path:
        """The file of a recipe's weights: those in a folder of one's own, else ours, else those that were trained
        here."""
        file = f"{short(name)}.safetensors"
        places = [self.shipped() / f"{self.model}.{file}", self.home(name) / file]
        for path in [folder / file] if folder else places:
            if path.is_file() and path.with_suffix(".json").is_file():
                return path
        raise self.missing(name)

    def has(self, name: str, folder: Path | None = None) -> bool:
        try:
            return self.weights(name, folder).is_file()
        except NoWeights:
            return False

    @staticmethod
    def missing(name: str) -> NoWeights:
        return NoWeights(f"there are no weights of {name} yet; train them with `outrider train {name}`")
