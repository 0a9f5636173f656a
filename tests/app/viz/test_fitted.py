"""Tables in narrow terminals: split into parts, nothing cut."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from outrider.app.viz.fitted import Fitted

TITLES = ("drafter", "tokens / s", "speedup (95 %)", "tokens / pass", "total variation / token", "same output")
ROWS = [("token-recycling, captured", "722.3", "1.02 (0.95-1.10)", "1.20", "0.0123", "100% +2% ties"), ("plain",) * 6]


def printed(width: int) -> str:
    table = Table(*TITLES, title="Figures", title_justify="left", box=SIMPLE_HEAD)
    for row in ROWS:
        table.add_row(*row)
    console = Console(width=width, record=True, file=StringIO())
    console.print(Fitted(table))
    return console.export_text()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_every_cell_is_shown_whole_at_any_width(width: int) -> None:
    text = printed(width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    assert all(text.count(cell) >= 1 for cell in ROWS[0][1:])
    assert text.count("Figures") == 1


def test_each_part_repeats_the_names_and_wide_terminals_have_one() -> None:
    assert printed(200).count("token-recycling, captured") == 1
    assert 1 < printed(80).count("token-recycling, captured") < len(TITLES)


def test_titles_wrap_before_the_table_is_split() -> None:
    assert printed(110).count("token-recycling, captured") == 1
    assert "total variation / token" in printed(200)
    assert "total variation / token" not in printed(110)


def test_names_wider_than_the_terminal_are_folded() -> None:
    text = "".join(printed(24).split())
    assert "recycling" in text
    assert "722.3" in text
