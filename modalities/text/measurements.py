"""The files of what was measured for a drafter of a model: the acceptance of a tree's ranks, the sublayers to skip, the
costs of rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.drafters.combined import round_costs
from outrider.core.paths import cache_folder
from outrider.core.protocol import Drafter

if TYPE_CHECKING:
    from outrider.text.model import TextModel


def measured(model: TextModel, drafter: str) -> Path:
    """The file of what was measured for a drafter of this model."""
    return cache_folder() / "calibrations" / f"{model.measurement_key()}-{drafter}.json"


def costs_of_rounds(model: TextModel, label: str, members: Callable[[], Mapping[str, Drafter]], rows: int = 1) -> str:
    """The costs of rounds of these drafters on this machine, measured where the file lacks them. `label` tells the
    file from that of other drafters."""
    path = cache_folder() / "calibrations" / f"{model.measurement_key()}{label}.txt"
    return round_costs.calibration(path, model.target, members, rows)
