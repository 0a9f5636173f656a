"""Virtual environments in the user's cache: for engines that are not dependencies, and for what builds them.

Each is created on first use, and again when other packages are wanted. Independent of what runs in them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outrider.core.errors import OutriderError


class PeerError(OutriderError):
    """An engine that cannot be installed or has stopped."""


def python_in(folder: Path) -> Path:
    """The interpreter of a venv."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def venv(
    folder: Path, packages: Sequence[str], unwanted: Sequence[str], say: Callable[[str], None], what: str, size: str
) -> Path:
    """The interpreter of a venv with these packages, which is created if it is missing or has others. `unwanted`
    dependencies are uninstalled again; `what` and `size` are for the message."""
    python = python_in(folder)
    stamp, wanted = folder / "outrider.txt", "\n".join(packages)
    if stamp.is_file() and stamp.read_text() == wanted and python.is_file():
        return python
    say(f"creating a venv for {what} in {folder} (once; {size})")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    call([sys.executable, "-m", "venv", str(folder)])
    pip(python, "install", "--only-binary=:all:", *packages)
    if unwanted:
        pip(python, "uninstall", "--yes", *unwanted)
    stamp.write_text(wanted)
    return python


def pip(python: Path, what: str, *words: str, **env: str) -> None:
    """Run pip quietly with additional environment variables; raises PeerError if it fails."""
    call([str(python), "-m", "pip", what, "--quiet", "--disable-pip-version-check", "--no-input", *words], env)


def call(command: Sequence[str], env: Mapping[str, str] = {}, folder: Path | None = None) -> str:
    """Run a command in a folder with additional environment variables, and return its output; raises PeerError with
    the line that names the error if it fails."""
    completed = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **env}, cwd=folder
    )
    if completed.returncode:
        lines = [line for line in (completed.stderr + completed.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "ERROR" in line or "rror:" in line]
        raise PeerError(f"not installable here: {(errors or lines or ['no reason given'])[-1].strip()}")
    return completed.stdout
