"""A chip that says where the page computes, and how busy the processor is.

Timings taken while other programs compute are unreliable, so the page says so (outrider.core.bench.other_load).
Independent of models.
"""

from __future__ import annotations

import os

from outrider.app.viz.svg import Drawing, safe
from outrider.core.bench.other_load import BUSY, is_busy, load_average


def chip(device: str, dtype: str) -> Drawing:
    """The device, the weights' precision, and the load of this machine."""
    load, cores = load_average(), os.cpu_count() or 1
    busy = load > cores * (1 + BUSY)
    state = " · CPU busy: timings unreliable" if busy else "" if is_busy(load) else " · quiet"
    said = f"{safe(device)} · {safe(dtype)}{state} · load {load:.1f} of {cores} cores"
    return Drawing(f'<span class="or-chip{" or-busy" if busy else ""}" title="{said}">{said}</span>')
