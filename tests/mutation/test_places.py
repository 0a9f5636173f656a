"""What is changed, one place at a time, and what is left alone."""

from __future__ import annotations

from pathlib import Path

from tests.mutation.places import Source
from tests.mutation.run import interval

CODE = '''
"""A module."""
LIMIT = 3


class Kept:
    most: int = 2

    def below(self, a: int | None, b: int = 1 + 1) -> bool:
        """A method."""
        if a is None:
            raise ValueError("it is " + str(a))
        return cast("bool", a < b)


def pairs(one, two):
    return list(zip(one, two, strict=True))
'''


def test_bodies_of_functions_are_changed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CODE)
    source = Source(tmp_path, "a.py")
    found = [(place.function, place.difference(way)) for place in source.places for way in range(len(place.changes))]
    assert found == [
        ("Kept.below", "is  ->  is not"),
        ("Kept.below", "< b  ->  <= b"),
        ("pairs", "list(zip(one, two, strict=True))  ->  list(None)"),
        ("pairs", "zip(one, two, strict=True)  ->  zip(None, two, strict=True)"),
        ("pairs", "zip(one, two, strict=True)  ->  zip(one, None, strict=True)"),
        ("pairs", "zip(one, two, strict=True)  ->  zip(two, strict=True)"),
        ("pairs", "zip(one, two, strict=True)  ->  zip(one, strict=True)"),
    ]


def test_a_change_differs_in_one_function(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CODE)
    source = Source(tmp_path, "a.py")
    place = next(place for place in source.places if place.operator == "swap_op")
    ((before, after),) = source.replaced(source.changed(place, 0))
    assert before.co_qualname == after.co_qualname == "Kept.below" and before.co_code != after.co_code


def test_the_interval_is_wilsons() -> None:
    low, high = interval(90, 100)
    assert abs(low - 0.8256) < 1e-3 and abs(high - 0.9448) < 1e-3
