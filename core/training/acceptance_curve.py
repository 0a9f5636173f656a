"""Acceptance curves: how often the token at each position of a draft is accepted, of the drafts that reached the
position (conditional) and of all drafts (unconditional).

`walk` computes a curve from known answers without running the decoding loop; for greedy decoding and chains it is what
the loop does: a draft is followed while it agrees with the answer, and the next one starts behind the first token after
that. The rest reads what training wrote (a run's curve.json, or the JSON beside weights) and compares drafters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.core.errors import InvalidOption, OutriderError

_NO_DRAFTS = frozenset({"AcceptanceChance"})  # draft heads that draft nothing


@dataclass(frozen=True)
class Curve:
    """What chains of drafts would have come to."""

    calls: int
    tokens: int
    tried: tuple[int, ...]  # by place in the draft: how often all guesses before it were right
    right: tuple[int, ...]  # ... and it was too

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.calls if self.calls else 1.0

    @property
    def conditional(self) -> tuple[float, ...]:
        """The share of right guesses at each place, of those whose predecessors were right."""
        return tuple(right / tried if tried else 0.0 for right, tried in zip(self.right, self.tried, strict=True))

    @property
    def unconditional(self) -> tuple[float, ...]:
        """The share of drafts that got so far."""
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
    """hits [B, T, K] and answer [B, T] as Draft head.hits and Batch have them: go through each answer draft by
    draft."""
    depth = hits.shape[2]
    runs = hits.long().cumprod(-1).sum(-1).tolist()  # [B, T] accepted in a row
    calls, tokens, tried, right = 0, 0, [0] * depth, [0] * depth
    for row, counts in enumerate(answer.tolist()):
        places = [place for place, one in enumerate(counts) if one]
        if not places:
            continue
        place, last = places[0], places[-1]
        while place <= last:
            room = last - place  # a guess beyond the answer's end can't be judged
            run = min(runs[row][place], room)
            for depth_ in range(min(run + 1, depth, room)):
                tried[depth_] += 1
                right[depth_] += depth_ < run
            calls, tokens, place = calls + 1, tokens + run + 1, place + run + 1
    return Curve(calls, tokens, tuple(tried), tuple(right))


@dataclass(frozen=True, kw_only=True)
class Places:
    """One drafter's acceptance by place in the draft."""

    name: str
    tokens_per_pass: float
    conditional: tuple[float, ...]
    unconditional: tuple[float, ...]
    minutes: float | None = None  # of training

    @classmethod
    def of(cls, name: str, curve: Mapping[str, Any], minutes: Any = None) -> Places:
        """Of what `Curve.to_dict` gives, without the positions that no draft reached."""
        reached = [index for index, tried in enumerate(curve["tried"]) if tried]
        size = reached[-1] + 1 if reached else 0
        return cls(
            name=name,
            tokens_per_pass=float(curve["tokens_per_pass"]),
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
            if one.name not in best or one.tokens_per_pass > best[one.name].tokens_per_pass:
                best[one.name] = one
    return sorted(best.values(), key=lambda one: (-one.tokens_per_pass, one.name))


def _read(file: Path) -> list[Places]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, list):
            return [
                Places.of(name, curve, row.get("minutes"))
                for row in found
                for name, curve in row["models"].items()
                if row.get("steps", 1)  # before the first step nothing was learned
                if curve.get("architecture") not in _NO_DRAFTS
            ]
        if found.get("architecture") in _NO_DRAFTS:
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
        cells = [one.name, f"{one.tokens_per_pass:.2f}", *pairs, *[""] * (deepest - len(pairs))]
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
        label = f"{one.name} ({one.tokens_per_pass:.2f})"
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
