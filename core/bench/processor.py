"""The name of this machine's processor, for results that say where they were measured."""

from __future__ import annotations

import platform
import re
from pathlib import Path

_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}


def processor() -> str:
    """The processor's name and its widest matrix or vector instructions."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    name, flags = (re.search(rf"^{key}\s*:\s*(.+)$", info, re.MULTILINE) for key in ("model name", "flags"))
    supported = flags[1].split() if flags else ()
    widest = next((f" with {words}" for flag, words in _INSTRUCTIONS.items() if flag in supported), "")
    return (name[1].strip() if name else platform.processor()) + widest
