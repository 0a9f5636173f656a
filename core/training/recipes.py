"""Training recipes of a modality's parts, and the location of their weights: shipped with the package, or trained on
this machine. Independent of what is trained.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from outrider.core.errors import InvalidOption, unknown
from outrider.core.paths import cache_folder
from outrider.core.training.draft_head import DraftHead


class NoWeights(InvalidOption):
    """The weights do not exist yet and must be trained first."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a part is made and trained; `options` are its class's arguments."""

    name: str
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 1e-3
    batch: tuple[int, int] = (1, 1)  # on a CPU, on other devices: images, codec crops, voice tokens
    decay: float = 0.01
    matrices: float | None = None  # learning rate of blocks' matrices under Muon; None: AdamW trains everything
    kind: Callable[..., DraftHead] | None = None  # of draft heads, made as kind(target, **options)
    loss: str = "kl"
    drafter: str = ""  # the drafter that uses it, if not named like the recipe
    frames: bool = False  # whether it is trained on frames; else on tokens

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
    """A modality's recipes, and the locations of their weights."""

    package: str  # the package of shipped weights
    model: str  # prefix of shipped files
    trainings: str  # folder in the cache
    recipes: Mapping[str, Recipe]

    def recipe(self, name: str) -> Recipe:
        if name not in self.recipes:
            raise unknown("recipe", name, self.recipes)
        return self.recipes[name]

    def home(self, name: str) -> Path:
        """The folder of a recipe's training run."""
        return cache_folder() / "training" / self.trainings / name

    def shipped(self) -> Path:
        return Path(str(resources.files(self.package))) / "weights"

    def weights(self, name: str, folder: Path | None = None) -> Path:
        """The file of a recipe's weights: in `folder` if given, else the shipped file, else the one trained here."""
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

    # ---- draft heads of published models

    def home_for(self, model: str, name: str) -> Path:
        """The folder of a recipe's training run for a published model."""
        return cache_folder() / "training" / self.package.rpartition(".")[2] / model.replace("/", "--") / name

    def weights_for(self, model: str, name: str, folder: Path | None = None, stage: str = "") -> Path:
        """The file of a recipe's weights for a stage of a published model: in `folder` if given, else where they are
        trained."""
        path = (folder or self.home_for(model, name)) / stage / f"{short(name)}.safetensors"
        if path.is_file() and path.with_suffix(".json").is_file():
            return path
        command = f"outrider train {name} --model {shlex.quote(model)} --prompts FILE"
        raise NoWeights(f"there are no weights of {short(name)} for {model}; train them with `{command}`")

    def has_for(self, model: str, name: str, folder: Path | None = None, stage: str = "") -> bool:
        try:
            return self.weights_for(model, name, folder, stage).is_file()
        except NoWeights:
            return False

    @staticmethod
    def missing(name: str) -> NoWeights:
        return NoWeights(f"there are no weights for {name} yet; train them with `outrider train {name}`")
