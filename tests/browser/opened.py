"""A page on this machine in a process of its own, as long as somebody looks at it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened(script: str, folder: Path) -> Iterator[str]:
    """Its address. `script` is one beside this file, which opens the page on models that it makes in the folder."""
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()
        server.wait(120)  # a busy machine takes its time
