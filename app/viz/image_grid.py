"""An image with its codes in layers over it: by target pass, acceptance probability, entropy and source.

Pure functions of steps, for the page and for notebooks. Images are given as data; independent of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from outrider.app.viz.svg import Drawing, box, drawing, label, number, safe
from outrider.app.viz.token_styles import STYLES
from outrider.core.trace import Step

Grid = Sequence[Sequence[float | None]]
_RAMP = ((0, 32, 77), (65, 77, 107), (124, 123, 120), (188, 175, 111), (255, 234, 70))  # cividis, colour-blind safe


def cells(steps: Sequence[Step], what: str, rows: int, columns: int) -> list[list[float | None]]:
    """One number for each code of an image in raster order. `what` is `round`, the round that committed the code;
    `chance`, its acceptance probability; `entropy`, that of the target's distribution; or `relaxed`, 1 if it was
    accepted only because the rule is relaxed, otherwise 0."""
    values: list[float | None] = []
    for step in steps:
        for level in range(len(step.emitted)):
            node = step.path[level] if level < len(step.path) else None
            if what == "round":
                values.append(step.index + 1)
            elif what == "chance":
                values.append(step.chance[node] if node is not None and step.chance else None)
            elif what == "relaxed":
                values.append(float(step.sources[level] == "relaxed"))
            else:
                values.append(step.entropy[level] if level < len(step.entropy) else None)
    values = [*values, *[None] * (rows * columns - len(values))]
    return [values[row * columns : (row + 1) * columns] for row in range(rows)]


def grid(values: Grid, title: str, *, top: float | None = None, form: str = "{:.3g}") -> Drawing:
    """A grid of numbers as colours from dark to light; cells without a number are hollow."""
    known = [value for line in values for value in line if value is not None]
    top = top if top is not None else max(known, default=1.0) or 1.0
    side, parts = 14, []
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            fill = "none" if value is None else ramp(value / top)
            hollow = ' stroke="currentColor" stroke-opacity=".15"' if value is None else ""
            tip = f"row {row + 1}, column {column + 1}: " + ("none" if value is None else form.format(value))
            cell = f' data-cell="{row * len(line) + column}"'
            x, y = column * side + 0.5, row * side + 0.5
            parts.append(box(x, y, side - 1, side - 1, fill, title=tip, more=hollow + cell))
    wide, high = side * max(map(len, values), default=1), side * len(values)
    parts.append(label(0, high + 14, title, anchor="start"))
    parts += [box(wide - 96 + index * 2.5, high + 5, 2.6, 9, ramp(index / 23)) for index in range(24)]
    parts.append(label(wide - 100, high + 13, "0", anchor="end", size=9))
    parts.append(label(wide, high + 13, number(top), anchor="end", size=9))
    return drawing(parts, wide, high + 20, title)


def ramp(share: float) -> str:
    """The colour of a share from 0 (dark) to 1 (light)."""
    at = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    red, green, blue = (round(a + (b - a) * (at - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


OVERLAYS = ("picture", "target pass", "acceptance", "entropy", "source")


def layered(
    data: str,
    steps: Sequence[Step],
    rows: int,
    columns: int,
    *,
    clock: Sequence[float] | None = None,
    overlays: bool = True,
) -> Drawing:
    """One image (PNG in base64) with a grid for each of OVERLAYS over it, of which a style sheet shows one. With
    `clock`, the seconds at which steps were done, the codes are covered until a replay reaches them."""
    side = 16
    wide, high = side * columns, side * rows
    step_of_cell = list(islice((index for index, step in enumerate(steps) for _ in step.emitted), rows * columns))
    parts = [f'<image href="data:image/png;base64,{safe(data)}" width="{wide}" height="{high}"/>'] if data else []
    sources = list(islice((source for step in steps for source in step.sources), rows * columns))
    for layer, what in zip(OVERLAYS[1:] if overlays else (), ("round", "chance", "entropy", ""), strict=False):
        cells_of = cells(steps, what, rows, columns) if what else []
        flat = [value for line in cells_of for value in line]
        top = 1.0 if what == "chance" else max([value for value in flat if value is not None], default=1.0) or 1.0
        boxes = []
        for cell, index in enumerate(step_of_cell):
            if what:
                value = flat[cell]
                fill = "none" if value is None else ramp(value / top)
                tip = "not drafted" if value is None else f"{layer} {number(value)}"
            else:
                fill, tip = STYLES[sources[cell]].colour, STYLES[sources[cell]].description
            place = f"row {cell // columns + 1}, column {cell % columns + 1}: {tip}"
            more = f' data-cell="{cell}" data-s="{index}"'
            boxes.append(box(cell % columns * side, cell // columns * side, 15.5, 15.5, fill, title=place, more=more))
        key = layer.split()[-1]
        parts.append(f'<g class="or-layer or-layer-{key}" fill-opacity=".82">{"".join(boxes)}</g>')
    for cell, index in enumerate(step_of_cell):
        at = f' data-at="{clock[index]:.3f}"' if clock is not None else ""
        state = " or-later" if clock is not None else ""
        parts.append(
            f'<rect class="or-veil{state}" data-s="{index}"{at} x="{cell % columns * side}" '
            f'y="{cell // columns * side}" width="16.2" height="16.2" fill="var(--or-veil,#ccc)"/>'
        )
    return drawing(parts, wide, high, "the image", scale=1.6)
