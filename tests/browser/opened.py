"""Opens a page in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened(script: str, folder: Path) -> Iterator[str]:
    """The address of a page. `script` is a file in this folder that creates models in `folder` and opens the page."""
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()
        server.wait(120)
