"""A request for training, as `outrider train` makes it for images and speech."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.core.errors import InvalidOption
from outrider.core.training.optim import remove_checkpoint
from outrider.core.training.trainer import Plan

_AVERAGE, _FLOOR = 0.998, 0.02  # of a model that learns from data alone


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which recipes to train, on what, for how long."""

    recipes: tuple[str, ...]
    device: str = "cpu"
    minutes: float = 30.0  # each
    steps: int | None = None
    out: Path | None = None
    data: Path | None = None  # a prepared file or folder; None: what is in the cache
    batch: int | None = None
    rate: float | None = None
    seed: int = 0
    fresh: bool = False  # remove the folder's checkpoint
    start: Path | None = None  # weights to start from, instead of random ones
    quiet: bool = False
    options: Mapping[str, Any] | None = None  # of the model, instead of the recipe's
    command: str = ""  # noted with the weights

    def __post_init__(self) -> None:
        if not self.recipes:
            raise InvalidOption("there is no recipe to train; `outrider train --list` names them")
        if self.batch is not None and self.batch < 1:
            raise InvalidOption(f"batch is {self.batch}; it must be 1 or more")
        if self.out is not None and len(self.recipes) > 1:
            raise InvalidOption("several recipes need a folder each; leave out out=, or train them one by one")
        if self.start is not None and len(self.recipes) > 1:
            raise InvalidOption("weights to start from belong to one recipe; train the recipes one by one")

    @property
    def place(self) -> torch.device:
        """The device; each of several processes has a GPU of its own."""
        return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self.device == "cuda" else self.device)

    def begin(self, default: Path) -> Path:
        """Seed torch and give the folder of the run, without its checkpoint if `fresh`."""
        out = self.out or default
        if self.fresh and int(os.environ.get("RANK", "0")) == 0:
            remove_checkpoint(out)
        torch.manual_seed(self.seed)
        return out

    def plan(self, rate: float, decay: float, matrices: float | None = None) -> Plan:
        """The plan for a model that learns from data alone."""
        return Plan(
            minutes=self.minutes,
            steps=self.steps,
            rate=self.rate or rate,
            matrices=matrices,
            decay=decay,
            seed=self.seed,
            average=_AVERAGE,
            floor=_FLOOR,
            validations=8 if self.place.type == "cpu" else 24,
            checkpoint_minutes=2.0,
        )

    def facts(self, recipe: str, data: str) -> dict[str, Any]:
        """What is noted with the weights."""
        return {"recipe": recipe, "command": self.command, "data": data, "seed": self.seed}
