"""Which cases of a product run: all under `OUTRIDER_LAWS=all` (`make laws`), in the suite a third, always the same."""

from __future__ import annotations

import os
from zlib import crc32

ALL = os.environ.get("OUTRIDER_LAWS") == "all"


def takes_turn(*names: str) -> bool:
    """Whether the case of these names is among those that run."""
    return ALL or crc32("/".join(names).encode()) % 3 == 0
