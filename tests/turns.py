"""Which cases of a product run: all under `OUTRIDER_LAWS=all` (`make laws`), in the suite some, always the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar
from zlib import crc32

Case = TypeVar("Case")

ALL = os.environ.get("OUTRIDER_LAWS") == "all"


def takes_turn(*names: str) -> bool:
    """Whether the case of these names is among those that run."""
    return ALL or crc32("/".join(names).encode()) % 3 == 0


def turn(name: str, cases: Sequence[Case]) -> Sequence[Case]:
    """The one of these cases that runs for this name; all of them in the whole product."""
    return cases if ALL else [cases[crc32(name.encode()) % len(cases)]]
