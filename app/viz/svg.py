"""Small drawings as SVG text: bars, curves, drawings in rows, and the escaping that lets any text stand in a page.

Lines and letters take the colour of the text around them, so that a drawing stands on light and on dark alike; there is
no script in them and nothing is fetched. Knows numbers and words, nothing of traces.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_SIGNS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
_ACTIVE = str.maketrans({"$": "&#36;", "{": "&#123;", "}": "&#125;", "`": "&#96;"})  # templates of the browser
WIDTH, HEIGHT = 440, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 10, 12, 34


class Drawing(str):
    """HTML or SVG that is fit to be shown; a notebook shows it as it is."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)


def visible(text: str) -> str:
    """The same text with every sign that would act, or hide others, as one that can be seen."""
    found = []
    for sign in text:
        if sign in _SIGNS:
            found.append(_SIGNS[sign])
        elif sign not in " \u200c\u200d" and unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
            code = ord(sign)
            found.append(chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"⟨{code:04X}⟩")
        else:
            found.append(sign)
    return "".join(found)


def safe(text: object) -> str:
    """As text of a page, inside an attribute too; what would be a template stays text."""
    return html.escape(visible(str(text)), quote=True).translate(_ACTIVE)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def label(
    x: float, y: float, words: object, *, anchor: str = "middle", size: float = 11, more: str = "", dim: bool = False
) -> str:
    faint = ' opacity=".65"' if dim else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" fill="currentColor"{faint}{more}>'
        f"{safe(words)}</text>"
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
    """The whole: as wide as there is room for, up to its own size."""
    return Drawing(
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{safe(name)}" '
        f'style="width:100%;max-width:{scale * width:g}px;height:auto;display:block;font-family:inherit">'
        f"{''.join(parts)}</svg>"
    )


def side_by_side(drawings: Iterable[str], least: int = 190) -> Drawing:
    """As many in a row as there is room for."""
    inner = "".join(f"<div>{one}</div>" for one in drawings)
    return Drawing(
        f'<div style="display:grid;grid-template-columns:repeat(auto-fit,minmax(min({least}px,100%),1fr));gap:14px">'
        f"{inner}</div>"
    )


def ticks(most: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to at least `most`."""
    if most <= 0 or not math.isfinite(most):
        return [0.0, 1.0]
    raw = most / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * one for one in (1, 2, 2.5, 5, 10) if power * one >= raw * 0.999), power * 10)
    return [step * place for place in range(math.ceil(most / step * 0.999) + 1)]


def number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass
class Plot:
    """A frame with axes from 0 up: bars and curves are put into it."""

    title: str
    across: str
    x: tuple[float, float]  # from, to
    most: float  # of the upward axis, to begin with
    up: str = ""
    percent: bool = False
    whole: bool = False  # ticks of the axis across are whole numbers
    parts: list[str] = field(default_factory=list)
    _key: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = [0.0, 0.25, 0.5, 0.75, 1.0] if self.percent and self.most <= 1 else ticks(self.most)
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
        fit = [(self.at(x), self.height(min(max(y, 0), self.top))) for x, y in points]
        if len(fit) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in fit)
            dashed = f' stroke-dasharray="{dash}"' if dash else ""
            self.parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')
        if dots or len(fit) == 1:
            for (x, y), (_, value) in zip(fit, points, strict=True):
                said = f"{value:.0%}" if self.percent else number(value)
                self.parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{said}</title></circle>'
                )

    def mark(self, x: float, y: float, words: str, colour: str, lift: float = 7) -> None:
        """A point with a word beside it, so far above."""
        left, high = self.at(x), self.height(min(max(y, 0), self.top))
        away = -7 if left > WIDTH * 0.7 else 7
        self.parts.append(f'<circle cx="{left:.1f}" cy="{high:.1f}" r="4.5" fill="{colour}"/>')
        self.parts.append(label(left + away, high - lift, words, anchor="end" if away < 0 else "start"))

    def key(self, words: str, colour: str, dash: str = "") -> None:
        self._key.append((words, colour, dash))

    def drawn(self, marks: Sequence[tuple[float, str]] | None = None) -> Drawing:
        """All of it. `marks` are the ticks across, if they are to be others than round numbers."""
        frame = []
        for step in self.steps:
            y = self.height(step)
            frame.append(stroke(_LEFT, y, WIDTH - _RIGHT, y, opacity=0.35 if step == 0 else 0.14))
            frame.append(
                label(_LEFT - 6, y + 3.5, f"{step:.0%}" if self.percent else number(step), anchor="end", size=10)
            )
        low, high = self.x
        if marks is None:
            marks = [(one, number(one)) for one in ticks(high, 6) if low <= one <= high]
            marks = [pair for pair in marks if not self.whole or pair[0] == int(pair[0])]
        frame += [label(self.at(x), HEIGHT - _BOTTOM + 13, words, size=10) for x, words in marks]
        frame.append(label((WIDTH + _LEFT - _RIGHT) / 2, HEIGHT - 5, self.across, size=10.5, dim=True))
        if self.up:
            frame.append(label(_LEFT, 8, self.up, anchor="start", size=10, dim=True))
        keys, lines = self._keys()
        found = [*frame, *self.parts, *keys]
        if lines < 2:
            return drawing(found, WIDTH, HEIGHT, self.title, scale=1.35)
        more = 14 * (lines - 1)
        found = [f'<g transform="translate(0 {more})">', *found, "</g>"]
        return drawing(found, WIDTH, HEIGHT + more, self.title, scale=1.35)

    def _keys(self) -> tuple[list[str], int]:
        """What the curves are called, from the right, in as many lines as that takes; and how many."""
        found, place, line = list[str](), float(WIDTH - _RIGHT), 0
        for words, colour, dash in reversed(self._key):
            if place - 6.0 * len(words) - 22 < 6.0 * len(self.up) * (line == 0) and place < WIDTH - _RIGHT:
                place, line = float(WIDTH - _RIGHT), line + 1
            place -= 6.0 * len(words)
            y = 8 - 14 * line
            found.append(label(place, y, words, anchor="start", size=10))
            drawn = f' stroke="{colour}" stroke-width="3"' + (f' stroke-dasharray="{dash}"' if dash else "")
            found.append(f'<line x1="{place - 18:.1f}" y1="{y - 3}" x2="{place - 4:.1f}" y2="{y - 3}"{drawn}/>')
            place -= 28
        return found, line + 1


def bars(
    title: str,
    rows: Sequence[tuple[str, float, float, float]],
    colour: str,
    *,
    unit: str = "",
    base: float | None = None,
) -> Drawing:
    """Bars that lie, a name each: name, value, and from where to where it was seen. `base`: a line to compare with."""
    gap, start, stop = 24, 132, WIDTH - 58
    most = max([high for *_, high in rows] + [value for _, value, _, _ in rows] + [base or 0.0], default=1.0) or 1.0
    parts = []
    for place, (name, value, low, high) in enumerate(rows):
        y = 6 + gap * place
        width = (stop - start) * value / most
        said = f"{name}: {number(value)} {unit}" + (f" ({number(low)} to {number(high)})" if high > low else "")
        parts.append(label(start - 8, y + 12, cut(name, 20), anchor="end"))
        parts.append(box(start, y, width, 16, colour, title=said, round_=2))
        if high > low:
            left, right = start + (stop - start) * low / most, start + (stop - start) * high / most
            parts.append(stroke(left, y + 8, right, y + 8, opacity=0.9, more=' stroke-width="1.5"'))
        end = start + (stop - start) * max(value, high) / most
        parts.append(label(end + 5, y + 12, f"{number(value)}{unit and ' ' + unit}", anchor="start"))
    height = 10 + gap * max(len(rows), 1)
    if base is not None:
        x = start + (stop - start) * base / most
        parts.append(stroke(x, 0, x, height, opacity=0.6, more=' stroke-dasharray="3 3"'))
    return drawing(parts, WIDTH, height, title, scale=1.35)
