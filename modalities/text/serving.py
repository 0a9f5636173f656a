"""vLLM as an engine: its settings for a drafter of ours, its server as a process of its own, and what it says of
acceptance read back as steps of ours.

Runs by the Python of the venv that outrider.text.peers keeps for it, or by another that has vLLM. Several devices and
machines are vLLM's affair: its options for them are passed through. Knows HTTP and counters, nothing of models.
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
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core.assets import cache_folder, read_json
from outrider.core.errors import Incompatible, InvalidOption, OutriderError
from outrider.core.trace import Finish, Source, Step, Times
from outrider.text.exporting import NOTE, WRITERS, export, refused
from outrider.text.peers import PEERS, pip

MODULE = "vllm.entrypoints.openai.api_server"
NEEDS_NOTHING = ("prompt-lookup", "suffix")
SERVED = "served"  # the drafter of a server that somebody else has set up
SUFFIX = "arctic-inference==0.1.1"  # as vLLM has it
_BUILDS = ("nanobind==2.9.2", "grpcio-tools", "wheel", "cmake")
_STARTING, _ANSWERING = 900.0, 600.0  # seconds
_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


class ServeError(OutriderError):
    """vLLM can't be started here, or gave up."""


class Refused(ServeError):
    """It runs, and won't do what it is asked for."""


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


# ---- what it answers


@dataclass(frozen=True)
class Counters:
    """vLLM's own counts of speculation; of everything since its start, or of what came between two readings."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()  # drafts of which this position was accepted

    def __sub__(self, other: Counters) -> Counters:
        before = (*other.by_position, *[0] * (len(self.by_position) - len(other.by_position)))
        places = tuple(a - b for a, b in zip(self.by_position, before, strict=True))
        return Counters(
            self.drafts - other.drafts, self.drafted - other.drafted, self.accepted - other.accepted, places
        )

    @classmethod
    def read(cls, text: str) -> Counters:
        """From the page of metrics; engines side by side are added up."""
        found = dict.fromkeys(_COUNTERS, 0)
        places: dict[int, int] = {}
        for line in text.splitlines():
            label, _, value = line.rpartition(" ")
            name = label.partition("{")[0]
            for key, wanted in _COUNTERS.items():
                if name == wanted:
                    found[key] += int(float(value))
            if name == _BY_POSITION and (place := re.search(r'position="(\d+)"', label)):
                places[int(place[1])] = places.get(int(place[1]), 0) + int(float(value))
        return cls(**found, by_position=tuple(places.get(n, 0) for n in range(max(places, default=-1) + 1)))


@dataclass(frozen=True)
class Reply:
    """One answer."""

    tokens: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]  # tokens as they came, those of one pass together
    seconds: float
    finish: str
    counters: Counters

    def steps(self) -> tuple[Step, ...]:
        """The rounds as ours. vLLM tells which tokens came of one pass, and how many were drafted in all, but neither
        the rejected tokens (-1 stands for each) nor in which of the rounds with one token a draft was rejected: those
        are said to be the first ones. Of chances it tells nothing."""
        counts = self.counters
        left, rejected = counts.drafts - sum(len(one) > 1 for one in self.rounds), counts.drafted - counts.accepted
        found: list[Step] = []
        longest = max(len(counts.by_position), 1)
        for index, tokens in enumerate(self.rounds):
            accepted = len(tokens) - 1
            wasted = 0
            if index and (accepted or left > 0):  # the first token is the prompt's own
                left -= not accepted
                wasted = max(min(longest - accepted, rejected), 0)
                rejected -= wasted
            last = index == len(self.rounds) - 1
            finish: Finish | None = None if not last else "end" if self.finish == "stop" else "limit"
            found.append(told(index, tokens, wasted, self.seconds / len(self.rounds), finish))
        return tuple(found)


def told(index: int, tokens: Sequence[int], wasted: int, seconds: float, finish: Finish | None = None) -> Step:
    """A round as a step: its tokens, all but the last one drafted, and so many more that were rejected."""
    accepted = len(tokens) - 1
    drafted = (*tokens[:accepted], *[-1] * wasted)
    count = len(drafted)
    last: Source = "resampled" if wasted else "bonus"
    return Step(
        row=0,
        index=index,
        drafted=drafted,
        parents=tuple(range(-1, count - 1)),
        fixed=(True,) * count,
        tried=(True,) * min(accepted + 1, count) + (False,) * max(count - accepted - 1, 0),
        path=tuple(range(accepted)),
        emitted=tuple(tokens),
        sources=(*["drafted"] * accepted, last),  # type: ignore[arg-type]
        finish=finish,
        times=Times(score=seconds),
    )


class Answering:
    """An answer under way: an iterator of the tokens that came of one pass. Closing it ends the answer over there."""

    def __init__(self, client: Client, asked: Mapping[str, Any]) -> None:
        self._client, self._before = client, client.counters()
        self.rounds: list[tuple[int, ...]] = []
        self.seconds, self._finish = 0.0, ""
        self._began = time.perf_counter()
        self._lines = client.stream("/v1/completions", asked)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return self

    def __next__(self) -> tuple[int, ...]:
        for line in self._lines:
            self.seconds = time.perf_counter() - self._began
            choice = (line.get("choices") or [{}])[0]
            self._finish = choice.get("finish_reason") or self._finish
            if tokens := choice.get("token_ids"):
                self.rounds.append(tuple(tokens))
                return self.rounds[-1]
        raise StopIteration

    def close(self) -> None:
        self._lines.close()

    def reply(self) -> Reply:
        """What there is so far."""
        counts = self._client.counters() - self._before
        tokens = tuple(one for part in self.rounds for one in part)
        return Reply(tokens, tuple(self.rounds), self.seconds, self._finish, counts)


class Client:
    """Talks to a server of vLLM's, one prompt at a time."""

    def __init__(self, url: str, name: str = "") -> None:
        self.url = url.rstrip("/")
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.url):
            raise InvalidOption(f"'{url}' is no address; give one such as http://127.0.0.1:8000")
        self._name = name
        self._pieces: dict[int, str] = {}

    @property
    def name(self) -> str:
        """The model it serves."""
        if not self._name:
            self._name = str(json.loads(self._ask("/v1/models"))["data"][0]["id"])
        return self._name

    def alive(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (OSError, ValueError):
            return False

    def counters(self) -> Counters:
        return Counters.read(self._ask("/metrics"))

    @property
    def drafter(self) -> str | None:
        """Who drafts there: a name of ours where `outrider serve` has started it, else SERVED; None: nobody."""
        names = [str(one["id"]).removeprefix(f"{self.name}:") for one in json.loads(self._ask("/v1/models"))["data"]]
        known = [one for one in names if one in (*NEEDS_NOTHING, *WRITERS)]
        return known[0] if known else SERVED if "vllm:spec_decode" in self._ask("/metrics") else None

    def encode(self, text: str) -> list[int]:
        """What a user says as ids, by the server's tokenizer and chat template; where it has none, the bare text."""
        try:
            found = self._post("/tokenize", {"messages": [{"role": "user", "content": text}]})
        except Refused:
            found = self._post("/tokenize", {"prompt": text})
        return [int(one) for one in found["tokens"]]

    def piece(self, token: int) -> str:
        """A single token for showing."""
        if token not in self._pieces:
            self._pieces[token] = str(self._post("/detokenize", {"tokens": [token]})["prompt"]) if token >= 0 else "?"
        return self._pieces[token]

    def answer(
        self, ids: Sequence[int], limit: int, *, end: Sequence[int] = (), temperature: float = 0.0, seed: int = 0
    ) -> Answering:
        """Token ids in, token ids out as they come."""
        asked = {
            "model": self.name,
            "prompt": list(ids),
            "max_tokens": limit,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": list(end),
            "stream": True,
            "return_token_ids": True,
        }
        return Answering(self, asked)

    def complete(
        self, ids: Sequence[int], limit: int, *, end: Sequence[int] = (), temperature: float = 0.0, seed: int = 0
    ) -> Reply:
        """The same at once."""
        answering = self.answer(ids, limit, end=end, temperature=temperature, seed=seed)
        for _ in answering:
            pass
        if not answering.rounds:
            raise ServeError(f"{self.url} answered without a token")
        return answering.reply()

    def stream(self, path: str, asked: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """What it sends line by line."""
        for line in self._open(path, asked):
            text = line.decode("utf-8").strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                found = json.loads(text.removeprefix("data: "))
                if "error" in found:
                    raise Refused(f"vLLM refused: {str(found['error'])[:300]}")
                yield found

    def _post(self, path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(b"".join(self._open(path, {"model": self.name, **asked})))
        return found

    def _ask(self, path: str) -> str:
        return b"".join(self._open(path)).decode("utf-8")

    def _open(self, path: str, asked: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        data = None if asked is None else json.dumps(asked).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_ANSWERING) as answer:
                yield from answer
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise Refused(f"vLLM refused: {said}") from None
        except (OSError, ValueError) as error:
            raise ServeError(f"no server of vLLM's answers at {self.url}: {error}") from None
