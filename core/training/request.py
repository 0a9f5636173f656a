"""A request for training, as `outrider train` makes it for images and speech, and the runs that it asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.core.errors import InvalidOption
from outrider.core.training.head_training import HeadTraining
from outrider.core.training.optim import TrainingError, remove_checkpoint
from outrider.core.training.recipes import Recipe
from outrider.core.training.trainer import Plan, Progress, Trainer, Training

_AVERAGE, _FLOOR = 0.998, 0.02  # of a model that learns from data alone


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """Which recipes to train, on what, for how long."""

    recipes: tuple[str, ...]
    device: str = "cpu"
    minutes: float = 30.0  # each
    steps: int | None = None
    out: Path | None = None
    data: Path | None = None  # a prepared file or folder; None: those in the cache
    model: str | None = None  # a published model that heads are trained for; None: ours
    class_options: Mapping[str, Any] = field(default_factory=dict)  # of the published model's class, to load it with
    prompts: tuple[str, ...] = ()  # from which the published model makes what heads are trained on
    batch: int | None = None
    rate: float | None = None
    seed: int = 0
    fresh: bool = False  # remove the folder's checkpoint
    hold_out: bool = False  # keep the names held out for measuring out of training (token models of images)
    start: Path | None = None  # weights to start from, instead of random ones
    quiet: bool = False
    options: Mapping[str, Any] | None = None  # of the model, instead of the recipe's
    command: str = ""  # recorded with the weights

    def __post_init__(self) -> None:
        if not self.recipes:
            raise InvalidOption("there is no recipe to train; `outrider train --list` lists them")
        if self.batch is not None and self.batch < 1:
            raise InvalidOption(f"batch is {self.batch}; it must be 1 or more")
        if self.out is not None and len(self.recipes) > 1:
            raise InvalidOption("several recipes cannot share a folder; leave out `out`, or train them one by one")
        if self.start is not None and len(self.recipes) > 1:
            raise InvalidOption("`start` has the weights of one recipe; train the recipes one by one")

    @property
    def place(self) -> torch.device:
        """The device; with several processes, each has its own GPU."""
        return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self.device == "cuda" else self.device)

    def begin(self, default: Path) -> Path:
        """Seed torch and return the folder of the run, without its checkpoint if `fresh`."""
        out = self.out or default
        if self.fresh and int(os.environ.get("RANK", "0")) == 0:
            remove_checkpoint(out)
        torch.manual_seed(self.seed)
        return out

    def batch_size(self, recipe: Recipe) -> int:
        return self.batch or recipe.batch[self.place.type != "cpu"]

    def model_options(self, recipe: Recipe) -> dict[str, Any]:
        return {**recipe.options, **(self.options or {})}

    def facts(self, recipe: str, data: str) -> dict[str, Any]:
        """The facts that are recorded with the weights."""
        return {"recipe": recipe, "command": self.command, "data": data, "seed": self.seed}

    def model_plan(self, recipe: Recipe) -> Plan:
        """The plan for a model that is trained from data, without a teacher."""
        return Plan(
            minutes=self.minutes,
            steps=self.steps,
            rate=self.rate or recipe.rate,
            matrices=recipe.matrices,
            decay=recipe.decay,
            seed=self.seed,
            average=_AVERAGE,
            floor=_FLOOR,
            validations=8 if self.place.type == "cpu" else 24,
            checkpoint_minutes=2.0,
        )

    def train_model(
        self, recipe: Recipe, training: Training, out: Path, facts: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        """Train a model, and report it in one line before and one after."""
        model = training.models[recipe.name]
        say(f"{recipe.name}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")
        progress = self._run(training, self.model_plan(recipe), out, facts)
        best = progress.best[recipe.name]
        say(f"{recipe.name}: {progress.steps:,} steps, best {best:.4f}; weights, curve and checkpoint are in {out}")

    def train_head(
        self, recipe: Recipe, training: HeadTraining, out: Path, facts: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        """Train a draft head on its teacher's distributions, and report the result."""
        plan = Plan(
            minutes=self.minutes, steps=self.steps, rate=self.rate or recipe.rate, decay=recipe.decay, seed=self.seed
        )
        for best in self._run(training, plan, out, facts).best.values():
            say(f"{recipe.name}: {best:.3f} tokens per target pass (simulated chains); weights are in {out}")

    def _run(self, training: Training, plan: Plan, out: Path, facts: Mapping[str, Any]) -> Progress:
        trainer = Trainer(training, plan, out, device=self.place, facts=facts, quiet=self.quiet)
        progress = trainer.run()
        if trainer.main and not progress.best:
            why = (
                "the held-out answers have nothing to validate on; train on more prompts"
                if progress.steps
                else "it was stopped before the first step"
            )
            raise TrainingError(f"no weights were saved: {why}. The same command resumes from {out}")
        return progress
