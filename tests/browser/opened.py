"""Opens a page in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def started(script: str, folder: Path, variables: Mapping[str, str] | None = None) -> Iterator[tuple[str, int]]:
    """The address of a page and the id of its process, which has `variables` in its environment. `script` is a file in
    this folder that creates models in `folder` and opens the page."""
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder)]
    environment = {**os.environ, **(variables or {})}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as server:  # type: ignore[call-overload]
        assert server.stdin is not None and server.stdout is not None
        yield server.stdout.readline().strip(), server.pid
        server.stdin.close()
        server.wait(120)


@contextmanager
def opened(script: str, folder: Path) -> Iterator[str]:
    """The address of a page."""
    with started(script, folder) as (address, _):
        yield address
