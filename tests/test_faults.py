"""Faults of machines: killed processes, full disks, no home, no compiler, no network, a clock that is set back.

Each ends in a clear sentence or does not matter, and nothing half-written is left or used. docs/guides/faults.md has
the table.
"""

from __future__ import annotations

import ast
import json
import os
import pwd
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import text
from outrider.app.commands.doctor import check_cache, check_native
from outrider.app.report import command as report
from outrider.app.report.sections import Section
from outrider.core.assets import files, sources
from outrider.core.assets.sources import Hub, Web
from outrider.core.assets.store import AssetError, Checkpoint, convert_gguf, fetch
from outrider.core.drafters.draft_model.sequoia import Calibration
from outrider.core.errors import OutriderError
from outrider.core.kernels import native
from outrider.core.paths import cache_folder
from tests.core.assets.given import DATA, Given, full_disk, held, pinned, table
from tests.text.tiny import write

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
GGUF = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "core" / "assets" / "test_gguf.py")))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    native.library()  # is compiled in the usual cache
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def killed(script: str, *arguments: object, after: str = "ready") -> None:
    """Run a script, and kill it after it printed a word."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env={**os.environ, "OUTRIDER_NATIVE": "0"},
    )
    assert process.stdout is not None
    timer = threading.Timer(60, process.kill)
    timer.start()
    with process.stdout:
        for line in process.stdout:
            if line.strip() == after:
                break
        else:
            process.kill()
            raise AssertionError("it ended before it could be killed")
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        timer.cancel()


def generated(folder: Path) -> list[int]:
    return list(text.load(folder, dtype="float32", device="cpu").generate("ab", max_new_tokens=4, drafter=None).tokens)


# ---- killed


class Halting(BaseHTTPRequestHandler):
    """Sends the first half of DATA, then the rest if it may."""

    go_on = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()
        self.wfile.write(DATA[: len(DATA) // 2])
        if Halting.go_on.wait(60):
            self.wfile.write(DATA[len(DATA) // 2 :])

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    Halting.go_on.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Halting)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/a.bin"
    Halting.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


DOWNLOAD = """
import sys
from contextlib import nullcontext
from outrider.core.assets import sources
from outrider.core.assets.sources import Web
from outrider.core.assets.store import fetch
from tests.core.assets.given import pinned, table
class Bar:
    n = 0
    def update(self, count):
        print("ready", flush=True)
sources._CHUNK = 1000
sources._progress = lambda *_: nullcontext(Bar())
fetch("thing", table=table(Web(sys.argv[1], pinned())))
"""


def test_killed_in_a_download(address: str, cache: Path) -> None:
    killed(DOWNLOAD, address)
    assert not (cache / "thing").exists() and [path.split("/")[0] for path in held(cache)] == ["thing.partial"]
    assert "left by a process that was killed: rm -r " in check_cache(cache).fix
    Halting.go_on.set()
    assert fetch("thing", table=table(Web(address, pinned()))) == cache / "thing"
    assert held(cache) == ["thing/a.bin"] and check_cache(cache).fix == ""


CONVERSION = """
import sys, time
from pathlib import Path
from outrider.core.assets import gguf
from outrider.core.assets.store import convert_gguf
tensors = gguf._tensors
def slow(*arguments):
    for number, one in enumerate(tensors(*arguments)):
        yield one
        if number == 3:
            gguf._SHARD = 0  # writes what there is
        if number == 8:
            print("ready", flush=True)
            time.sleep(600)
gguf._tensors = slow
convert_gguf(Path(sys.argv[1]))
"""


def test_killed_in_a_conversion(cache: Path, tmp_path: Path) -> None:
    path = GGUF.write(tmp_path / "m.gguf")
    killed(CONVERSION, path)
    (left,) = (cache / "converted").iterdir()
    assert left.name.endswith(".partial") and any(left.glob("*.safetensors"))
    folder = convert_gguf(path)
    assert generated(folder) and list((cache / "converted").iterdir()) == [folder]


CALIBRATION = """
import sys
from outrider import text
from outrider.text.calibrate import calibrate
lm = text.load(sys.argv[1], dtype="float32", device="cpu", draft_model=sys.argv[1])
small = lm.draft_model.target()
for number, _ in enumerate(calibrate(lm, "sequoia", ["the cat"] * 400, draft_model=small, tokens=2)):
    if number == 2:
        print("ready", flush=True)
"""


def test_killed_in_a_calibration(cache: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    killed(CALIBRATION, folder)
    (path,) = (cache / "calibrations").glob("*-sequoia.json")
    assert Calibration.load(path).acceptance
    lm = text.load(folder, dtype="float32", device="cpu", draft_model=str(folder))
    assert lm.generate("the cat", drafter="sequoia", max_new_tokens=4).tokens


REPORT = """
import json, os, signal, sys
from pathlib import Path
from outrider.app.report import command
from outrider.app.report.sections import REPORTS, Section
calls = []
def call(words):
    calls.append(words)
    path = Path(words[-1])
    if len(calls) == 2:
        path.with_name(path.name + ".1.partial").write_text("{")  # as a benchmark that is killed while it writes
        os.write(1, b"ready\\n")
        signal.pause()
    path.write_text('{"rows": []}')
    return True
command._call, command.commit = call, lambda: "0123456789"
REPORTS["image"] = (Section("one", "One", "", ("image --a", "image --b")),)
from typer.testing import CliRunner
from outrider.app.cli import cli
CliRunner().invoke(cli, ["report", "image", "-o", sys.argv[1], "--resume"], catch_exceptions=False)
"""


def test_killed_in_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is not measured again; a damaged result is."""
    killed(REPORT, tmp_path / "report")
    first = json.loads((tmp_path / "report" / "one-1.json").read_text())
    assert first["command"] and not (tmp_path / "report" / "one-2.json").exists()
    called: list[str] = []

    def call(words: list[str]) -> bool:
        called.append(Path(words[-1]).name)
        Path(words[-1]).write_text('{"rows": []}')
        return True

    monkeypatch.setattr(report, "_call", call)
    monkeypatch.setattr(report, "commit", lambda: "0123456789")
    section = Section("one", "One", "", ("image --a", "image --b"))
    report._measure("image", section, tmp_path / "report", None, False, True, "cpu")
    assert called == ["one-2.json"]
    (tmp_path / "report" / "one-1.json").write_text('{"rows')
    report._measure("image", section, tmp_path / "report", None, False, True, "cpu")
    assert called == ["one-2.json", "one-1.json"]


# ---- disks and homes


def test_a_full_disk_in_a_download(cache: Path) -> None:
    with full_disk(1000), pytest.raises(AssetError, match=r"can't be written: the disk is full .*free some space"):
        fetch("thing", table=table(Given(pinned()), Given(pinned())))
    assert held(cache) == []


def test_a_full_disk_while_an_output_is_written(cache: Path, tmp_path: Path) -> None:
    script = (
        "import resource, sys, outrider.app.cli as cli\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "sys.argv[1:] = ['text', 'ab', '--model', sys.argv[1], '--device', 'cpu', '--dtype', 'float32',\n"
        "    '--drafter', 'prompt-lookup', '--trace', 'trace.json']\ncli.main()"
    )
    (tmp_path / "trace.json").write_text("old")
    done = subprocess.run(
        [sys.executable, "-c", script, str(write(tmp_path / "m"))],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
        "outrider: trace.json can't be written: the"
    )
    assert (tmp_path / "trace.json").read_text() == "old" and not list(tmp_path.glob("*.partial"))


def test_a_full_disk_while_kernels_are_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.hindrance() is not None:
        pytest.skip("kernels are not compiled here")
    with full_disk(100):
        assert native._compiled("pooling") is None
    assert held(cache) == []
    monkeypatch.setattr("outrider.app.commands.doctor._LITTLE", 1 << 62)
    finding = check_cache(cache)
    assert finding.state == "broken" and finding.fix.startswith("free some space, or set OUTRIDER_CACHE")


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m")
    wanted = generated(folder)
    monkeypatch.setenv("OUTRIDER_CACHE", "/proc/nowhere")
    monkeypatch.setattr(native, "library", lambda: native.opened("native"))
    assert generated(folder) == wanted, "only slower"
    with pytest.raises(AssetError, match=r"cache /proc/nowhere can't be written .* set OUTRIDER_CACHE"):
        fetch("thing", table=table(Given(pinned())))
    with pytest.raises(AssetError, match="set OUTRIDER_CACHE"):
        convert_gguf(GGUF.write(tmp_path / "m.gguf"))
    finding = check_cache(cache_folder())
    assert (finding.state, finding.fix) == ("broken", "set OUTRIDER_CACHE to a writable folder")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> Any:
        raise KeyError

    for name in ("OUTRIDER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(OutriderError, match="no home folder; set OUTRIDER_CACHE to a writable folder"):
        fetch("thing", table=table(Given(pinned())))


# ---- other processes, processors, networks and clocks


TWICE = """
import sys, time
from pathlib import Path
from outrider.core.assets import gguf
from outrider.core.assets.store import convert_gguf
convert = gguf.convert
def counted(*arguments, **options):
    print("converted", flush=True)
    time.sleep(1)
    convert(*arguments, **options)
gguf.convert = counted
print(convert_gguf(Path(sys.argv[1])))
"""


def test_two_processes_convert_one_model(cache: Path, tmp_path: Path) -> None:
    path = GGUF.write(tmp_path / "m.gguf")
    both = [subprocess.Popen([sys.executable, "-c", TWICE, str(path)], stdout=subprocess.PIPE, text=True) for _ in "ab"]
    said = [process.communicate()[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(map(len, said)) == [1, 2], "one converts, the other waits for it"
    assert said[0][-1] == said[1][-1] and len(Checkpoint(Path(said[0][-1])))


@pytest.mark.parametrize(
    ("missing", "found", "fix"),
    [("compiler", "no C++ compiler", "install g++, with the system's package manager"), ("AVX2", "no AVX2", "")],
)
def test_no_compiler_or_no_avx2(
    missing: str, found: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "m")
    wanted = generated(folder)
    if missing == "compiler":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        if native._processor().split().count("avx2") == 0:
            pytest.skip("this processor has no AVX2")
    else:
        monkeypatch.setattr(native, "_processor", lambda: "flags : sse4_2 avx")
    native.library.cache_clear()
    try:
        assert native.library() is None
        assert generated(folder) == wanted, "only slower"
        finding = check_native()
        assert (finding.state, finding.needed, finding.fix) == ("absent", False, fix) and found in finding.found
    finally:
        native.library.cache_clear()


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(sources, "_CONNECT_TIMEOUT", 1.0)
    wanted = Hub("owner/name", "0" * 40, (pinned(),)), Web("http://127.0.0.1:9/a.bin", pinned())
    with pytest.raises(AssetError, match=r"thing could not be fetched. hub .* can't be reached. http://127.* refused"):
        fetch("thing", table=table(*wanted))
    assert held(cache) == []
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(
        AssetError, match=r"'owner/name' is not in the hub's cache and http://127.0.0.1:9 can't be reache"
    ):
        text.load("owner/name")


def test_a_clock_that_is_set_back(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = GGUF.write(tmp_path / "m.gguf"), write(tmp_path / "m")
    wanted, converted = generated(folder), convert_gguf(path)
    files.write_atomically(tmp_path / "a.json", "{}")
    (tmp_path / "a.json.1.partial").write_text("{")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 1e9)
    files.write_atomically(tmp_path / "a.json", "[]")
    assert (tmp_path / "a.json").read_text() == "[]"
    assert convert_gguf(path) == converted and generated(folder) == wanted
    os.utime(path, (now - 2e9, now - 2e9))
    again = convert_gguf(path)
    assert again != converted and generated(again), "a file of another date is converted anew, an older one too"


# ---- the table


def test_every_row_of_the_table_names_its_test() -> None:
    page = (ROOT / "docs" / "guides" / "faults.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 18
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cells[-1])
        assert len(cells) == 5 and all(cells) and named, row
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)
