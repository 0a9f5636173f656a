"""Charts of a trace (acceptance, tokens per target pass, speed, time), of several methods, and of theory.

Pure functions of steps, summaries and points, for the page and for notebooks. Independent of the texts of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from outrider.app.viz.svg import Drawing, Plot, bars, box, drawing, label, number
from outrider.app.viz.token_styles import SERIES, STYLES, TIME_COLOURS, UNTRIED
from outrider.core.trace import SOURCES, Source, Step, Summary, Times

_BARS = 160  # bars of a chart at most


def by_position(summary: Summary) -> Drawing:
    """The acceptance rate of each position of a draft: of all drafts, and of those whose earlier positions were
    accepted."""
    shares, where_reached = summary.by_position[:_BARS], summary.conditional[:_BARS]
    count, name = len(shares), "position in the draft" + _of(len(summary.by_position))
    plot = Plot("acceptance by position", name, (0.4, max(count, 1) + 0.6), 1.0, percent=True)
    for position, (share, reached) in enumerate(zip(shares, where_reached, strict=True), 1):
        tip = f"position {position}: accepted in {share:.1%} of drafts, {reached:.1%} where it was reached"
        plot.bar(position - 0.35, position + 0.35, 0, share, STYLES["drafted"].colour, tip)
    plot.curve(list(enumerate(where_reached, 1)), SERIES[1], dots=True)
    plot.key("of all drafts", STYLES["drafted"].colour)
    plot.key("where reached", SERIES[1])
    return plot.drawn([(position, str(position)) for position in _ticks(range(1, count + 1))])


def _of(count: int) -> str:
    return f" (the first {_BARS} of {count})" if count > _BARS else ""


def histogram(summary: Summary) -> Drawing:
    """How many target passes accepted 0, 1, 2, ... draft tokens."""
    counts = summary.histogram[:_BARS]
    plot = Plot(
        "accepted tokens per target pass",
        "accepted guesses" + _of(len(summary.histogram)),
        (-0.6, max(len(counts), 2) - 0.4),
        max(counts, default=1),
        "target passes",
    )
    for accepted, passes in enumerate(counts):
        tip = f"{accepted} accepted: {passes} target passes"
        plot.bar(accepted - 0.35, accepted + 0.35, 0, passes, STYLES["drafted"].colour, tip)
    return plot.drawn([(accepted, str(accepted)) for accepted in _ticks(range(len(counts)))])


@dataclass(frozen=True)
class PassGroup:
    """The means of one target pass, or of several neighbouring ones."""

    first: int
    last: int
    sources: Mapping[Source, float]  # tokens per pass by source
    drafted: float  # draft tokens per pass


def pass_groups(steps: Sequence[Step], limit: int = _BARS) -> list[PassGroup]:
    """The target passes of a trace, neighbours grouped so that there are at most `limit` groups."""
    size = -(-len(steps) // limit) if steps else 1
    groups = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        sources: dict[Source, float] = {
            name: sum(step.sources.count(name) for step in part) / len(part) for name in SOURCES
        }
        drafted = sum(len(step.drafted) for step in part) / len(part)
        groups.append(PassGroup(start, start + len(part) - 1, sources, drafted))
    return groups


def per_step(steps: Sequence[Step]) -> Drawing:
    """The tokens of each target pass by source, and the running mean of tokens per target pass."""
    groups = pass_groups(steps)
    top = max((sum(group.sources.values()) for group in groups), default=1)
    plot = Plot("tokens of each target pass", "target pass", (-0.5, max(len(steps), 1) - 0.5), top, "tokens")
    for group in groups:
        low = 0.0
        for source in SOURCES:
            high = low + group.sources[source]
            if high > low:
                passes = f"pass {group.first + 1}" + (f" to {group.last + 1}" if group.last > group.first else "")
                tip = f"{passes}: {number(group.sources[source])} {source} of {number(group.drafted)} drafted"
                plot.bar(group.first - 0.42, group.last + 0.42, low, high, STYLES[source].colour, tip)
            low = high
    plot.curve(running_mean(steps), "currentColor")
    plot.key("mean so far", "currentColor")
    return plot.drawn([(index, str(index + 1)) for index in _ticks(range(len(steps)))])


def running_mean(steps: Sequence[Step]) -> list[tuple[float, float]]:
    """Tokens per target pass up to each step."""
    points, tokens = [], 0
    for index, step in enumerate(steps):
        tokens += len(step.emitted)
        points.append((float(index), tokens / (index + 1)))
    return points


def speed(steps: Sequence[Step], span: int = 8) -> Drawing:
    """Tokens per second over time, as a moving mean over `span` target passes."""
    points, now = [], 0.0
    for index, step in enumerate(steps):
        now += step.times.total
        part = steps[max(index - span + 1, 0) : index + 1]
        seconds = sum(other.times.total for other in part)
        if seconds > 0:
            points.append((now, sum(len(other.emitted) for other in part) / seconds))
    plot = Plot(
        "speed",
        f"seconds (mean of {span} target passes)",
        (0, now or 1),
        max((y for _, y in points), default=1),
        "tokens / s",
    )
    plot.curve(points, SERIES[0])
    return plot.drawn()


def time_split(times: Times) -> Drawing:
    """The time spent on drafting, scoring, the rule and the rest."""
    total, x, parts = times.total or 1.0, 0.0, []
    for index, part in enumerate(fields(times)):
        seconds, colour = getattr(times, part.name), TIME_COLOURS[part.name]
        width = 420 * seconds / total
        parts.append(
            box(10 + x, 6, width, 26, colour, title=f"{part.name}: {1e3 * seconds:.1f} ms, {seconds / total:.1%}")
        )
        x += width
        left = 10 + 106 * index
        parts.append(box(left, 43, 10, 10, colour))
        parts.append(label(left + 15, 52, f"{part.name} {seconds / total:.0%}", anchor="start"))
        parts.append(label(left + 15, 67, f"{1e3 * seconds:.0f} ms", anchor="start", size=10, dim=True))
    return drawing(parts, 440, 74, "time by part of a target pass", scale=1.35)


def _ticks(positions: Sequence[int], limit: int = 10) -> list[int]:
    """At most `limit` evenly spaced positions for the ticks of an axis."""
    return list(positions[:: -(-len(positions) // limit) or 1])


# ---- several methods, and theory


def benchmark_bars(
    rows: Sequence[Mapping[str, Any]], key: str, title: str, unit: str = "", base: float | None = None
) -> Drawing:
    """Bars of one column of a benchmark's rows, with intervals where the rows have `KEY_low` and `KEY_high`."""
    data = []
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float):
            low, high = row.get(f"{key}_low") or value, row.get(f"{key}_high") or value
            data.append((str(row["drafter"]), float(value), float(low), float(high)))
    return bars(title, data, SERIES[0], unit=unit, base=base)


def predicted_and_measured(
    points: Sequence[tuple[str, float, float]], title: str = "predicted and measured speed"
) -> Drawing:
    """A scatter plot of (name, predicted, measured), with the line on which both are equal."""
    top = 1.1 * max((max(x, y) for _, x, y in points), default=1.0)
    plot = Plot(title, "predicted tokens / s", (0, top), top, "measured tokens / s")
    plot.curve([(0, 0), (top, top)], UNTRIED, dash="4 4")
    for index, (name, x, y) in enumerate(points):
        plot.mark(x, y, name, SERIES[index % len(SERIES)], lift=(7, -15, 21, -29)[index % 4])
    return plot.drawn()


def curves(
    title: str,
    x_label: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    y_label: str = "",
    here: tuple[float, float, str] | None = None,
    level: float | None = None,
) -> Drawing:
    """Several curves; optionally a marked point (x, y, label) and a dashed level to compare with."""
    points = [point for line in lines.values() for point in line]
    low, high = min((x for x, _ in points), default=0), max((x for x, _ in points), default=1)
    plot = Plot(title, x_label, (low, high), max([y for _, y in points] + ([level] if level else [])), y_label)
    if level is not None:
        plot.curve([(low, level), (high, level)], UNTRIED, dash="4 4")
    for index, (name, line) in enumerate(lines.items()):
        dash = ("", "6 3", "2 3", "8 3 2 3")[index % 4]
        plot.curve(line, SERIES[index % len(SERIES)], dash=dash)
        plot.key(name, SERIES[index % len(SERIES)], dash)
    if here is not None:
        plot.mark(*here, SERIES[5])
    return plot.drawn()
