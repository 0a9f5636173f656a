"""vLLM as an engine: its settings for a drafter of ours, and its server as a process of its own.

Runs by the Python of the venv that outrider.text.bench.peers keeps for it, or by another that has vLLM. Several
devices and machines are vLLM's affair: its options for them are passed through. Knows commands and processes, nothing
of models; outrider.text.vllm.client talks to the server.
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

from outrider.core.assets.store import read_json
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.paths import cache_folder
from outrider.text.bench.peers import PEERS, pip
from outrider.text.vllm.client import Client, ServeError
from outrider.text.vllm.export import NOTE, WRITERS, export, refused

MODULE = "vllm.entrypoints.openai.api_server"
SUFFIX = "arctic-inference==0.1.1"  # as vLLM has it
_BUILDS = ("nanobind==2.9.2", "grpcio-tools", "wheel", "cmake")
_STARTING = 900.0  # seconds
# ---- what vLLM is told


def speculative(
    model: str, drafter: str | None, *, length: int | None = None, weights: Path | None = None
) -> dict[str, Any] | None:
    """vLLM's --speculative-config for a drafter of ours; a trained one is written out for it first, unless `weights`
    is a folder that `outrider export vllm` has written, or another model that drafts."""
    if length is not None and length < 1:
        raise InvalidOption(f"length is {length}; it must be 1 drafted token or more")
    if drafter is None:
        return None
    if drafter == "prompt-lookup":
        lookup = PEERS["vllm"]
        return {
            "method": "ngram",
            "num_speculative_tokens": length or lookup.length,
            "prompt_lookup_max": lookup.longest,
            "prompt_lookup_min": 2,
        }
    if drafter == "suffix":
        return {"method": "suffix", **({"num_speculative_tokens": length} if length else {})}
    if drafter not in WRITERS:
        raise refused(drafter)
    folder = weights
    if folder is None or folder.suffix == ".safetensors":
        name = f"{Path(model).name or model}-{drafter}"
        folder = export(model, drafter, cache_folder() / "exported" / name, weights=weights)
    if not (folder / "config.json").is_file():
        raise InvalidOption(f"{folder} has no config.json; give a folder that `outrider export vllm` has written")
    note = read_json(folder / NOTE) if (folder / NOTE).is_file() else {}
    if note.get("drafter", drafter) != drafter:
        raise InvalidOption(f"{folder} holds the drafter {note['drafter']}, not {drafter}")
    written = int(note.get("length", 4))
    if drafter == "medusa" and length not in (None, written):
        raise Incompatible(f"vLLM drafts with every head of Medusa's; these are {written}, so leave the length out")
    method = {"draft-model": "draft_model"}.get(drafter, drafter)
    return {"method": method, "model": str(folder), "num_speculative_tokens": length or written}


def interpreter(given: Path | None = None) -> Path:
    """A Python that has vLLM: the one given, or that of our venv; a clear error where neither is there."""
    venv = PEERS["vllm"].venv
    python = given or venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    cure = "`outrider serve --install` makes a venv with its CPU build; --python names a Python that has it"
    if not python.is_file():
        raise ServeError(f"vLLM is not installed: there is no {python}. {cure}")
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    if subprocess.run([str(python), "-P", "-c", look], capture_output=True, check=False).returncode:
        raise ServeError(f"{python} has no vLLM. {cure}")
    if given is None and (wrong := [one for one in PEERS["vllm"].unwanted if _has(python, one)]):
        raise ServeError(f"vLLM's CPU build does not start beside {', '.join(wrong)}: uninstall that in {venv}")
    return python


def can_draft(python: Path, drafter: str | None) -> None:
    """Refuse what this vLLM has no code for: suffix decoding is in a package of its own."""
    if drafter == "suffix" and not _has(python, SUFFIX.partition("==")[0].replace("-", "_")):
        raise ServeError(
            f"vLLM's suffix decoding needs {SUFFIX}, which {python} has not; `outrider serve --install --drafter "
            "suffix` builds it in our venv, with a C++ compiler"
        )


def add_suffix(python: Path, say: Callable[[str], None]) -> None:
    """Build what suffix decoding needs, if it isn't there. It comes as source alone, and says that it is built with a
    PyTorch of its own; beside the one that is there it builds as well."""
    if _has(python, SUFFIX.partition("==")[0].replace("-", "_")):
        return
    say(f"building {SUFFIX} (once)")
    with tempfile.TemporaryDirectory() as folder:
        pip(python, "install", "--only-binary=:all:", "--target", folder, *_BUILDS)
        path = os.pathsep.join([str(Path(folder) / "bin"), os.environ.get("PATH", "")])
        pip(python, "install", "--no-deps", "--no-build-isolation", SUFFIX, PATH=path, PYTHONPATH=folder)


def _has(python: Path, package: str) -> bool:
    return any(python.parent.parent.glob(f"lib/python*/site-packages/{package}"))


def check_port(host: str, port: int) -> None:
    """Refuse a port that somebody else listens at."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError as error:
            raise ServeError(
                f"port {port} of {host} can't be used ({error.strerror}); give another with --port"
            ) from None


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        found: int = one.getsockname()[1]
        return found


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a server is started."""

    folder: Path  # of the target
    name: str
    drafter: str | None = None  # of ours, for those who ask the server what it runs
    speculative: Mapping[str, Any] | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "bfloat16"
    context: int | None = None
    rows: int | None = None  # decoded side by side
    parallel: Mapping[str, int] = field(default_factory=dict)  # tensor, pipeline, data
    extra: Sequence[str] = ()  # vLLM's own options, as they are

    def command(self, python: Path) -> list[str]:
        """The command line, which works without us too."""
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
    """What the process is to know; what the user has set stays as it is."""
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        **os.environ,
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")]),  # compilers of its own
    }
    return env | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


# ---- the process


@contextmanager
def running(setup: Setup, python: Path, *, threads: int | None = None, log: Path | None = None) -> Iterator[Client]:
    """A server that answers, as long as the context lasts; whatever it has started ends with it."""
    check_port(setup.host, setup.port)
    with _leaving_in_order():
        yield from _running(setup, python, threads, log)


@contextmanager
def _leaving_in_order() -> Iterator[None]:
    """A request to end (SIGTERM) is an exception like Ctrl-C, so that no server is left behind."""
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
        until = time.monotonic() + _STARTING
        while not client.alive():
            if process.poll() is not None:
                raise ServeError(f"vLLM stopped while it started: {last_words(path)} (all of it in {path})")
            if time.monotonic() > until:
                raise ServeError(f"vLLM did not answer within {_STARTING:.0f} s; what it said is in {path}")
            time.sleep(0.5)
        yield client
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server ends its engine, a process of its own; what is left of either is killed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(log: Path) -> str:
    """The line of a log that says what went wrong."""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    bare = [re.sub(r"^(\(\w+ pid=\d+\)\s*)?((ERROR|INFO|WARNING) [\d:\- ]+\[[^\]]*\]\s*)?", "", line) for line in said]
    errors = [line for line in bare if re.match(r"[\w.]*(Error|Exception)\b", line)]
    told = [line for line in errors if not line.startswith("RuntimeError: Engine core")]  # which only says: see above
    return (told[:1] or errors[-1:] or said[-1:] or ["it said nothing"])[0][:300]  # the first is the others' cause
