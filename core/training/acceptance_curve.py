"""The acceptance curves of several trained drafters side by side: how often a guess at each place of a draft is right,
of those that were reached (conditional) and of all drafts (unconditional).

Reads what training wrote: the curve.json of a run, or the JSON beside weights. Knows numbers and names alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import InvalidOption, OutriderError

_JUDGES = frozenset({"AcceptanceChance"})  # draft heads that draft nothing


@dataclass(frozen=True, kw_only=True)
class Places:
    """One drafter's acceptance by place in the draft."""

    name: str
    tokens_per_call: float
    conditional: tuple[float, ...]
    unconditional: tuple[float, ...]
    minutes: float | None = None  # of training

    @classmethod
    def of(cls, name: str, curve: Mapping[str, Any], minutes: Any = None) -> Places:
        """Of what outrider.core.training.simulated_acceptance.Curve.to_dict gives. Places that no draft reached are
        left out."""
        reached = [index for index, tried in enumerate(curve["tried"]) if tried]
        size = reached[-1] + 1 if reached else 0
        return cls(
            name=name,
            tokens_per_call=float(curve["tokens_per_call"]),
            conditional=tuple(map(float, curve["conditional"][:size])),
            unconditional=tuple(map(float, curve["unconditional"][:size])),
            minutes=None if minutes is None else float(minutes),
        )


def gathered(files: Iterable[Path]) -> list[Places]:
    """The curves in some files, the drafter that gets furthest first. Of a run's curve.json each drafter's best
    validation counts; of two files about one drafter the better."""
    best: dict[str, Places] = {}
    for file in files:
        for one in _read(Path(file)):
            if one.name not in best or one.tokens_per_call > best[one.name].tokens_per_call:
                best[one.name] = one
    return sorted(best.values(), key=lambda one: (-one.tokens_per_call, one.name))


def _read(file: Path) -> list[Places]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, list):
            return [
                Places.of(name, curve, row.get("minutes"))
                for row in found
                for name, curve in row["draft_heads"].items()
                if row.get("steps", 1)  # before the first step nothing was learned
                if name != "specdec-plus-plus"
            ]
        if found.get("architecture") in _JUDGES:
            return []
        about = found["provenance"]
        name = file.stem.rpartition(".")[2]  # weights that ship are named TARGET.DRAFTER
        return [Places.of(name, about["validation"], (about.get("done") or {}).get("minutes"))]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidOption(
            f"{file} is neither a run's curve.json nor the JSON beside trained weights ({reason})"
        ) from None


def table(found: Iterable[Places]) -> str:
    """As Markdown: conditional acceptance by place, and what drafts come to."""
    rows = list(found)
    deepest = max((len(one.conditional) for one in rows), default=0)
    lines = [
        "| drafter | tokens a call | " + " | ".join(f"place {place + 1}" for place in range(deepest)) + " |",
        "|---|" + "---|" * (deepest + 1),
    ]
    for one in rows:
        pairs = [f"{a:.0%} ({b:.0%})" for a, b in zip(one.conditional, one.unconditional, strict=True)]
        cells = [one.name, f"{one.tokens_per_call:.2f}", *pairs, *[""] * (deepest - len(pairs))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "At each place: right, of the guesses that were reached (of all drafts)."]) + "\n"


def figure(found: Iterable[Places]) -> Any:
    """Both curves of every drafter, as a matplotlib figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OutriderError("the picture needs matplotlib: pip install 'outrider[train]'") from None
    rows = list(found)
    made = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = made.subplots(1, 2, sharey=True)
    styles = ("-", "--", ":", "-.")
    for number, one in enumerate(rows):
        style = {"marker": "o", "markersize": 3.5, "color": f"C{number % 10}", "linestyle": styles[number // 10 % 4]}
        label = f"{one.name} ({one.tokens_per_call:.2f})"
        left.plot(range(1, len(one.conditional) + 1), one.conditional, label=label, **style)
        right.plot(range(1, len(one.unconditional) + 1), one.unconditional, label=label, **style)
    left.set(title="right, of the guesses that were reached", xlabel="place in the draft", ylabel="share", ylim=(0, 1))
    right.set(title="right, of all drafts", xlabel="place in the draft")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    if rows:
        right.legend(title="tokens a call", fontsize=8)
    return made


def drawn(files: Iterable[Path], out: Path) -> list[Places]:
    """One picture (by its suffix: .png, .svg, .pdf) and beside it the table, of the curves in some files."""
    found = gathered(files)
    if not found:
        raise InvalidOption("there are no curves in these files")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure(found).savefig(out, dpi=130)
    out.with_suffix(".md").write_text(table(found), encoding="utf-8")
    return found
