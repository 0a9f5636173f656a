"""How much memory a process has held at most."""

from __future__ import annotations

import sys

import torch


def peak_memory() -> int:
    """Bytes that this process has held at most; on a GPU, that its tensors have held there."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return 0
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) if sys.platform == "darwin" else int(most) * 1024
