"""The folder where Outrider keeps downloads and compiled code."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from outrider.core.errors import OutriderError


def cache_folder() -> Path:
    """$OUTRIDER_CACHE, or `outrider` in the user's cache folder."""
    if folder := os.environ.get("OUTRIDER_CACHE"):
        return Path(folder).expanduser()
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "outrider"
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "outrider"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    except RuntimeError:
        raise OutriderError("this user has no home folder; set OUTRIDER_CACHE to a writable folder") from None
