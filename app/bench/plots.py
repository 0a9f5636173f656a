"""Plots of `bench text`: speed, tokens per target pass, acceptance by position, predicted against measured speed.
matplotlib belongs to an extra and is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.app.bench.tables import name_of
from outrider.core.errors import InvalidOption, install_command

Report = Mapping[str, Any]
_OURS, _THEIRS, _PREDICTED = "#2f6f9f", "#b0b0b0", "#e08a2e"


def check() -> None:
    """Raise InvalidOption unless matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise InvalidOption(f"plots need matplotlib: {install_command('bench')}")


def draw_all(report: Report, folder: Path) -> list[Path]:
    """Write every plot for which the report has figures, and return their files."""
    from matplotlib.figure import Figure

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidOption(f"cannot create the folder {folder}: {error.strerror}; choose another") from None
    plots: dict[str, Callable[[Report, Any], bool]] = {
        "speed": speed,
        "tokens-per-call": tokens_per_pass,
        "acceptance": acceptance,
        "predicted": predicted,
    }
    files = []
    for name, plot in plots.items():
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        if plot(report, figure.subplots()):
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=144)
            files.append(path)
    return files


def _bars(axes: Any, rows: Sequence[Mapping[str, Any]], key: str, label: str, spread: bool = False) -> None:
    names = [name_of(row) for row in rows]
    values = [row[key] for row in rows]
    error = None
    if spread:
        low = [row[key] - row[f"{key}_low"] for row in rows]
        high = [row[f"{key}_high"] - row[key] for row in rows]
        error = [low, high]
    colours = [_OURS if row["engine"] == "outrider" else _THEIRS for row in rows]
    axes.barh(names, values, xerr=error, color=colours, capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def speed(report: Report, axes: Any) -> bool:
    rows = [*report["rows"], *report["peers"]]
    _bars(axes, rows, "tokens_per_second", "tokens per second: median over prompts, and quartiles", spread=True)
    return True


def tokens_per_pass(report: Report, axes: Any) -> bool:
    rows = [row for row in report["rows"] if row["tokens_per_pass"] is not None]
    _bars(axes, rows, "tokens_per_pass", "tokens per target pass")
    return bool(rows)


def acceptance(report: Report, axes: Any) -> bool:
    rows = [row for row in report["rows"] if row.get("by_position")]
    for row in rows:
        places = range(1, len(row["by_position"]) + 1)
        (line,) = axes.plot(places, row["by_position"], marker="o", label=name_of(row))
        axes.plot(places, row["conditional"], marker=".", linestyle="--", color=line.get_color(), alpha=0.6)
    axes.set_xlabel("position in the draft (dashed: if all earlier positions were accepted)")
    axes.set_ylabel("accepted")
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if rows:
        axes.legend()
    return bool(rows)


def predicted(report: Report, axes: Any) -> bool:
    rows = [row for row in report["rows"] if row.get("predicted_tokens_per_second")]
    for row in rows:
        x, y = row["predicted_tokens_per_second"], row["decode_tokens_per_second"]
        axes.scatter([x], [y], color=_PREDICTED, zorder=2)
        axes.annotate(name_of(row), (x, y), textcoords="offset points", xytext=(6, 4))
    limit = 1.1 * max(
        (max(row["predicted_tokens_per_second"], row["decode_tokens_per_second"]) for row in rows), default=1
    )
    axes.plot([0, limit], [0, limit], color=_THEIRS, zorder=1)
    axes.margins(x=0.12)  # room for the names
    axes.set_xlabel("predicted tokens per second, from acceptance and the cost of passes")
    axes.set_ylabel("measured tokens per second (without prefill)")
    return bool(rows)
