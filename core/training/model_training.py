"""Training one model from data without a teacher: codecs, token models, classifiers.

A task makes batches by number, so that a resumed run continues with the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from outrider.core.training.trainer import Autocast, Progress, Share, Validation

Save = Callable[[nn.Module, Mapping[str, Any]], None]  # the averaged model and its provenance


class TrainingTask(Protocol):
    """The batches of a model, whose loss is `model(*batch)`, and its measures by name; the weights with the smallest
    first measure are the best."""

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]: ...  # share: finished share of the run
    def evaluate(self, model: nn.Module) -> dict[str, float]: ...


class ModelTraining:
    """A model, its task, and how its weights are saved."""

    maximize = False

    def __init__(self, name: str, model: nn.Module, task: TrainingTask, save: Save) -> None:
        self.models, self.task, self._save = {name: model}, task, save

    def batches(self, progress: Progress, share: Share, rank: int, world: int) -> Iterator[tuple[Tensor, ...]]:
        while True:
            yield self.task.batch(progress.steps * world + rank, share())

    def loss(self, name: str, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = model(*batch)
        return loss

    def validate(self, models: Mapping[str, nn.Module], autocast: Autocast) -> Mapping[str, Validation]:
        ((name, model),) = models.items()
        with autocast():
            measures = self.task.evaluate(model)
        return {name: Validation(next(iter(measures.values())), measures)}

    def save(self, name: str, model: nn.Module, provenance: Mapping[str, Any]) -> None:
        self._save(model, provenance)
