"""Checks of visitors' input on the server, since a program can send values that the page's components do not allow.

Independent of models and pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from outrider.core.errors import InvalidOption, unknown

PROMPT = 2_000  # characters
TOKENS = 256  # of one text
SEED = 2**31 - 1
METHODS = 6  # in one comparison
PROMPTS = 8
FILE = 5_000_000  # bytes of an opened trace
WAITING = 16  # runs in the queue
TEMPERATURE = 2.0


def text(value: object, what: str = "prompt", limit: int = PROMPT) -> str:
    """The value, if it is a text that is neither empty nor longer than `limit` characters."""
    if not isinstance(value, str):
        raise InvalidOption(f"the {what} is not text; type a few words")
    if not value.strip():
        raise InvalidOption(f"the {what} is empty; type a few words, or choose one of the examples")
    if len(value) > limit:
        raise InvalidOption(f"the {what} has {len(value):,} characters; shorten it to at most {limit:,}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidOption(f"the {what} contains invalid Unicode (lone surrogates); type it again") from None
    return value


def number(value: object, what: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidOption(f"{what} is not a number; give one from {low:g} to {high:g}")
    if not low <= value <= high:
        raise InvalidOption(f"{what} is {value:g}; it must be from {low:g} to {high:g}")
    return float(value)


def whole_number(value: object, what: str, low: int, high: int) -> int:
    result = number(value, what, low, high)
    if result != int(result):
        raise InvalidOption(f"{what} is {result:g}; it must be a whole number")
    return int(result)


def one_of(value: object, what: str, known: Iterable[str]) -> str:
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise unknown(what, str(value)[:40], names)
    return value


def some_of(value: object, what: str, known: Iterable[str], limit: int) -> list[str]:
    names = list(known)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InvalidOption(f"choose 1 to {limit} {what}")
    if len(value) > limit:
        raise InvalidOption(f"{len(value)} {what} are chosen; choose at most {limit}")
    return [one_of(name, what, names) for name in dict.fromkeys(value)]
