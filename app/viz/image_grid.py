"""A picture under way: what is committed of it, and its codes as grids, by round, chance, entropy and who wrote them.

Pure functions of steps, on a page and in a notebook alike. A picture comes as data; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.app.viz.svg import Drawing, box, drawing, label, number, safe, side_by_side
from outrider.app.viz.token_styles import LOOKS
from outrider.core.trace import Step

Grid = Sequence[Sequence[float | None]]
_RAMP = ((0, 32, 77), (65, 77, 107), (124, 123, 120), (188, 175, 111), (255, 234, 70))  # dark to light, for any eyes


def cells(steps: Sequence[Step], what: str, rows: int, columns: int) -> list[list[float | None]]:
    """One number for each code of a picture in raster order: the `round` that committed it, the `chance` with which it
    was accepted, the `entropy` of the distribution it was drawn from, or `relaxed`, 1 where only the rule's leave let
    it in."""
    found: list[float | None] = []
    for step in steps:
        for level in range(len(step.emitted)):
            node = step.path[level] if level < len(step.path) else None
            if what == "round":
                found.append(step.index + 1)
            elif what == "chance":
                found.append(step.chance[node] if node is not None and step.chance else None)
            elif what == "relaxed":
                found.append(float(step.sources[level] == "relaxed"))
            else:
                found.append(step.entropy[level] if level < len(step.entropy) else None)
    found = [*found, *[None] * (rows * columns - len(found))]
    return [found[row * columns : (row + 1) * columns] for row in range(rows)]


def grid(values: Grid, title: str, *, top: float | None = None, form: str = "{:.3g}", light: bool = False) -> Drawing:
    """A number a cell, dark to light; cells without one are hollow. `light`: the numbers themselves are left out."""
    known = [one for line in values for one in line if one is not None]
    most = top if top is not None else max(known, default=1.0) or 1.0
    side, parts = 14, []
    for row, line in enumerate(values):
        for column, one in enumerate(line):
            said = f"row {row + 1}, column {column + 1}: " + ("none" if one is None else form.format(one))
            fill = "none" if one is None else ramp(one / most)
            hollow = ' stroke="currentColor" stroke-opacity=".15"' if one is None else ""
            tied = "" if light else f' data-cell="{row * len(line) + column}"'
            x, y, said = column * side + 0.5, row * side + 0.5, "" if light else said
            parts.append(box(x, y, side - 1, side - 1, fill, title=said, more=hollow + tied))
    wide, high = side * max(map(len, values), default=1), side * len(values)
    parts.append(label(0, high + 14, title, anchor="start"))
    parts += [box(wide - 96 + place * 2.5, high + 5, 2.6, 9, ramp(place / 23)) for place in range(24)]
    parts.append(label(wide - 100, high + 13, "0", anchor="end", size=9))
    parts.append(label(wide, high + 13, number(most), anchor="end", size=9))
    return drawing(parts, wide, high + 20, title)


def ramp(share: float) -> str:
    """Dark to light."""
    at = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    red, green, blue = (round(a + (b - a) * (at - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def source_grid(steps: Sequence[Step], rows: int, columns: int, *, light: bool = False) -> Drawing:
    """Who wrote each code of a picture."""
    side, parts = 14, []
    for place, source in enumerate(source for step in steps for source in step.sources):
        x, y = place % columns * side, place // columns * side
        said = "" if light else f"row {place // columns + 1}, column {place % columns + 1}: {LOOKS[source].words}"
        tied = "" if light else f' data-cell="{place}"'
        parts.append(box(x + 0.5, y + 0.5, side - 1, side - 1, LOOKS[source].colour, title=said, more=tied))
        if source != "drafted":
            parts.append(label(x + 7, y + 11, LOOKS[source].mark, size=10, more=' style="pointer-events:none"'))
    parts.append(label(0, rows * side + 14, "who wrote it", anchor="start"))
    marks = "  ".join(f"{LOOKS[kind].mark} {kind}" for kind in ("relaxed", "resampled", "bonus"))
    parts.append(label(columns * side, rows * side + 14, marks, anchor="end", size=8.5, dim=True))
    return drawing(parts, columns * side, rows * side + 20, "who wrote each code")


def grids(steps: Sequence[Step], rows: int = 16, columns: int = 16, *, light: bool = False) -> dict[str, Drawing]:
    """A picture's codes by round, chance, entropy, and who wrote them (relaxed ones among them)."""
    return {
        "round": grid(cells(steps, "round", rows, columns), "round", light=light),
        "chance": grid(cells(steps, "chance", rows, columns), "chance", top=1.0, light=light),
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
    """A picture (PNG in base64) with what is not committed yet hidden: behind the step that is looked at, or until its
    time has come. `light`: without what a pointer would ask for, for pictures that are under way."""
    side, veils = 16, []
    brought = [count for count, step in enumerate(steps) for _ in step.emitted]
    for cell, count in enumerate(brought[: rows * columns]):
        if clock is None and (current is None or count <= current):
            continue
        x, y = cell % columns * side, cell // columns * side
        timed = f' class="or-lift" style="--at:{clock[count]:.3f}s"' if clock is not None else ""
        veils.append(f'<rect x="{x}" y="{y}" width="16.2" height="16.2" fill="var(--or-veil,#ccc)"{timed}/>')
    wide, high = side * columns, side * rows
    image = f'<image href="data:image/png;base64,{safe(data)}" width="{wide}" height="{high}"/>'
    shown = drawing([image, *veils], wide, high, "the picture", scale=1.1)
    if clock is not None:
        return shown
    upto = steps if current is None else steps[: current + 1]
    return side_by_side([shown, *grids(upto, rows, columns, light=light).values()], least=146)
