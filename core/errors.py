"""Exceptions. A message says what was given, what was expected and what to do next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import metadata
from urllib.parse import unquote


class OutriderError(Exception):
    """Base class of errors whose message is written for the user, in one line: line breaks in a name of someone's file
    become spaces, and what else can't be printed is escaped."""

    def __init__(self, message: object = "") -> None:
        super().__init__("".join(map(_shown, str(message))))


def _shown(each: str) -> str:
    return each if each.isprintable() else " " if each.isspace() else repr(each)[1:-1]


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


def unreadable(path: object, error: OSError | UnicodeError) -> str:
    """Why a file can't be read, and what to do, in one line.

    >>> unreadable("prompts.jsonl", IsADirectoryError())
    "prompts.jsonl can't be read: it is a folder; name a file"
    """
    if isinstance(error, UnicodeError):
        why = "it is not UTF-8 text; save it as UTF-8, or name another file"
    elif isinstance(error, IsADirectoryError):
        why = "it is a folder; name a file"
    elif isinstance(error, FileNotFoundError | NotADirectoryError):
        why = "there is no such file; check the path"
    elif isinstance(error, PermissionError):
        why = "permission denied; change the file's permissions, or name another"
    else:
        why = error.strerror or str(error) or type(error).__name__
    return f"{path} can't be read: {why}"


def install_command(extra: str, distribution: str = "outrider") -> str:
    """The command that adds an extra to this installation, which may be of a checkout, of a git address or of a wheel.

    >>> install_command("bench", distribution="no-such-distribution")
    "pip install 'no-such-distribution[bench]'"
    """
    # In the folder of a checkout, what its build left (egg-info) is found first, and doesn't say where from.
    found = (one.read_text("direct_url.json") for one in metadata.distributions(name=distribution))
    origin = json.loads(next(filter(None, found), "{}"))
    url, git = str(origin.get("url", "")), origin.get("vcs_info", {})
    if git:
        wanted = f"{distribution}[{extra}] @ {git['vcs']}+{url}@{git['commit_id']}"
    elif url.startswith("file://"):
        wanted = f"{unquote(url.removeprefix('file://'))}[{extra}]"
    else:
        wanted = f"{distribution}[{extra}]"
    flag = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {flag}{shlex.quote(wanted)}"
