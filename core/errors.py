"""What can go wrong, in words for the reader: what was given, what was expected, what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class OutriderError(Exception):
    """Any error whose message is meant for the person at the keyboard."""


class InvalidOption(OutriderError):
    """An option has a name or a value that does not exist or makes no sense."""


class Incompatible(OutriderError):
    """Two parts, each fine by itself, that do not work together."""


class TraceError(OutriderError):
    """A trace file is not what it claims to be."""


def unknown(what: str, given: object, known: Iterable[str]) -> InvalidOption:
    """The error for a name that is not in a table: it lists the names that are."""
    names = sorted(known)
    near = get_close_matches(str(given), names, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    shown = " ".join(str(given).split())[:200]
    return InvalidOption(f"unknown {what} '{shown}'.{hint} Known: {', '.join(names)}")
