"""Other engines: workers that answer, fail, die or hang; venvs that cannot be created; files in the formats they read.

A fake worker script runs here; the engines themselves are not installed by tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.core.assets.store import ASSETS
from outrider.core.bench.runner import Counts, Item
from outrider.core.errors import OutriderError
from outrider.text.bench import llama_cpp, peer_worker, peers
from outrider.text.bench.peers import PEERS, Model, Peer, Worker, find_model, python_of, started
from outrider.text.bench.venvs import PeerError

STAND_IN = """
import json, sys, time
options = json.loads(sys.argv[2])
if options["folder"].endswith("broken"):
    sys.exit("ValueError: no such architecture")
print(json.dumps({"precision": "4-bit"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["ids"] == [13]:
        sys.exit("MemoryError: too much")
    if asked["ids"] == [14]:
        time.sleep(60)
    if asked["ids"] == [15]:
        print(json.dumps({"error": "RuntimeError:  two\\n lines"}), flush=True)
        continue
    print(json.dumps({"tokens": [*asked["ids"], asked["limit"]], "seconds": 0.5, "memory": 7}), flush=True)
"""
OPTIONS: dict[str, Any] = {"threads": 1, "folder": "x"}


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(peers, "WORKER", script)
    monkeypatch.setattr(peers, "_SETTLE", 0.0)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def worker(tmp_path: Path) -> Worker:
    made = Worker(Path(sys.executable), "any", OPTIONS, tmp_path / "log.txt")
    assert made.answer(60)["precision"] == "4-bit"
    return made


def test_a_worker_answers_one_prompt_at_a_time_and_ends(tmp_path: Path) -> None:
    one = worker(tmp_path)
    assert one.ask([1, 2], 9) == {"tokens": [1, 2, 9], "seconds": 0.5, "memory": 7}
    assert one.ask([3], 9)["tokens"] == [3, 9]
    one.close()
    assert one._process.returncode == 0


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (13, "the process stopped: MemoryError: too much"),
        (15, "RuntimeError: two lines"),
        pytest.param(14, "no answer", marks=pytest.mark.slow),
    ],
)
def test_a_failing_worker_raises_with_the_reason(
    prompt: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_ANSWER_TIMEOUT", 60.0 if prompt != 14 else 0.2)
    one = worker(tmp_path)
    try:
        with pytest.raises(PeerError, match=words):
            one.ask([prompt], 1)
    finally:
        one.close()
    assert one._process.returncode is not None
    with pytest.raises(PeerError):
        one.ask([1], 1)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that need no venv."""
    table = {"good": Peer("good"), "other": Peer("other", reads="gguf"), "absent": Peer("absent", ("absent==1",))}
    monkeypatch.setattr(peers, "PEERS", table)
    monkeypatch.setattr(Peer, "version", "1")


@pytest.mark.usefixtures("ours")
def test_engines_are_contenders_and_missing_ones_are_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "x\nERROR: No matching distribution found for absent==1\n\n")

    monkeypatch.setattr(subprocess, "run", fail)
    messages: list[str] = []
    names = ("good", "other", "absent")
    model = Model(tmp_path, None, (2,), 64)
    with started(model, lambda item: item.content, limit=9, threads=1, names=names, say=messages.append) as result:
        assert [contender.name for contender in result.contenders] == ["good plain", "good prompt-lookup"]
        assert all(one.optional and one.engine == "good" for one in result.contenders)
        outcome = result.contenders[1].run(Item("a", "t", [4]))
        assert (outcome.tokens, outcome.seconds, outcome.memory) == ((4, 9), 0.5, 7)
        with pytest.raises(PeerError, match="MemoryError"):
            result.contenders[0].run(Item("a", "t", [13]))
    assert result.skipped["absent"] == "not installable here: ERROR: No matching distribution found for absent==1"
    assert result.skipped["other plain"] == "it reads GGUF files, and none was found"
    assert result.settings["good prompt-lookup"]["length"] == 5
    assert "length" not in result.settings["good plain"]
    assert any("creating a venv" in line for line in messages)


@pytest.mark.usefixtures("ours")
def test_engines_of_another_device_are_skipped_and_the_device_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    class Seen(Worker):
        def __init__(self, python: Path, kind: str, options: dict[str, Any], log: Path) -> None:
            seen.append(options)
            super().__init__(python, kind, options, log)

    monkeypatch.setattr(peers, "Worker", Seen)
    table = {"here": Peer("here", cuda=()), "cpu": Peer("cpu"), "gpu": Peer("gpu", None, cuda=())}
    monkeypatch.setattr(peers, "PEERS", table)
    model = Model(Path("x"), None, (2,), 64)
    for device, engines in (("cpu", {"here", "cpu"}), ("cuda:1", {"here", "gpu"})):
        seen.clear()
        with started(model, lambda item: item.content, limit=9, threads=1, device=device, names=tuple(table)) as result:
            assert {contender.engine for contender in result.contenders} == engines
        assert {options["device"] for options in seen} == {device}
        assert set(result.skipped) == set(table) - engines


def test_each_device_has_its_own_venv() -> None:
    vllm = PEERS["vllm"]
    assert vllm.on("cpu") is vllm
    assert vllm.on("cuda").packages == vllm.cuda
    assert vllm.on("cuda").venv != vllm.venv
    assert vllm.on("cuda").version == "0.33.0"


@pytest.mark.usefixtures("ours")
def test_an_engine_that_cannot_load_the_model_is_skipped() -> None:
    model = Model(Path("broken"), None, (2,), 64)
    with started(model, lambda item: item.content, limit=9, threads=1, names=("good",)) as result:
        assert not result.contenders
    assert result.skipped["good plain"] == "the process stopped: ValueError: no such architecture"


def test_a_venv_is_created_once_and_again_for_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin" / "python").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    messages: list[str] = []
    peer = Peer("x", ("x==1", "y==2"), ("z",))
    python = python_of(peer, messages.append)
    assert python == peer.venv / "bin" / "python"
    assert [call[-1] for call in calls] == [str(peer.venv), "y==2", "z"]
    assert python_of(peer, messages.append) == python
    assert len(calls) == 3
    python_of(Peer("x", ("x==2",)), messages.append)
    assert len(calls) == 5
    assert python_of(PEERS["transformers"], messages.append) == Path(sys.executable)


def test_model_files_in_the_formats_that_engines_read(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    assert find_model(str(file), tmp_path, [2], 64) == Model(tmp_path, file, (2,), 64)
    assert find_model(str(tmp_path), tmp_path, [2], 64).gguf is None
    asset = ASSETS["smollm2-135m"]
    asset.folder.mkdir(parents=True)
    (asset.folder / "a.gguf").touch()
    assert find_model("smollm2-135m", tmp_path, [2], 64).gguf == asset.folder / "a.gguf"


@pytest.mark.slow
def test_output_of_libraries_is_kept_out_of_the_answers(tmp_path: Path) -> None:
    script = Path(peer_worker.__file__)
    done = subprocess.run(
        [sys.executable, "-P", "-u", str(script), "transformers", json.dumps({"threads": 1, "folder": str(tmp_path)})],
        capture_output=True,
        text=True,
        check=False,
        input="",
    )
    answer = json.loads(done.stdout)
    assert list(answer) == ["error"]
    assert "Traceback" in done.stderr


# ---- llama.cpp

# llama-server's own
TIMINGS = json.loads((Path(__file__).parents[2] / "app" / "formats" / "llama-server.json").read_text())["timings"]


def test_timings_of_llama_server_become_counts() -> None:
    assert peer_worker.counted(TIMINGS) == {"passes": 63, "drafted": 25, "accepted": 17, "seconds": 133.37715}
    plain = {"predicted_n": 4, "predicted_ms": 10.0}
    assert peer_worker.counted(plain) == {"passes": 4, "drafted": 0, "accepted": 0, "seconds": 0.01}


def test_costs_printed_by_llama_bench_are_medians_by_tokens() -> None:
    printed = [{"n_prompt": 1, "samples_ns": [3e6, 2e6, 9e6]}, {"n_prompt": 4, "samples_ns": [4e6]}]
    assert llama_cpp.parse_costs(json.dumps(printed)) == {1: 3.0, 4: 4.0}
    with pytest.raises(PeerError, match="no measurements"):
        llama_cpp.parse_costs("error")


def test_modes_of_llama_cpp_name_their_options_and_a_draft_model_is_needed(tmp_path: Path) -> None:
    assert llama_cpp.MODES["plain"].arguments(None) == ()
    model = llama_cpp.MODES["draft-simple"].arguments(tmp_path / "d.gguf")
    assert model[:4] == ("--spec-type", "draft-simple", "--spec-draft-model", str(tmp_path / "d.gguf"))
    with pytest.raises(PeerError, match="GGUF file of a draft model"):
        llama_cpp.MODES["draft-simple"].arguments(None)


def test_a_folder_of_ones_own_without_the_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_LLAMA_CPP", str(tmp_path))
    assert not llama_cpp.built()
    with pytest.raises(PeerError, match="has no llama-server"):
        llama_cpp.server(lambda line: None)


def test_a_build_with_tiles_is_made_again_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor has AMX, with whose tiles the programs of this version die."""
    monkeypatch.setattr(llama_cpp, "folder", lambda: tmp_path)
    for name, flags in (("one with AVX2", 0), ("one with AMX", 2)):
        monkeypatch.setattr(llama_cpp, "processor", lambda name=name: name)
        words = llama_cpp._without_tiles()
        assert len(words) == flags and all("-mno-amx-tile" in word for word in words)
        assert not llama_cpp.built()
        (tmp_path / "outrider.txt").write_text(llama_cpp._stamp())
        assert llama_cpp.built()


def test_the_engines_to_measure_are_checked_by_name() -> None:
    assert peers.peers_named(["vllm", "llama.cpp", "vllm"]) == ("vllm", "llama.cpp")
    assert peers.peers_named(["all"]) == tuple(PEERS)
    with pytest.raises(OutriderError, match=r"llama\.cpp"):
        peers.peers_named(["lama.cpp"])


SERVER = """#!{python}
import http.server, json, sys
words = sys.argv[1:]
if "broken.gguf" in words:
    sys.exit("error: failed to load model")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"] == [13]:
            return self.answer(400, {{"error": "too long"}})
        assert not asked["cache_prompt"] and asked["temperature"] == 0 and asked["return_tokens"]
        timings = {{"predicted_n": 3, "predicted_ms": 8.0, "draft_n": 4, "draft_n_accepted": 2}}
        spec = "--spec-type" in words
        self.answer(200, {{"tokens": [*asked["prompt"], asked["n_predict"], int(spec)], "timings": timings}})
    def answer(self, code, data):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())
    def log_message(self, *args):
        pass
place = words.index("--port") + 1
http.server.HTTPServer(("127.0.0.1", int(words[place])), Handler).serve_forever()
"""


def test_the_worker_starts_a_llama_server_asks_it_and_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in speaks the server's protocol; the next test runs the real one where it is built."""
    monkeypatch.setattr(peers, "WORKER", Path(peer_worker.__file__))
    monkeypatch.setenv("OUTRIDER_LLAMA_CPP", str(tmp_path))
    server = tmp_path / "llama-server"
    server.write_text(SERVER.format(python=sys.executable))
    server.chmod(0o755)
    model = Model(None, tmp_path / "m.gguf", (2,), 64)
    with started(model, lambda item: item.content, limit=9, threads=1, names=("llama.cpp",)) as result:
        assert "GGUF file of a draft model" in result.skipped["llama.cpp draft-simple"]
        plain, simple, cache = result.contenders
        outcome = plain.run(Item("a", "t", [4, 5]))
        assert outcome.tokens == (4, 5, 9, 0) and outcome.counts == Counts(1, 4, 2, 0.008)
        assert outcome.decode_speed == 500 and outcome.memory > 0
        assert simple.run(Item("a", "t", [4])).tokens == cache.run(Item("a", "t", [4])).tokens == (4, 9, 1)
        assert result.settings["llama.cpp ngram-cache"]["arguments"][:2] == ["--spec-type", "ngram-cache"]
        with pytest.raises(PeerError, match="too long"):
            plain.run(Item("a", "t", [13]))
    paired = Model(None, tmp_path / "m.gguf", (2,), 64, tmp_path / "d.gguf")
    with started(paired, lambda item: item.content, limit=9, threads=1, names=("llama.cpp",)) as result:
        shown = result.settings["llama.cpp draft-simple"]["arguments"]
        assert "d.gguf" in shown and not any(str(tmp_path) in word for word in shown)  # a report names no folders
        assert result.contenders[1].run(Item("a", "t", [4])).tokens == (4, 9, 1)
    broken = Model(None, Path("broken.gguf"), (2,), 64)
    with started(broken, lambda item: item.content, limit=9, threads=1, names=("llama.cpp",)) as result:
        assert not result.contenders and "did not start" in result.skipped["llama.cpp plain"]


@pytest.mark.slow
def test_llama_cpp_decodes_the_default_model_in_its_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs a build, which takes minutes: that of `outrider bench text --peers llama.cpp`, or $OUTRIDER_LLAMA_CPP."""
    monkeypatch.undo()
    gguf = ASSETS["smollm2-135m"].folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not llama_cpp.built() or not gguf.is_file():
        pytest.skip("llama.cpp is not built here, or the default model was not fetched as a GGUF file")
    ids = [1, 9690, 198, 504, 3575, 282, 4649, 314]
    with started(
        Model(None, gguf, (2,), 256), lambda item: item.content, limit=24, threads=1, names=("llama.cpp",)
    ) as result:
        modes = [contender.name.removeprefix("llama.cpp ") for contender in result.contenders]
        assert modes == ["plain", "ngram-simple", "ngram-cache"], result.skipped
        assert "draft model" in result.skipped["llama.cpp draft-simple"]
        outcomes = [contender.run(Item("a", "t", ids)) for contender in result.contenders]
    assert len({outcome.tokens for outcome in outcomes}) == 1
    assert all(outcome.counts and outcome.counts.seconds > 0 and outcome.memory > 1e7 for outcome in outcomes)
    plain = outcomes[0].counts
    assert plain is not None and plain.passes == len(outcomes[0].tokens) == 24
