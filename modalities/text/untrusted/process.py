"""The parent's side: a child process that works on a stranger's file, with its time and memory bounded.

Independent of templates and tokenizers (child.py)."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.core.assets.files import write_atomically
from outrider.core.errors import OutriderError
from outrider.core.paths import cache_folder

_SECONDS, _MEGABYTES = 5.0, 500
_PATIENCE = 12  # times its seconds on the clock, however little of the processor the child had
_CONVERTING = 30.0  # seconds, for transformers is imported
_WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack"}  # no tokenizer's
_LARGE = 4  # megabytes from which a tokenizer file has more of both


class UntrustedError(OutriderError):
    """A stranger's file that can't be used."""


class BoundedProcess:
    """One child, started with the first request and again after it was stopped; requests take turns. `seconds` are of
    the processor where that can be read, so that a busy machine stops nothing that is harmless."""

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
            done = threading.Event()
            threading.Thread(target=_bound, args=(child, self.seconds, done), daemon=True).start()
            try:
                child.stdin.write(json.dumps({"action": action, "arguments": arguments}) + "\n")
                child.stdin.flush()
                line = child.stdout.readline()
            except (OSError, ValueError):
                line = ""
            finally:
                done.set()
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


def _bound(child: subprocess.Popen[str], seconds: float, done: threading.Event) -> None:
    """Kill the child when it has used its time, unless it is done before."""
    began, used = time.monotonic(), _processor_seconds(child.pid) or 0.0
    left = seconds
    while not done.wait(max(left, 0.02)):
        waited, now = time.monotonic() - began, _processor_seconds(child.pid)
        left = seconds - (waited if now is None else now - used)
        if left <= 0 or waited >= _PATIENCE * seconds:
            child.kill()
            return


def _processor_seconds(pid: int) -> float | None:
    """The processor time of a process; None where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


@functools.cache
def shared() -> BoundedProcess:
    """The process for all models."""
    process = BoundedProcess()
    atexit.register(process.close)
    return process


def converted_tokenizer(folder: Path) -> dict[str, Any]:
    """The tokenizer of a folder without tokenizer.json, which transformers converts in a child, once for the files'
    contents: "tokenizer" (the text of a tokenizer.json), "template" and "special"."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix not in _WEIGHTS]
    digest = hashlib.sha256(importlib.metadata.version("transformers").encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    mark = cache_folder() / "checked" / f"{digest.hexdigest()[:32]}.converted.json"
    with suppress(OSError, ValueError):
        kept: dict[str, Any] = json.loads(mark.read_text(encoding="utf-8"))
        return kept
    size = sum(path.stat().st_size for path in files) >> 20
    process = BoundedProcess(_CONVERTING + size, 2 * _MEGABYTES + 40 * size)
    try:
        result: dict[str, Any] = process.ask("convert_tokenizer", str(folder.absolute()))
    finally:
        process.close()
    with suppress(OSError, OutriderError):
        write_atomically(mark, json.dumps(result))
    return result


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
