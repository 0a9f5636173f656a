"""The folder where Outrider keeps downloads and compiled code."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """$OUTRIDER_CACHE, or `outrider` in the user's cache folder."""
    if folder := os.environ.get("OUTRIDER_CACHE"):
        return Path(folder).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "outrider"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "outrider"
