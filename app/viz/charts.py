"""Charts of a whole trace: acceptance, tokens of each call, speed, where the time went; of several methods; of theory.

Pure functions of steps, summaries and points, on a page and in a notebook alike. Knows nothing of tokens' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from outrider.app.viz.svg import Drawing, Plot, bars, box, drawing, label, number, stroke
from outrider.app.viz.token_styles import LOOKS, PARTS, SERIES, UNTRIED
from outrider.core.trace import SOURCES, Source, Step, Summary, Times

_BARS = 160  # calls of which each has a bar of its own


def by_position(summary: Summary) -> Drawing:
    """How often each position of a draft was accepted: of all drafts, and of those that got there."""
    count = len(summary.by_position)
    plot = Plot("acceptance by position", "position in the draft", (0.4, max(count, 1) + 0.6), 1.0, percent=True)
    for place, (share, reached) in enumerate(zip(summary.by_position, summary.conditional, strict=True), 1):
        said = f"position {place}: accepted in {share:.1%} of drafts, {reached:.1%} where it was reached"
        plot.bar(place - 0.35, place + 0.35, 0, share, LOOKS["drafted"].colour, said)
    plot.curve(list(enumerate(summary.conditional, 1)), SERIES[1], dots=True)
    plot.key("of all drafts", LOOKS["drafted"].colour)
    plot.key("where reached", SERIES[1])
    return plot.drawn([(place, str(place)) for place in _some(range(1, count + 1))])


def histogram(summary: Summary) -> Drawing:
    """How many guesses a call accepted."""
    counts = summary.histogram
    plot = Plot(
        "guesses accepted a call",
        "guesses accepted by a call",
        (-0.6, max(len(counts), 2) - 0.4),
        max(counts, default=1),
        "calls",
    )
    for accepted, calls in enumerate(counts):
        plot.bar(
            accepted - 0.35, accepted + 0.35, 0, calls, LOOKS["drafted"].colour, f"{accepted} accepted: {calls} calls"
        )
    return plot.drawn([(place, str(place)) for place in _some(range(len(counts)))])


@dataclass(frozen=True)
class Call:
    """What one call of the target brought, or several of them taken together."""

    first: int
    last: int
    sources: Mapping[Source, float]  # tokens a call, of each source
    drafted: float  # how many the draft had


def calls(steps: Sequence[Step], most: int = _BARS) -> list[Call]:
    """The calls of a trace; of more than `most`, neighbours taken together."""
    size = -(-len(steps) // most) if steps else 1
    found = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        sources: dict[Source, float] = {
            name: sum(step.sources.count(name) for step in part) / len(part) for name in SOURCES
        }
        found.append(Call(start, start + len(part) - 1, sources, sum(len(step.drafted) for step in part) / len(part)))
    return found


def per_step(steps: Sequence[Step], current: int | None = None) -> Drawing:
    """What each call of the target brought, by who wrote it, and the running mean: tokens per call."""
    found = calls(steps)
    most = max((sum(one.sources.values()) for one in found), default=1)
    plot = Plot("tokens of each call", "call of the target", (-0.5, max(len(steps), 1) - 0.5), most, "tokens")
    for one in found:
        low = 0.0
        for source in SOURCES:
            high = low + one.sources[source]
            if high > low:
                which = f"call {one.first + 1}" + (f" to {one.last + 1}" if one.last > one.first else "")
                said = f"{which}: {number(one.sources[source])} {source} of {number(one.drafted)} drafted"
                plot.bar(one.first - 0.42, one.last + 0.42, low, high, LOOKS[source].colour, said)
            low = high
    plot.curve(running(steps), "currentColor")
    if current is not None:
        x = plot.at(current)
        plot.parts.append(stroke(x, 10, x, 156, opacity=0.9, more=' stroke-dasharray="2 3"'))
    plot.key("tokens per call so far", "currentColor")
    return plot.drawn([(place, str(place + 1)) for place in _some(range(len(steps)))])


def running(steps: Sequence[Step]) -> list[tuple[float, float]]:
    """Tokens per call after each call."""
    found, tokens_ = [], 0
    for place, step in enumerate(steps):
        tokens_ += len(step.emitted)
        found.append((float(place), tokens_ / (place + 1)))
    return found


def speed(steps: Sequence[Step], span: int = 8) -> Drawing:
    """Tokens a second over the last few calls, along the time."""
    points, at = [], 0.0
    for place, step in enumerate(steps):
        at += step.times.total
        part = steps[max(place - span + 1, 0) : place + 1]
        seconds = sum(one.times.total for one in part)
        if seconds > 0:
            points.append((at, sum(len(one.emitted) for one in part) / seconds))
    plot = Plot(
        "speed",
        f"seconds (mean of {span} calls)",
        (0, at or 1),
        max((y for _, y in points), default=1),
        "tokens a second",
    )
    plot.curve(points, SERIES[0])
    return plot.drawn()


def time_split(times: Times) -> Drawing:
    """Where the time went."""
    total, x, parts = times.total or 1.0, 0.0, []
    for place, part in enumerate(fields(times)):
        seconds, colour = getattr(times, part.name), PARTS[part.name]
        width = 420 * seconds / total
        parts.append(
            box(10 + x, 6, width, 26, colour, title=f"{part.name}: {1e3 * seconds:.1f} ms, {seconds / total:.1%}")
        )
        x += width
        left = 10 + 106 * place
        parts.append(box(left, 43, 10, 10, colour))
        parts.append(label(left + 15, 52, f"{part.name} {seconds / total:.0%}", anchor="start"))
        parts.append(label(left + 15, 67, f"{1e3 * seconds:.0f} ms", anchor="start", size=10, dim=True))
    return drawing(parts, 440, 74, "where the time went", scale=1.35)


def _some(places: Sequence[int], most: int = 10) -> list[int]:
    """Some of many, evenly: for the ticks of an axis."""
    return list(places[:: -(-len(places) // most) or 1])


# ---- several methods, and theory


def compared(
    rows: Sequence[Mapping[str, Any]], key: str, title: str, unit: str = "", base: float | None = None
) -> Drawing:
    """Bars of one figure of a benchmark's rows, with where it was seen if that is there."""
    found = []
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float):
            low, high = row.get(f"{key}_low") or value, row.get(f"{key}_high") or value
            found.append((str(row["drafter"]), float(value), float(low), float(high)))
    return bars(title, found, SERIES[0], unit=unit, base=base)


def against(points: Sequence[tuple[str, float, float]], title: str = "predicted and measured") -> Drawing:
    """Predicted across, measured upwards, the line on which both agree."""
    most = 1.1 * max((max(x, y) for _, x, y in points), default=1.0)
    plot = Plot(title, "predicted tokens a second", (0, most), most, "measured")
    plot.curve([(0, 0), (most, most)], UNTRIED, dash="4 4")
    for place, (name, x, y) in enumerate(points):
        plot.mark(x, y, name, SERIES[place % len(SERIES)], lift=(7, -15, 21, -29)[place % 4])
    return plot.drawn()


def curves(
    title: str,
    across: str,
    found: Mapping[str, Sequence[tuple[float, float]]],
    *,
    up: str = "",
    here: tuple[float, float, str] | None = None,
    level: float | None = None,
) -> Drawing:
    """Several curves, a point that is looked at, and a level to compare with."""
    points = [point for line in found.values() for point in line]
    low, high = min((x for x, _ in points), default=0), max((x for x, _ in points), default=1)
    plot = Plot(title, across, (low, high), max([y for _, y in points] + ([level] if level else [])), up)
    if level is not None:
        plot.curve([(low, level), (high, level)], UNTRIED, dash="4 4")
    for place, (name, line) in enumerate(found.items()):
        dash = ("", "6 3", "2 3", "8 3 2 3")[place % 4]
        plot.curve(line, SERIES[place % len(SERIES)], dash=dash)
        plot.key(name, SERIES[place % len(SERIES)], dash)
    if here is not None:
        plot.mark(*here, SERIES[5])
    return plot.drawn()
