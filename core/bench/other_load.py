"""How busy other programs keep the processor: timings taken beside them are unreliable.

Reads /proc/stat where there is one, and otherwise the load average. Independent of models and of what is timed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
BUSY = 0.25  # of all cores in use by others


class Others:
    """Measures the cores that other programs use from its creation on."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), _busy(), time.process_time()

    def cores(self) -> float:
        """The number of cores in use by others since then, on average."""
        began, all_before, own_before = self._begun
        seconds, now = time.perf_counter() - began, _busy()
        if now is None or all_before is None or seconds < 0.05:
            return max(load_average() - 1, 0.0)
        return max((now - all_before - (time.process_time() - own_before)) / seconds, 0.0)


def _busy() -> float | None:
    """Seconds that all cores together were busy since the machine started."""
    try:
        fields = _STAT.read_text().split("\n", 1)[0].split()[1:]
        user, nice, system = (int(value) for value in fields[:3])
        return (user + nice + system) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def load_average() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def is_busy(cores: float) -> bool:
    return cores > BUSY * (os.cpu_count() or 1)


def warning(cores: object) -> str:
    """What to say about timings taken beside `cores` of others' work; empty if they are reliable."""
    if not isinstance(cores, int | float) or not is_busy(cores):
        return ""
    return f"other programs kept {cores:.1f} of {os.cpu_count()} cores busy, so timings are unreliable"
