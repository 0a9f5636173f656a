"""Small drawings as SVG text: shapes, plots with axes, bars; and the escaping of text for HTML.

Lines and letters use the colour of the surrounding text, so that drawings work on light and dark backgrounds. They
contain no scripts and load nothing. Independent of traces.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")  # Unicode categories: control, format, surrogate, private, separators
_SYMBOLS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
_TEMPLATE = str.maketrans({"$": "&#36;", "{": "&#123;", "}": "&#125;", "`": "&#96;"})  # Gradio's HTML is a template
WIDTH, HEIGHT = 440, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 10, 12, 34
_POINTS = 2000  # of a curve


class Drawing(str):
    """Safe HTML or SVG; notebooks display it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)


def visible(text: str) -> str:
    """The text with control, format and other invisible characters replaced by visible symbols."""
    result = []
    for character in text:
        if character in _SYMBOLS:
            result.append(_SYMBOLS[character])
        elif character not in " \u200c\u200d" and unicodedata.category(character) in _INVISIBLE:
            code = ord(character)
            result.append(chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"⟨{code:04X}⟩")
        else:
            result.append(character)
    return "".join(result)


def safe(text: object) -> str:
    """The text escaped for HTML elements and attributes, and for templates."""
    return html.escape(visible(str(text)), quote=True).translate(_TEMPLATE)


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def label(
    x: float, y: float, text: object, *, anchor: str = "middle", size: float = 11, more: str = "", dim: bool = False
) -> str:
    faint = ' opacity=".65"' if dim else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" fill="currentColor"{faint}{more}>'
        f"{safe(text)}</text>"
    )


def box(
    x: float, y: float, width: float, height: float, fill: str, *, title: str = "", more: str = "", round_: float = 0
) -> str:
    inner = f"<title>{safe(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}" rx="{round_:g}" '
        f'fill="{fill}"{more}>{inner}</rect>'
    )


def stroke(x1: float, y1: float, x2: float, y2: float, *, opacity: float = 0.25, more: str = "") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" '
        f'stroke-opacity="{opacity:g}"{more}/>'
    )


def drawing(parts: Iterable[str], width: float, height: float, name: str, *, scale: float = 1.0) -> Drawing:
    """An SVG element of its parts, as wide as its container up to `scale` times its own width."""
    return Drawing(
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{safe(name)}" '
        f'style="width:100%;max-width:{scale * width:g}px;height:auto;display:block;font-family:inherit">'
        f"{''.join(parts)}</svg>"
    )


def side_by_side(drawings: Iterable[str], min_width: int = 190) -> Drawing:
    """Drawings in rows, as many in each as fit at `min_width` pixels."""
    inner = "".join(f"<div>{item}</div>" for item in drawings)
    columns = f"repeat(auto-fit,minmax(min({min_width}px,100%),1fr))"
    return Drawing(f'<div style="display:grid;grid-template-columns:{columns};gap:14px">{inner}</div>')


def ticks(top: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to at least `top`."""
    if top <= 0 or not math.isfinite(top):
        return [0.0, 1.0]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999), power * 10)
    return [step * index for index in range(math.ceil(top / step * 0.999) + 1)]


def number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass
class Plot:
    """Axes into which bars and curves are drawn; the y axis begins at 0."""

    title: str
    x_label: str
    x: tuple[float, float]  # range of the x axis
    y_max: float  # the y axis ends at the next round number
    y_label: str = ""
    percent: bool = False
    whole: bool = False  # the x axis has ticks at whole numbers only
    parts: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = [0.0, 0.25, 0.5, 0.75, 1.0] if self.percent and self.y_max <= 1 else ticks(self.y_max)
        self.top = max(self.steps[-1], 1e-12)

    def at(self, value: float) -> float:
        low, high = self.x
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - low) / max(high - low, 1e-12)

    def height(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / self.top

    def bar(self, left: float, right: float, low: float, high: float, colour: str, title: str, more: str = "") -> None:
        x, width = self.at(left), self.at(right) - self.at(left)
        y = self.height(high)
        self.parts.append(box(x, y, width, self.height(low) - y, colour, title=title, more=more))

    def curve(self, points: Sequence[tuple[float, float]], colour: str, *, dash: str = "", dots: bool = False) -> None:
        if len(points) > _POINTS:
            points = [*points[:: -(-len(points) // _POINTS)], points[-1]]
        fit = [(self.at(x), self.height(min(max(y, 0), self.top))) for x, y in points]
        if len(fit) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in fit)
            dashed = f' stroke-dasharray="{dash}"' if dash else ""
            self.parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')
        if dots or len(fit) == 1:
            for (x, y), (_, value) in zip(fit, points, strict=True):
                tip = f"{value:.0%}" if self.percent else number(value)
                self.parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{tip}</title></circle>'
                )

    def mark(self, x: float, y: float, text: str, colour: str, lift: float = 7) -> None:
        """A point with a label, `lift` pixels above it."""
        left, high = self.at(x), self.height(min(max(y, 0), self.top))
        offset = -7 if left > WIDTH * 0.7 else 7
        self.parts.append(f'<circle cx="{left:.1f}" cy="{high:.1f}" r="4.5" fill="{colour}"/>')
        self.parts.append(label(left + offset, high - lift, text, anchor="end" if offset < 0 else "start"))

    def key(self, text: str, colour: str, dash: str = "") -> None:
        """Add an entry to the legend."""
        self._legend.append((text, colour, dash))

    def drawn(self, marks: Sequence[tuple[float, str]] | None = None) -> Drawing:
        """The finished plot; `marks` are ticks of the x axis (position, label), by default round numbers."""
        frame = []
        for step in self.steps:
            y = self.height(step)
            frame.append(stroke(_LEFT, y, WIDTH - _RIGHT, y, opacity=0.35 if step == 0 else 0.14))
            frame.append(
                label(_LEFT - 6, y + 3.5, f"{step:.0%}" if self.percent else number(step), anchor="end", size=10)
            )
        low, high = self.x
        if marks is None:
            marks = [(value, number(value)) for value in ticks(high, 6) if low <= value <= high]
            marks = [pair for pair in marks if not self.whole or pair[0] == int(pair[0])]
        frame += [label(self.at(x), HEIGHT - _BOTTOM + 13, text, size=10) for x, text in marks]
        frame.append(label((WIDTH + _LEFT - _RIGHT) / 2, HEIGHT - 5, self.x_label, size=10.5, dim=True))
        if self.y_label:
            frame.append(label(_LEFT, 8, self.y_label, anchor="start", size=10, dim=True))
        legend, lines = self._drawn_legend()
        parts = [*frame, *self.parts, *legend]
        if lines < 2:
            return drawing(parts, WIDTH, HEIGHT, self.title, scale=1.35)
        extra = 14 * (lines - 1)
        parts = [f'<g transform="translate(0 {extra})">', *parts, "</g>"]
        return drawing(parts, WIDTH, HEIGHT + extra, self.title, scale=1.35)

    def _drawn_legend(self) -> tuple[list[str], int]:
        """The legend, laid out from the right, and its number of lines."""
        parts, x, line = list[str](), float(WIDTH - _RIGHT), 0
        for text, colour, dash in reversed(self._legend):
            if x - 6.0 * len(text) - 22 < 6.0 * len(self.y_label) * (line == 0) and x < WIDTH - _RIGHT:
                x, line = float(WIDTH - _RIGHT), line + 1
            x -= 6.0 * len(text)
            y = 8 - 14 * line
            parts.append(label(x, y, text, anchor="start", size=10))
            style = f' stroke="{colour}" stroke-width="3"' + (f' stroke-dasharray="{dash}"' if dash else "")
            parts.append(f'<line x1="{x - 18:.1f}" y1="{y - 3}" x2="{x - 4:.1f}" y2="{y - 3}"{style}/>')
            x -= 28
        return parts, line + 1


def bars(
    title: str,
    rows: Sequence[tuple[str, float, float, float]],
    colour: str,
    *,
    unit: str = "",
    base: float | None = None,
    longest: int = 20,
) -> Drawing:
    """Horizontal bars of rows (name, value, low, high), with intervals; `base` is a dashed line to compare with. Names
    of more than `longest` characters are cut."""
    gap, start, stop = 24, 12 + 6 * longest, WIDTH - 58
    top = max([high for *_, high in rows] + [value for _, value, _, _ in rows] + [base or 0.0], default=1.0) or 1.0
    parts = []
    for index, (name, value, low, high) in enumerate(rows):
        y = 6 + gap * index
        width = (stop - start) * value / top
        tip = f"{name}: {number(value)} {unit}" + (f" ({number(low)} to {number(high)})" if high > low else "")
        parts.append(label(start - 8, y + 12, cut(name, longest), anchor="end"))
        parts.append(box(start, y, width, 16, colour, title=tip, round_=2))
        if high > low:
            left, right = start + (stop - start) * low / top, start + (stop - start) * high / top
            parts.append(stroke(left, y + 8, right, y + 8, opacity=0.9, more=' stroke-width="1.5"'))
        end = start + (stop - start) * max(value, high) / top
        parts.append(label(end + 5, y + 12, f"{number(value)}{unit and ' ' + unit}", anchor="start"))
    height = 10 + gap * max(len(rows), 1)
    if base is not None:
        x = start + (stop - start) * base / top
        parts.append(stroke(x, 0, x, height, opacity=0.6, more=' stroke-dasharray="3 3"'))
    return drawing(parts, WIDTH, height, title, scale=1.35)
