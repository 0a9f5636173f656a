"""Import modules in a child process, and report there what torch can do as one line of JSON.

A package with a broken compiled part may crash at import; this way only the child crashes.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Outcome:
    """The facts that a child reported, or its error."""

    facts: dict[str, Any]
    error: str | None


def probe(*modules: str) -> Outcome:
    """Import the modules in a child process; with torch among them, report its devices and precisions."""
    command = [sys.executable, "-P", "-m", "outrider.app.commands.probe", *modules]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode == 0:
        return Outcome(json.loads(child.stdout.splitlines()[-1]), None)
    if child.returncode < 0:
        return Outcome({}, f"crashes at import (signal {-child.returncode})")
    lines = child.stderr.strip().splitlines()
    return Outcome({}, lines[-1] if lines else f"fails at import (exit code {child.returncode})")


def torch_facts() -> dict[str, Any]:
    import torch

    devices = {"cpu": "processor"}
    for index in range(torch.cuda.device_count()):
        devices[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple GPU"

    def works(device: str, dtype: str) -> bool:
        try:
            ones = torch.ones(8, 8, device=device, dtype=getattr(torch, dtype))
            return bool((ones @ ones == 8).all())
        except (RuntimeError, TypeError, NotImplementedError):
            return False

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "devices": {
            device: {"name": name, "dtypes": [dtype for dtype in DTYPES if works(device, dtype)]}
            for device, name in devices.items()
        },
    }


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    print(json.dumps(torch_facts() if "torch" in sys.argv[1:] else {}))
