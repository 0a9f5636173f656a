"""How many slots of a cache a recorded pass reads where attention reads all that it is given: few numbers, so that few
recordings are made. Independent of what is cached."""

from __future__ import annotations

_FEWEST, _FACTOR = 512, 4


def bucket(needed: int, size: int) -> int:
    """The number of slots to read where `needed` are in use, of `size`: all of them, a quarter, a 16th and so on."""
    columns = size
    while columns // _FACTOR >= max(needed, _FEWEST):
        columns //= _FACTOR
    return columns


def larger(columns: int, size: int) -> list[int]:
    """The numbers above this one."""
    found = []
    while columns < size:
        columns = min(columns * _FACTOR, size)
        found.append(columns)
    return found
