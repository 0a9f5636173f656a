"""Helpers of the notebooks: the small mode, computed sentences, and the app's drawings as SVG pictures.

Code-hosting sites remove styles from HTML, so every drawing is displayed as an SVG, and a slider also stores the
picture for its initial values. Independent of models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from IPython.display import Markdown, display

from outrider.app.viz import svg
from outrider.app.viz.token_styles import SERIES, STYLES, nodes_of
from outrider.core.trace import Step

SMALL = os.environ.get("OUTRIDER_SMALL", "0") not in ("", "0")  # all ten notebooks in five minutes on two cores
T = TypeVar("T")
_SVG = "image/svg+xml"
_HEAD = re.compile(r'<svg viewBox="0 0 (\S+) (\S+)"(.*?)style="(?:[^"]*max-width:(\S+?)px)?[^"]*">')


def scaled(full: T, small: T) -> T:
    """Return `full`, or `small` if OUTRIDER_SMALL=1."""
    return small if SMALL else full


def say(text: str) -> None:
    """Display Markdown text that contains computed numbers."""
    display(Markdown(text))


def picture(drawing: str) -> str:
    """Return the drawing as a standalone SVG, dark on white whatever the page's theme."""
    match = re.search(r"<svg.*</svg>", drawing, re.DOTALL)
    assert match is not None, "the drawing contains no <svg> element"
    text = match[0]
    head = _HEAD.match(text)
    assert head is not None
    width, height = float(head[1]), float(head[2])
    scale = float(head[4]) / width if head[4] else 1.0
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-6 -4 {width + 12:g} {height + 8:g}" '
        f'width="{scale * (width + 12):.0f}" height="{scale * (height + 8):.0f}"{head[3]}'
        'style="color:#222;background:#fff" font-family="DejaVu Sans, Arial, sans-serif">'
        '<rect x="-6" y="-4" width="100%" height="100%" fill="#fff"/>'
    )
    return opening + text[head.end() :]


def show(*drawings: str) -> None:
    """Display drawings one below the other."""
    for drawing in drawings:
        display({_SVG: picture(drawing), "text/plain": "<drawing>"}, raw=True)


def explore(draw: Callable[..., str], **choices: Sequence[Any]) -> None:
    """Display the drawing with a slider for each argument of `draw`, starting at the middle of its values.

    Saved notebooks and static pages show the drawing for these initial values.
    """
    import ipywidgets

    sliders = {
        name: ipywidgets.SelectionSlider(options=list(values), value=values[len(values) // 2], description=name)
        for name, values in choices.items()
    }

    def current() -> str:
        return picture(draw(**{name: slider.value for name, slider in sliders.items()}))

    initial = current()
    live = ipywidgets.HTML(value=initial)

    def redraw(_: object) -> None:
        live.value = current()

    for slider in sliders.values():
        slider.observe(redraw, "value")
    box = ipywidgets.VBox([*sliders.values(), live])
    display({**box._repr_mimebundle_(), _SVG: initial}, raw=True)


# ---- drawings that need no trace


def bars(title: str, values: Mapping[str, float], unit: str = "", base: float | None = None) -> svg.Drawing:
    """Draw one bar for each name; `base` is a dashed reference line."""
    return svg.bars(
        title, [(name, value, value, value) for name, value in values.items()], SERIES[0], unit=unit, base=base
    )


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
