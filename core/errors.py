"""Exceptions. A message says what was given, what was expected and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class OutriderError(Exception):
    """Base class of errors whose message is written for the user."""


class InvalidOption(OutriderError):
    """An option has an unknown name or an invalid value."""


class Incompatible(OutriderError):
    """Two valid components do not work together."""


class NotFinite(OutriderError):
    """A model computes NaN."""


class Unsatisfied(OutriderError):
    """An output that its constraint doesn't allow, or can't let go on."""


class TraceError(OutriderError):
    """A trace file is malformed."""


def unknown(what: str, given: object, known: Iterable[str]) -> InvalidOption:
    """The error for an unknown name: suggests the closest known name and lists all of them."""
    names = sorted(known)
    matches = get_close_matches(str(given), names, n=1)
    hint = f" Did you mean '{matches[0]}'?" if matches else ""
    shown = " ".join(str(given).split())[:200]
    return InvalidOption(f"unknown {what} '{shown}'.{hint} Known: {', '.join(names)}")
