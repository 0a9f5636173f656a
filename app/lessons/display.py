"""What lessons display: computed sentences, the app's drawings as SVG pictures, sliders; and their small mode.

Code-hosting sites remove styles from HTML, so every drawing is displayed as an SVG, and a slider also stores the
picture for its initial values. Independent of models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from IPython.display import Markdown, display

SMALL = os.environ.get("OUTRIDER_SMALL", "0") not in ("", "0")  # all notebooks in some minutes on two cores
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
