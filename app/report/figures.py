"""Plots of the summary report: tokens per target pass and speedup of every method, one panel for each modality. Draws
nothing if matplotlib, which belongs to an extra, is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_COLOURS = {0.0: "#2f6f9f", 1.0: "#e08a2e"}


def draw(methods: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> list[Path]:
    """Write the plots of `methods` (results by modality) into a folder, and return their files."""
    if not methods or find_spec("matplotlib") is None:
        return []
    from matplotlib.figure import Figure

    rows = max(len(result["rows"]) for group in methods.values() for result in group)
    files = []
    for name, key, label in (
        ("tokens-per-call", "tokens_per_pass", "tokens per target pass"),
        ("speedup", "speedup", "speedup over plain decoding, with 95 % intervals"),
    ):
        figure = Figure(figsize=(5.5 * len(methods), 1.6 + 0.24 * rows), layout="constrained")
        for axes, (modality, group) in zip(
            figure.subplots(1, len(methods), squeeze=False)[0], methods.items(), strict=True
        ):
            _panel(axes, group, key)
            axes.set(title=modality, xlabel=label)
        figure.axes[0].legend(fontsize="small")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110)
        files.append(path)
    return files


def _panel(axes: Any, results: Sequence[Mapping[str, Any]], key: str) -> None:
    """One line for each method, sorted by the value at the first temperature, with a marker for each temperature."""
    first: dict[str, float] = {}
    for result in results:
        for row in result["rows"]:
            if row[key] is not None:
                first.setdefault(str(row["drafter"]), row[key])
    order = sorted(first, key=lambda name: first[name])
    for result in results:
        temperature = float(result["settings"]["temperature"])
        rows = [row for row in result["rows"] if row[key] is not None]
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
