"""What the notebooks share: the small mode, sentences with numbers in them, and the app's drawings as pictures.

A code-hosting page takes styles out of HTML, so every drawing is shown as an SVG picture, and a slider leaves the one
for its first value behind. Knows nothing of models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.display import Markdown, display

from outrider.app.viz import svg
from outrider.app.viz.token_styles import LOOKS, SERIES, placed
from outrider.core.trace import Step

SMALL = os.environ.get("OUTRIDER_SMALL", "0") not in ("", "0")  # everything in five minutes on two cores
_PICTURE = "image/svg+xml"
_HEAD = re.compile(r'<svg viewBox="0 0 (\S+) (\S+)"(.*?)style="(?:[^"]*max-width:(\S+?)px)?[^"]*">')


def some(usual: int, small: int) -> int:
    """How many of something: `usual`, or a few where OUTRIDER_SMALL=1."""
    return small if SMALL else usual


def say(text: str) -> None:
    """A sentence with numbers in it that were computed above."""
    display(Markdown(text))


def picture(drawing: str) -> str:
    """A drawing as a picture of its own: dark on white, whatever stands around it."""
    found = re.search(r"<svg.*</svg>", drawing, re.DOTALL)
    assert found is not None, "this drawing is words; a picture needs an SVG"
    text = found[0]
    head = _HEAD.match(text)
    assert head is not None
    wide, high = float(head[1]), float(head[2])
    scale = float(head[4]) / wide if head[4] else 1.0
    opened = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-6 -4 {wide + 12:g} {high + 8:g}" '
        f'width="{scale * (wide + 12):.0f}" height="{scale * (high + 8):.0f}"{head[3]}'
        'style="color:#222;background:#fff" font-family="DejaVu Sans, Arial, sans-serif">'
        '<rect x="-6" y="-4" width="100%" height="100%" fill="#fff"/>'
    )
    return opened + text[head.end() :]


def show(*drawings: str) -> None:
    """Drawings, one below the other."""
    for one in drawings:
        display({_PICTURE: picture(one), "text/plain": "<drawing>"}, raw=True)


def explore(draw: Callable[..., str], **choices: Sequence[Any]) -> None:
    """A slider for each argument of `draw`, over the values given; it starts in their middle.

    Where nothing can move (a saved notebook, a page) the drawing for these stands.
    """
    import ipywidgets

    sliders = {
        name: ipywidgets.SelectionSlider(options=list(values), value=values[len(values) // 2], description=name)
        for name, values in choices.items()
    }

    def drawn() -> str:
        return picture(draw(**{name: slider.value for name, slider in sliders.items()}))

    still = drawn()
    moving = ipywidgets.HTML(value=still)

    def redraw(_: object) -> None:
        moving.value = drawn()

    for slider in sliders.values():
        slider.observe(redraw, "value")
    box = ipywidgets.VBox([*sliders.values(), moving])
    display({**box._repr_mimebundle_(), _PICTURE: still}, raw=True)


# ---- drawings of what no trace holds


def bars(title: str, found: Mapping[str, float], unit: str = "", base: float | None = None) -> svg.Drawing:
    """A bar for each name."""
    return svg.bars(title, [(name, one, one, one) for name, one in found.items()], SERIES[0], unit=unit, base=base)


def distributions(found: Mapping[str, Sequence[float]], words: Sequence[str], *, stacked: bool = False) -> svg.Drawing:
    """Distributions over a few words, side by side or on top of one another."""
    top = max(map(sum, zip(*found.values(), strict=True))) if stacked else max(map(max, found.values()))
    plot = svg.Plot(" and ".join(found), "the next word", (-0.5, len(words) - 0.5), top, "probability")
    width = 0.6 if stacked else 0.8 / len(found)
    low = [0.0] * len(words)
    for place, (name, values) in enumerate(found.items()):
        colour = SERIES[place % len(SERIES)]
        for at, (word, value) in enumerate(zip(words, values, strict=True)):
            left = at - 0.3 if stacked else at - 0.4 + place * width
            plot.bar(left, left + width * 0.94, low[at], low[at] + value, colour, f"{name}: {word} {value:.4f}")
            low[at] += value if stacked else 0.0
        plot.key(name, colour)
    return plot.drawn(list(enumerate(words)))


def written(
    steps: Sequence[Step], name: Callable[[int], str], *, rejected: bool = True, columns: int = 96
) -> svg.Drawing:
    """What was written, each token by who wrote it, the guesses that were rejected where they were made."""
    wide, high, column, line = 6.7, 21.0, 0, 0
    parts, shown = [], set()
    for step in steps:
        for kind, token, _, _ in placed(step):
            if kind == "rejected" and not rejected:
                continue
            shown.add(kind)
            look, text = LOOKS[kind], svg.visible(name(token))
            if column + len(text) > columns:
                column, line = 0, line + 1
            x, y, width = column * wide, line * high, len(text) * wide
            parts.append(svg.box(x, y, width - 1, 17, look.colour + "44", title=look.words, round_=3))
            struck = ' text-decoration="line-through"' if kind == "rejected" else ""
            fit = f' textLength="{width - 2:.1f}" lengthAdjust="spacingAndGlyphs" xml:space="preserve"'
            mono = ' font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
            parts.append(
                svg.label(x + 0.5, y + 12.5, text, anchor="start", dim=kind == "rejected", more=struck + fit + mono)
            )
            parts.append(svg.box(x, y + 15.5, width - 1, 2, look.colour))
            column += len(text)
    y, x = (line + 1) * high + 12, 0.0
    for kind, look in LOOKS.items():
        if kind in shown:
            parts.append(svg.box(x, y - 9, 11, 11, look.colour))
            parts.append(svg.label(x + 15, y + 1, kind, anchor="start"))
            x += 28 + 7 * len(kind)
    return svg.drawing(parts, columns * wide, y + 6, "who wrote what", scale=1.1)
