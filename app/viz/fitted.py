"""A table of figures that is split into several, rather than cut, where the terminal is too narrow for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Column, Table

_ANY = 10_000  # columns of a terminal in which everything fits


@dataclass(frozen=True)
class Fitted:
    """Each part repeats the first column. Titles may wrap at spaces; cells wrap only where one alone is too wide."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        wide = options.update(max_width=_ANY)
        first, *others = (_with_width(column, console, wide) for column in self.table.columns)
        title = self.table.title
        while True:
            count = len(others)
            while count > 1 and self._width([first, *others[:count]], console, wide) > options.max_width:
                count -= 1
            shown, others = [first, *others[:count]], others[count:]
            part = self._part(shown, title)
            self._widen(part, console, wide, options.max_width)
            yield part
            title = None
            if not others:
                return

    def _part(self, columns: Sequence[Column], title: object = None) -> Table:
        part = copy.copy(self.table)
        part.title = title  # type: ignore[assignment]
        part.columns = [copy.copy(column) for column in columns]
        for index, column in enumerate(part.columns):
            column._index = index
        return part

    def _width(self, columns: Sequence[Column], console: Console, wide: ConsoleOptions) -> int:
        return Measurement.get(console, wide, self._part(columns)).minimum

    def _widen(self, part: Table, console: Console, wide: ConsoleOptions, room: int) -> None:
        """Use what is left of the room so that fewer titles wrap, and narrow the widest column if there is none."""
        left = room - self._width(part.columns, console, wide)
        if left < 0:
            widest = max(part.columns, key=lambda column: column.width or 0)
            widest.width, widest.overflow, widest.no_wrap = max((widest.width or 0) + left, 1), "fold", False
        for column in part.columns:
            extra = Measurement.get(console, wide, column.header).maximum - (column.width or 0)
            if 0 < extra <= left:
                column.width, left = (column.width or 0) + extra, left - extra


def _with_width(column: Column, console: Console, wide: ConsoleOptions) -> Column:
    """The column with the width of its widest cell or of the longest word of its title."""
    result = copy.copy(column)
    title = Measurement.get(console, wide, column.header).minimum
    result.width = max((*(Measurement.get(console, wide, cell).maximum for cell in column.cells), title))
    return result
