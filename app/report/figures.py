"""Pictures of the report of all: tokens of a call and speedups of every method, a panel a modality.

Knows the report's JSON and matplotlib, which is an extra: without it nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_COLOURS = {0.0: "#2f6f9f", 1.0: "#e08a2e"}


def draw(methods: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> list[Path]:
    """The pictures' files."""
    if not methods or find_spec("matplotlib") is None:
        return []
    from matplotlib.figure import Figure

    most = max(len(one["rows"]) for some in methods.values() for one in some)
    found = []
    for name, key, label in (
        ("tokens-per-call", "tokens_per_pass", "tokens of one call of the target"),
        ("speedup", "speedup", "times plain decoding's speed, with 95 % intervals"),
    ):
        figure = Figure(figsize=(5.5 * len(methods), 1.6 + 0.24 * most), layout="constrained")
        for axes, (modality, some) in zip(
            figure.subplots(1, len(methods), squeeze=False)[0], methods.items(), strict=True
        ):
            _panel(axes, some, key)
            axes.set(title=modality, xlabel=label)
        figure.axes[0].legend(fontsize="small")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110)
        found.append(path)
    return found


def _panel(axes: Any, some: Sequence[Mapping[str, Any]], key: str) -> None:
    """A row for each method, best first at the first temperature, and a mark for each temperature."""
    best: dict[str, float] = {}
    for one in some:
        for row in one["rows"]:
            if row[key] is not None:
                best.setdefault(str(row["drafter"]), row[key])
    order = sorted(best, key=lambda name: best[name])
    for one in some:
        temperature = float(one["settings"]["temperature"])
        rows = [row for row in one["rows"] if row[key] is not None]
        values = [row[key] for row in rows]
        spread = None
        if f"{key}_low" in rows[0]:
            spread = [[row[key] - row[f"{key}_low"] for row in rows], [row[f"{key}_high"] - row[key] for row in rows]]
        places = [order.index(str(row["drafter"])) for row in rows]
        colour = _COLOURS.get(temperature, "0.5")
        label = f"temperature {temperature:g}"
        axes.errorbar(values, places, xerr=spread, fmt="o", markersize=4, capsize=2, color=colour, label=label)
    axes.axvline(1.0, color="0.8", zorder=0)
    axes.set_yticks(range(len(order)), order, fontsize="small")
    axes.grid(axis="x", alpha=0.3)
