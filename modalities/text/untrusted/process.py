"""The parent's side: a child process that works on a stranger's file, with its time and memory bounded.

Independent of templates and tokenizers (child.py)."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.core.errors import OutriderError
from outrider.core.paths import cache_folder

_SECONDS, _MEGABYTES = 5.0, 500
_LARGE = 4  # megabytes from which a tokenizer file has more of both


class UntrustedError(OutriderError):
    """A stranger's file that can't be used."""


class BoundedProcess:
    """One child, started with the first request and again after it was stopped; requests take turns."""

    def __init__(self, seconds: float = _SECONDS, megabytes: int = _MEGABYTES) -> None:
        self.seconds, self.megabytes = seconds, megabytes
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._parent = os.getpid()

    def ask(self, action: str, *arguments: Any) -> Any:
        """The action's value. Stops the child when its time is over."""
        with self._lock:
            child = self._started()
            assert child.stdin is not None and child.stdout is not None
            timer = threading.Timer(self.seconds, child.kill)
            timer.daemon = True
            timer.start()
            try:
                child.stdin.write(json.dumps({"action": action, "arguments": arguments}) + "\n")
                child.stdin.flush()
                line = child.stdout.readline()
            except (OSError, ValueError):
                line = ""
            finally:
                timer.cancel()
            if not line:
                child.communicate()  # closes its pipes
                code, self._child = child.returncode, None
                ended = f"it took more than {self.seconds:.0f} s" if code == -9 else f"its process ended with {code}"
                raise UntrustedError(ended)
        answer = json.loads(line)
        if "error" in answer:
            raise UntrustedError(answer["error"])
        return answer["value"]

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None or self._parent != os.getpid():
            self._parent = os.getpid()  # after a fork, the child is the other process's
            script = Path(__file__).with_name("child.py")
            command = [sys.executable, "-I", str(script), str(self.megabytes)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._child = subprocess.Popen(command, text=True, encoding="utf-8", **pipes)  # type: ignore[call-overload]
        return self._child

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.kill()
                self._child.communicate()
            self._child = None


@functools.cache
def shared() -> BoundedProcess:
    """The process for all models."""
    process = BoundedProcess()
    atexit.register(process.close)
    return process


def check_tokenizer(path: Path) -> None:
    """Try a tokenizer file in the child, once for its contents: it may make the library panic or abort."""
    mark = cache_folder() / "checked" / f"{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}.tokenizer"
    if mark.exists():
        return
    size = path.stat().st_size >> 20
    process = shared() if size < _LARGE else BoundedProcess(_SECONDS + size, _MEGABYTES + 40 * size)
    try:
        process.ask("try_tokenizer", str(path.absolute()))
    finally:
        if process is not shared():
            process.close()
    with suppress(OSError):  # without a cache it is tried again the next time
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
