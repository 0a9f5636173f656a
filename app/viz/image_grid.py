"""An image and grids of its codes: by round, acceptance probability, entropy and source.

Pure functions of steps, for the page and for notebooks. Images are given as data; independent of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from outrider.app.viz.svg import Drawing, box, drawing, label, number, safe, side_by_side
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


def grid(values: Grid, title: str, *, top: float | None = None, form: str = "{:.3g}", light: bool = False) -> Drawing:
    """A grid of numbers as colours from dark to light; cells without a number are hollow. `light` omits tooltips."""
    known = [value for line in values for value in line if value is not None]
    top = top if top is not None else max(known, default=1.0) or 1.0
    side, parts = 14, []
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            fill = "none" if value is None else ramp(value / top)
            hollow = ' stroke="currentColor" stroke-opacity=".15"' if value is None else ""
            tip, cell = "", ""
            if not light:
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


def source_grid(steps: Sequence[Step], rows: int, columns: int, *, light: bool = False) -> Drawing:
    """The source of each code of an image: drafted, relaxed, resampled or bonus."""
    side, parts = 14, []
    sources = islice((source for step in steps for source in step.sources), rows * columns)
    for index, source in enumerate(sources):
        row, column = divmod(index, columns)
        x, y, style = column * side, row * side, STYLES[source]
        tip = "" if light else f"row {row + 1}, column {column + 1}: {style.description}"
        cell = "" if light else f' data-cell="{index}"'
        parts.append(box(x + 0.5, y + 0.5, side - 1, side - 1, style.colour, title=tip, more=cell))
        if source != "drafted":
            parts.append(label(x + 7, y + 11, style.mark, size=10, more=' style="pointer-events:none"'))
    parts.append(label(0, rows * side + 14, "source", anchor="start"))
    marks = "  ".join(f"{STYLES[kind].mark} {kind}" for kind in ("relaxed", "resampled", "bonus"))
    parts.append(label(columns * side, rows * side + 14, marks, anchor="end", size=8.5, dim=True))
    return drawing(parts, columns * side, rows * side + 20, "source of each code")


def grids(steps: Sequence[Step], rows: int = 16, columns: int = 16, *, light: bool = False) -> dict[str, Drawing]:
    """Grids of an image's codes by round, acceptance probability, entropy and source."""
    probability = cells(steps, "chance", rows, columns)
    return {
        "round": grid(cells(steps, "round", rows, columns), "round", light=light),
        "chance": grid(probability, "acceptance", top=1.0, light=light),
        "entropy": grid(cells(steps, "entropy", rows, columns), "entropy, nats", light=light),
        "source": source_grid(steps, rows, columns, light=light),
    }


def picture(
    data: str,
    steps: Sequence[Step],
    rows: int,
    columns: int,
    *,
    current: int | None = None,
    clock: Sequence[float] | None = None,
    light: bool = False,
) -> Drawing:
    """An image (PNG in base64) and its grids. Codes after the step `current` are hidden; with `clock`, the seconds at
    which each step was done, the image alone is replayed. `light` omits tooltips, for images in progress."""
    side, veils = 16, []
    step_of_cell = [index for index, step in enumerate(steps) for _ in step.emitted]
    for cell, index in enumerate(step_of_cell[: rows * columns]):
        if clock is None and (current is None or index <= current):
            continue
        x, y = cell % columns * side, cell // columns * side
        timed = f' class="or-lift" style="--at:{clock[index]:.3f}s"' if clock is not None else ""
        veils.append(f'<rect x="{x}" y="{y}" width="16.2" height="16.2" fill="var(--or-veil,#ccc)"{timed}/>')
    wide, high = side * columns, side * rows
    image = f'<image href="data:image/png;base64,{safe(data)}" width="{wide}" height="{high}"/>'
    shown = drawing([image, *veils], wide, high, "the image", scale=1.1)
    if clock is not None:
        return shown
    upto = steps if current is None else steps[: current + 1]
    return side_by_side([shown, *grids(upto, rows, columns, light=light).values()], min_width=146)
