"""What was measured for a drafter of a model: files with the acceptance of a tree's ranks, the sublayers to skip, the
costs of rounds; and what pays for a target of the catalogue: its draft model, and the drafter that `auto` stands for.

One row a target; a target without a row has no published draft model here, and `auto` is what it is elsewhere. A row
says what was measured, so that it can be measured again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.assets.catalogue import ASSETS
from outrider.core.drafters.combined import round_costs
from outrider.core.methods.combined import ADAPTIVE
from outrider.core.methods.lookup import SUFFIX
from outrider.core.methods.self_speculative import QSPEC
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


@dataclass(frozen=True, kw_only=True)
class MeasuredDefault:
    """The default of one target, for a single prompt on a CPU: chains by its draft model once that has been fetched,
    else a drafter, in place of `auto`."""

    draft_model: str | None = None  # of the catalogue, with the target's tokens
    drafter: str | None = None  # None: `auto` itself
    options: Mapping[str, Any] = field(default_factory=dict)  # of that drafter
    dtype: str | None = None  # the precision of the target in which that drafter pays; None: any
    measured: str = ""  # with what result, and how

    @property
    def fetched(self) -> str | None:
        """The draft model, if it is on this machine."""
        asset = ASSETS.get(self.draft_model or "")
        return None if asset is None or not asset.here else self.draft_model


DEFAULTS: Mapping[str, MeasuredDefault] = {
    "smollm2-135m": MeasuredDefault(
        drafter=ADAPTIVE.name,
        options={"drafters": (SUFFIX.name, QSPEC.name), "options": {QSPEC.name: {"length": 8}}},
        dtype="bfloat16",
        measured="two quiet cores with AVX-512, 29 prompts of 64 tokens (2026-11-30): greedy 1.96x, never below 1.2x "
        "(`auto` 1.29x); at temperature 0.8 1.79x, at least 0.91x (`auto` 1.10x)",
    ),
    "qwen2.5-coder-1.5b": MeasuredDefault(
        draft_model="qwen2.5-coder-0.5b",
        drafter=QSPEC.name,
        options={"length": 8},
        dtype="bfloat16",
        measured="two quiet cores, greedy, 55 prompts (2026-11-30). With AMX: chains by the draft model 1.52x "
        "(1.42-1.61) in int4, 2.29x (2.05-2.66) in bfloat16, qspec 2.26x (2.19-2.34). With AVX-512: qspec "
        "1.91x (1.86-1.98), at temperature 0.8 1.95x over 8; its first request waits 9 s",
    ),
}
NOTHING = MeasuredDefault()


def default_of(model: TextModel) -> MeasuredDefault:
    """What pays for a single prompt to a target, in its precision and on its device."""
    row = DEFAULTS.get(model.name, NOTHING) if model.device == "cpu" else NOTHING
    return row if row.dtype in (None, model.dtype) else replace(row, drafter=None, options={})


def draft_model_of(target: str) -> str | None:
    """The draft model that is published for a target."""
    return DEFAULTS.get(target, NOTHING).draft_model
