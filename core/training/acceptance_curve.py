"""Acceptance curves: how often the token at each position of a draft is accepted, among drafts that reached the
position (conditional) and among all drafts (unconditional).

`walk` computes a curve from known answers without the decoding loop. For greedy chains it is exact: a draft is accepted
while it agrees with the answer, and the next one starts after the token that follows. The other functions read training
results (a run's curve.json, or the JSON beside weights) and compare drafters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.core.assets.files import write_atomically
from outrider.core.errors import InvalidOption, OutriderError, install_command

_NO_DRAFTS = frozenset({"AcceptanceChance"})  # draft heads that draft nothing


@dataclass(frozen=True)
class Curve:
    """Counts over simulated drafts."""

    calls: int  # target passes
    tokens: int
    tried: tuple[int, ...]  # by position in the draft: how often all guesses before it were right
    right: tuple[int, ...]  # by position: how often it was right as well

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.calls if self.calls else 1.0

    @property
    def conditional(self) -> tuple[float, ...]:
        """The share of right guesses at each position, among those whose predecessors were right."""
        return tuple(right / tried if tried else 0.0 for right, tried in zip(self.right, self.tried, strict=True))

    @property
    def unconditional(self) -> tuple[float, ...]:
        """The share of drafts that are right up to each position."""
        return tuple(right / self.calls if self.calls else 0.0 for right in self.right)

    def __add__(self, other: Curve) -> Curve:
        tried = tuple(map(sum, zip(self.tried, other.tried, strict=True)))
        right = tuple(map(sum, zip(self.right, other.right, strict=True)))
        return Curve(self.calls + other.calls, self.tokens + other.tokens, tried, right)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "tokens_per_pass": self.tokens_per_pass,
            "conditional": self.conditional,
            "unconditional": self.unconditional,
        }


def walk(hits: Tensor, answer: Tensor) -> Curve:
    """Simulate drafting along each answer, from `DraftHead.hits` [B, T, K] and `Batch.answer` [B, T]."""
    depth = hits.shape[2]
    runs = hits.long().cumprod(-1).sum(-1).tolist()  # [B, T] accepted in a row
    calls, tokens, tried, right = 0, 0, [0] * depth, [0] * depth
    for row, counts in enumerate(answer.tolist()):
        positions = [position for position, counted in enumerate(counts) if counted]
        if not positions:
            continue
        position, last = positions[0], positions[-1]
        while position <= last:
            room = last - position  # guesses beyond the answer's end are unknown
            run = min(runs[row][position], room)
            for index in range(min(run + 1, depth, room)):
                tried[index] += 1
                right[index] += index < run
            calls, tokens, position = calls + 1, tokens + run + 1, position + run + 1
    return Curve(calls, tokens, tuple(tried), tuple(right))


@dataclass(frozen=True, kw_only=True)
class DrafterCurve:
    """One drafter's acceptance by position in the draft."""

    name: str
    tokens_per_pass: float
    conditional: tuple[float, ...]
    unconditional: tuple[float, ...]
    minutes: float | None = None  # of training

    @classmethod
    def of(cls, name: str, curve: Mapping[str, Any], minutes: Any = None) -> DrafterCurve:
        """From `Curve.to_dict`, without the positions that no draft reached."""
        reached = [index for index, tried in enumerate(curve["tried"]) if tried]
        size = reached[-1] + 1 if reached else 0
        return cls(
            name=name,
            tokens_per_pass=float(curve["tokens_per_pass"]),
            conditional=tuple(map(float, curve["conditional"][:size])),
            unconditional=tuple(map(float, curve["unconditional"][:size])),
            minutes=None if minutes is None else float(minutes),
        )


def gathered(files: Iterable[Path]) -> list[DrafterCurve]:
    """The best curve of each drafter in some files (curve.json of runs, JSON beside weights), by tokens per target
    pass, the highest first."""
    best: dict[str, DrafterCurve] = {}
    for file in files:
        for curve in _read(Path(file)):
            if curve.name not in best or curve.tokens_per_pass > best[curve.name].tokens_per_pass:
                best[curve.name] = curve
    return sorted(best.values(), key=lambda curve: (-curve.tokens_per_pass, curve.name))


def _read(file: Path) -> list[DrafterCurve]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(data, list):
            return [
                DrafterCurve.of(name, curve, row.get("minutes"))
                for row in data
                for name, curve in row["models"].items()
                if row.get("steps", 1)  # skip the validation before training
                if curve.get("architecture") not in _NO_DRAFTS
            ]
        if data.get("architecture") in _NO_DRAFTS:
            return []
        provenance = data["provenance"]
        name = file.stem.rpartition(".")[2]  # shipped weights are named TARGET.DRAFTER
        return [DrafterCurve.of(name, provenance["validation"], (provenance.get("done") or {}).get("minutes"))]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidOption(
            f"{file} is neither a run's curve.json nor the JSON beside trained weights ({reason})"
        ) from None


NOTE = "Acceptance by position: of the guesses reached (of all drafts)."


def table(curves: Iterable[DrafterCurve]) -> str:
    """A Markdown table of tokens per target pass and acceptance by position."""
    titles, *rows = cells(curves)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", NOTE]) + "\n"


def cells(curves: Iterable[DrafterCurve]) -> list[list[str]]:
    """The titles of that table, and its rows."""
    rows = list(curves)
    depth = max((len(curve.conditional) for curve in rows), default=0)
    lines = [["drafter", "tokens per pass", *(f"position {index + 1}" for index in range(depth))]]
    for curve in rows:
        pairs = [f"{a:.0%} ({b:.0%})" for a, b in zip(curve.conditional, curve.unconditional, strict=True)]
        lines.append([curve.name, f"{curve.tokens_per_pass:.2f}", *pairs, *[""] * (depth - len(pairs))])
    return lines


def figure(curves: Iterable[DrafterCurve]) -> Any:
    """A matplotlib figure of both curves of every drafter."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OutriderError(f"the figure needs matplotlib: {install_command('train')}") from None
    rows = list(curves)
    plot = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = plot.subplots(1, 2, sharey=True)
    styles = ("-", "--", ":", "-.")
    for number, curve in enumerate(rows):
        style = {"marker": "o", "markersize": 3.5, "color": f"C{number % 10}", "linestyle": styles[number // 10 % 4]}
        label = f"{curve.name} ({curve.tokens_per_pass:.2f})"
        left.plot(range(1, len(curve.conditional) + 1), curve.conditional, label=label, **style)
        right.plot(range(1, len(curve.unconditional) + 1), curve.unconditional, label=label, **style)
    left.set(title="accepted, of the guesses reached", xlabel="position in the draft", ylabel="share", ylim=(0, 1))
    right.set(title="accepted, of all drafts", xlabel="position in the draft")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    if rows:
        right.legend(title="tokens per pass", fontsize=8)
    return plot


def drawn(files: Iterable[Path], out: Path) -> list[DrafterCurve]:
    """Write a figure (.png, .svg or .pdf) of the curves in some files, and beside it their table."""
    curves = gathered(files)
    if not curves:
        raise InvalidOption("there are no curves in these files")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure(curves).savefig(out, dpi=130)
    write_atomically(out.with_suffix(".md"), table(curves))
    return curves
