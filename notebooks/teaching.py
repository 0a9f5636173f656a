"""What the notebooks share: the small mode, numbers in sentences, and sliders that leave a still picture behind."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import Any

from IPython.display import Markdown, display
from matplotlib.figure import Figure

SMALL = os.environ.get("OUTRIDER_SMALL", "0") not in ("", "0")  # everything in five minutes on two cores


def some(usual: int, small: int) -> int:
    """How many of something: `usual`, or a few where OUTRIDER_SMALL=1."""
    return small if SMALL else usual


def say(text: str) -> None:
    """A sentence with numbers in it that were computed above."""
    display(Markdown(text))


def picture(figure: Figure) -> bytes:
    """A figure as PNG, without the version of the library that drew it."""
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=100, metadata={"Software": None})
    return held.getvalue()


def show(figure: Figure) -> None:
    """A figure here and now, sharp and small, the same bytes each time."""
    display({"image/png": picture(figure), "text/plain": "<Figure>"}, raw=True)


def explore(draw: Callable[..., Figure], **choices: Sequence[Any]) -> None:
    """A slider for each argument of `draw`, over the values given; it starts in their middle.

    Where nothing can move (a saved notebook, a page) the figure for the starting values stands.
    """
    import ipywidgets

    sliders = {
        name: ipywidgets.SelectionSlider(options=list(values), value=values[len(values) // 2], description=name)
        for name, values in choices.items()
    }

    def drawn() -> bytes:
        return picture(draw(**{name: slider.value for name, slider in sliders.items()}))

    still = drawn()
    moving = ipywidgets.Image(value=still, format="png")

    def redraw(_: object) -> None:
        moving.value = drawn()

    for slider in sliders.values():
        slider.observe(redraw, "value")
    box = ipywidgets.VBox([*sliders.values(), moving])
    display({**box._repr_mimebundle_(), "image/png": still}, raw=True)


def bars(
    groups: dict[str, Sequence[float]], labels: Sequence[str], ylabel: str = "probability", *, stacked: bool = False
) -> Figure:
    """Numbers side by side, or on top of one another: one colour a group, one cluster a label."""
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots()
    width = 0.6 if stacked else 0.8 / len(groups)
    below = [0.0] * len(labels)
    for place, (name, values) in enumerate(groups.items()):
        aside = 0.0 if stacked else (place - (len(groups) - 1) / 2) * width
        axes.bar([number + aside for number in range(len(labels))], values, width, bottom=below, label=name)
        if stacked:
            below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel(ylabel)
    axes.legend()
    return figure


def lines(curves: dict[str, Sequence[float]], x: Sequence[float], xlabel: str, ylabel: str) -> Figure:
    """Curves over the same x."""
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        axes.plot(x, values, marker="o", markersize=3.5, label=name)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
