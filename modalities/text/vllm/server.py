"""Runs vLLM's server as a separate process, with its settings for our drafters.

Uses the Python of the venv that outrider.text.bench.peers maintains, or another that has vLLM. Options for several
devices and machines are passed through to vLLM. The client is in outrider.text.vllm.client.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core.assets.files import read_json
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods import DRAFTERS
from outrider.core.methods.lookup import PROMPT_LOOKUP, SUFFIX
from outrider.core.methods.trained import MEDUSA
from outrider.core.paths import cache_folder
from outrider.text.bench.peers import PEERS
from outrider.text.bench.venvs import pip
from outrider.text.vllm.client import Client, ServeError
from outrider.text.vllm.export import NOTE, WRITERS, export, refused

MODULE = "vllm.entrypoints.openai.api_server"
ARCTIC = "arctic-inference==0.1.1"  # for suffix decoding: the version that vLLM requires
_BUILDS = ("nanobind==2.9.2", "grpcio-tools", "wheel", "cmake")
_START_TIMEOUT = 900.0  # seconds

# ---- settings


def speculative(
    model: str, drafter: str | None, *, length: int | None = None, weights: Path | None = None
) -> dict[str, Any] | None:
    """Return vLLM's --speculative-config for one of our drafters. A trained drafter is exported first, unless `weights`
    is a folder written by `outrider export vllm`, or another draft model."""
    if length is not None and length < 1:
        raise InvalidOption(f"length is {length}; it must be 1 drafted token or more")
    if drafter is None:
        return None
    if drafter == PROMPT_LOOKUP.name:
        lookup = PEERS["vllm"]
        return {
            "method": PROMPT_LOOKUP.vllm,
            "num_speculative_tokens": length or lookup.length,
            "prompt_lookup_max": lookup.max_ngram,
            "prompt_lookup_min": 2,
        }
    if drafter == SUFFIX.name:
        return {"method": SUFFIX.vllm, **({"num_speculative_tokens": length} if length else {})}
    if drafter not in WRITERS:
        raise refused(drafter)
    folder = weights
    if folder is None or folder.suffix == ".safetensors":
        name = f"{Path(model).name or model}-{drafter}"
        folder = export(model, drafter, cache_folder() / "exported" / name, weights=weights)
    if not (folder / "config.json").is_file():
        raise InvalidOption(f"{folder} has no config.json; give a folder written by `outrider export vllm`")
    note = read_json(folder / NOTE) if (folder / NOTE).is_file() else {}
    if note.get("drafter", drafter) != drafter:
        raise InvalidOption(f"{folder} contains the drafter {note['drafter']}, not {drafter}")
    exported_length = int(note.get("length", 4))
    if drafter == MEDUSA.name and length not in (None, exported_length):
        raise Incompatible(f"vLLM always drafts with all Medusa heads, here {exported_length}; leave the length out")
    return {"method": DRAFTERS[drafter].vllm, "model": str(folder), "num_speculative_tokens": length or exported_length}


def interpreter(given: Path | None = None) -> Path:
    """Return a Python that has vLLM: the given one or that of our venv; raises ServeError if there is none."""
    venv = PEERS["vllm"].venv
    python = given or venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    remedy = "`outrider serve --install` makes a venv with its CPU build; --python names a Python that has it"
    if not python.is_file():
        raise ServeError(f"vLLM is not installed: there is no {python}. {remedy}")
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    if subprocess.run([str(python), "-P", "-c", probe], capture_output=True, check=False).returncode:
        raise ServeError(f"{python} has no vLLM. {remedy}")
    if given is None and (conflicting := [package for package in PEERS["vllm"].unwanted if _has(python, package)]):
        raise ServeError(f"vLLM's CPU build does not start beside {', '.join(conflicting)}: uninstall that in {venv}")
    return python


def can_draft(python: Path, drafter: str | None) -> None:
    """Raise ServeError if this vLLM lacks the separate package of suffix decoding."""
    if drafter == SUFFIX.name and not _has(python, ARCTIC.partition("==")[0].replace("-", "_")):
        raise ServeError(
            f"vLLM's suffix decoding needs {ARCTIC}, which {python} does not have; `outrider serve --install --drafter "
            "suffix` builds it in our venv, with a C++ compiler"
        )


def add_suffix(python: Path, say: Callable[[str], None]) -> None:
    """Build the package of suffix decoding if it is missing. It is distributed as source only and requests its own
    PyTorch for the build, but also builds with the installed one."""
    if _has(python, ARCTIC.partition("==")[0].replace("-", "_")):
        return
    say(f"building {ARCTIC} (once)")
    with tempfile.TemporaryDirectory() as folder:
        pip(python, "install", "--only-binary=:all:", "--target", folder, *_BUILDS)
        path = os.pathsep.join([str(Path(folder) / "bin"), os.environ.get("PATH", "")])
        pip(python, "install", "--no-deps", "--no-build-isolation", ARCTIC, PATH=path, PYTHONPATH=folder)


def _has(python: Path, package: str) -> bool:
    return any(python.parent.parent.glob(f"lib/python*/site-packages/{package}"))


def check_port(host: str, port: int) -> None:
    """Raise ServeError if a port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServeError(
                f"port {port} of {host} can't be used ({error.strerror}); give another with --port"
            ) from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings of a server."""

    folder: Path  # of the target
    name: str
    drafter: str | None = None  # our name, which the server lists as a model for clients
    speculative: Mapping[str, Any] | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "bfloat16"
    context: int | None = None
    rows: int | None = None  # maximum batch size
    parallel: Mapping[str, int] = field(default_factory=dict)  # tensor, pipeline, data
    extra: Sequence[str] = ()  # further options of vLLM

    def command(self, python: Path) -> list[str]:
        """Return the command line, which also works without Outrider."""
        words = [str(python), "-P", "-m", MODULE, "--model", str(self.folder), "--served-model-name", self.name]
        words += [f"{self.name}:{self.drafter}"] * (self.drafter is not None)
        words += ["--host", self.host, "--port", str(self.port), "--dtype", self.dtype]
        if self.context is not None:
            words += ["--max-model-len", str(self.context)]
        if self.rows is not None:
            words += ["--max-num-seqs", str(self.rows)]
        for kind, count in self.parallel.items():
            words += [f"--{kind}-parallel-size", str(count)]
        if self.speculative is not None:
            words += ["--speculative-config", json.dumps(dict(self.speculative))]
        return [*words, *self.extra]


def environment(python: Path, threads: int | None = None) -> dict[str, str]:
    """Return the environment of the process; variables that are already set take precedence."""
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        **os.environ,
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")]),  # its own compilers
    }
    return env | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


# ---- the process


@contextmanager
def running(setup: Setup, python: Path, *, threads: int | None = None, log: Path | None = None) -> Iterator[Client]:
    """Run a server within the context, and end all its processes afterwards."""
    check_port(setup.host, setup.port)
    with _sigterm_as_exit():
        yield from _running(setup, python, threads, log)


def run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a server in the foreground until it ends; its exit code. Ctrl-C ends it and all its processes."""
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        return process.wait()
    finally:
        _end(process, 1.0)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM into an exception, as Ctrl-C is, so that no server is left running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _running(setup: Setup, python: Path, threads: int | None, log: Path | None) -> Iterator[Client]:
    path = log or cache_folder() / "peers" / "vllm-serve.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        process = subprocess.Popen(
            setup.command(python),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(python, threads),
            start_new_session=True,
        )
    try:
        client = Client(f"http://{setup.host}:{setup.port}", setup.name)
        deadline = time.monotonic() + _START_TIMEOUT
        while not client.alive():
            if process.poll() is not None:
                raise ServeError(f"vLLM stopped during start-up: {last_words(path)} (full log: {path})")
            if time.monotonic() > deadline:
                raise ServeError(f"vLLM did not answer within {_START_TIMEOUT:.0f} s; see its log, {path}")
            time.sleep(0.5)
        yield client
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes], patience: float = 20.0) -> None:
    """Stop the server, which stops its engine process, and kill whatever remains."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(log: Path) -> str:
    """Return the line of a log that names the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    messages = [
        re.sub(r"^(\(\w+ pid=\d+\)\s*)?((ERROR|INFO|WARNING) [\d:\- ]+\[[^\]]*\]\s*)?", "", line) for line in lines
    ]
    errors = [line for line in messages if re.match(r"[\w.]*(Error|Exception)\b", line)]
    causes = [line for line in errors if not line.startswith("RuntimeError: Engine core")]  # refers to an earlier error
    return (causes[:1] or errors[-1:] or lines[-1:] or ["no output"])[0][:300]  # the first error caused the others
