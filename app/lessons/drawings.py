"""Drawings of lessons that no other part of the app has: bars with intervals, distributions over a few words, and text
coloured by the source of its tokens. Pure functions; independent of notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from outrider.app.lessons.intervals import Interval
from outrider.app.lessons.timings import Timing
from outrider.app.viz import svg
from outrider.app.viz.token_styles import SERIES, STYLES, TIME_COLOURS, nodes_of
from outrider.core.trace import Step


def bars(title: str, values: Mapping[str, float | Interval], unit: str = "", base: float | None = None) -> svg.Drawing:
    """Draw one bar for each name, with a line for an interval; `base` is a dashed reference line."""
    rows = [
        (name, value.value, value.low, value.high) if isinstance(value, Interval) else (name, value, value, value)
        for name, value in values.items()
    ]
    longest = min(max([len(name) for name in values] + [20]), 30)
    return svg.bars(title, rows, SERIES[0], unit=unit, base=base, longest=longest)


_PARTS = {
    "drafting": "draft",
    "target pass": "target",
    "rule and bookkeeping": "rest",
}  # of a round: fields of its cost
_PART_COLOURS = dict(zip(_PARTS, (TIME_COLOURS["draft"], TIME_COLOURS["score"], TIME_COLOURS["rule"]), strict=True))


def rounds(timings: Sequence[Timing]) -> svg.Drawing:
    """Draw the length of each way's round by part, in rounds of plain decoding, and mark its tokens per target pass: it
    pays where the mark is to the right of the bar."""
    gap, start, stop = 24, 132, svg.WIDTH - 20
    scale = (stop - start) / max(max(timing.cost.total, timing.passes.value) for timing in timings)
    parts = []
    for index, timing in enumerate(timings):
        y, x = 6.0 + gap * index, float(start)
        parts.append(svg.label(start - 8, y + 12, svg.cut(timing.name, 20), anchor="end"))
        for part, field in _PARTS.items():
            share = getattr(timing.cost, field)
            tip = f"{timing.name}, {part}: {share:.2f} plain rounds"
            parts.append(svg.box(x, y, scale * share, 16, _PART_COLOURS[part], title=tip))
            x += scale * share
        at = start + scale * timing.passes.value
        parts.append(svg.stroke(at, y - 3, at, y + 19, opacity=1, more=' stroke-width="2.5"'))
    y, x = 10.0 + gap * len(timings), 8.0
    parts.append(svg.stroke(start + scale, 0, start + scale, y, opacity=0.6, more=' stroke-dasharray="3 3"'))
    for part, colour in _PART_COLOURS.items():
        parts += [svg.box(x, y + 6, 11, 11, colour), svg.label(x + 15, y + 16, part, anchor="start", size=10)]
        x += 28 + 5.4 * len(part)
    parts.append(svg.stroke(x + 4, y + 4, x + 4, y + 19, opacity=1, more=' stroke-width="2.5"'))
    parts.append(svg.label(x + 11, y + 16, "tokens per target pass", anchor="start", size=10))
    return svg.drawing(parts, svg.WIDTH, y + 24, "rounds, in rounds of plain decoding", scale=1.35)


def distributions(rows: Mapping[str, Sequence[float]], words: Sequence[str], *, stacked: bool = False) -> svg.Drawing:
    """Draw distributions over a few words, side by side or stacked."""
    top = max(map(sum, zip(*rows.values(), strict=True))) if stacked else max(map(max, rows.values()))
    plot = svg.Plot(" and ".join(rows), "the next word", (-0.5, len(words) - 0.5), top, "probability")
    width = 0.6 if stacked else 0.8 / len(rows)
    bottom = [0.0] * len(words)
    for index, (name, values) in enumerate(rows.items()):
        colour = SERIES[index % len(SERIES)]
        for x, (word, value) in enumerate(zip(words, values, strict=True)):
            left = x - 0.3 if stacked else x - 0.4 + index * width
            plot.bar(left, left + width * 0.94, bottom[x], bottom[x] + value, colour, f"{name}: {word} {value:.4f}")
            bottom[x] += value if stacked else 0.0
        plot.key(name, colour)
    return plot.drawn(list(enumerate(words)))


def token_strip(
    steps: Sequence[Step], name: Callable[[int], str], *, rejected: bool = True, columns: int = 96
) -> svg.Drawing:
    """Draw the text with each token coloured by its source; rejected drafts are struck through in place."""
    char_width, line_height, column, line = 6.7, 21.0, 0, 0
    parts, shown = [], set()
    for step in steps:
        for kind, token, _, _ in nodes_of(step):
            if kind == "rejected" and not rejected:
                continue
            shown.add(kind)
            look, text = STYLES[kind], svg.visible(name(token))
            if column + len(text) > columns:
                column, line = 0, line + 1
            x, y, width = column * char_width, line * line_height, len(text) * char_width
            parts.append(svg.box(x, y, width - 1, 17, look.colour + "44", title=look.description, round_=3))
            struck = ' text-decoration="line-through"' if kind == "rejected" else ""
            fit = f' textLength="{width - 2:.1f}" lengthAdjust="spacingAndGlyphs" xml:space="preserve"'
            mono = ' font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
            parts.append(
                svg.label(x + 0.5, y + 12.5, text, anchor="start", dim=kind == "rejected", more=struck + fit + mono)
            )
            parts.append(svg.box(x, y + 15.5, width - 1, 2, look.colour))
            column += len(text)
    y, x = (line + 1) * line_height + 12, 0.0
    for kind, look in STYLES.items():
        if kind in shown:
            parts.append(svg.box(x, y - 9, 11, 11, look.colour))
            parts.append(svg.label(x + 15, y + 1, kind, anchor="start"))
            x += 28 + 7 * len(kind)
    return svg.drawing(parts, columns * char_width, y + 6, "tokens by source", scale=1.1)
