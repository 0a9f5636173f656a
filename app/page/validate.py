"""What a visitor may ask for, checked in our own code: the page's own bounds are no bounds for somebody with a program.

Knows plain values; nothing of models or pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from outrider.core.errors import InvalidOption, unknown

PROMPT = 2_000  # characters
TOKENS = 256  # of one text
SEED = 2**31 - 1
METHODS = 6  # side by side in the lab
PROMPTS = 8
FILE = 5_000_000  # bytes of an opened trace
WAITING = 16  # runs in the queue
HEAT = 2.0


def words(value: object, what: str = "prompt", most: int = PROMPT) -> str:
    """A text as it is, if it is one and not too long."""
    if not isinstance(value, str):
        raise InvalidOption(f"the {what} is no text; type a few words")
    if not value.strip():
        raise InvalidOption(f"the {what} is empty; type a few words, or take one of the examples")
    if len(value) > most:
        raise InvalidOption(f"the {what} has {len(value):,} characters; at most {most:,} are taken: shorten it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidOption(f"the {what} holds half characters, which are no text; type it anew") from None
    return value


def number(value: object, what: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidOption(f"{what} is no number; give one from {low:g} to {high:g}")
    if not low <= value <= high:
        raise InvalidOption(f"{what} is {value:g}; it must be from {low:g} to {high:g}")
    return float(value)


def whole(value: object, what: str, low: int, high: int) -> int:
    found = number(value, what, low, high)
    if found != int(found):
        raise InvalidOption(f"{what} is {found:g}; it must be a whole number")
    return int(found)


def one_of(value: object, what: str, known: Iterable[str]) -> str:
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise unknown(what, str(value)[:40], names)
    return value


def some_of(value: object, what: str, known: Iterable[str], most: int) -> list[str]:
    names = list(known)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InvalidOption(f"choose from 1 to {most} of {what}")
    if len(value) > most:
        raise InvalidOption(f"{len(value)} of {what} were chosen; at most {most} are compared at once")
    return [one_of(one, what, names) for one in dict.fromkeys(value)]
