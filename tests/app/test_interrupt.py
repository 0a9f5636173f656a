"""SIGTERM and Ctrl-C end every kind of command, with all processes below it, whatever these are doing."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.text.tiny import write

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
_PATIENCE = 20.0  # seconds; a command ends within two, but the machine may be busy
CHILDREN = "trap '' TERM INT; (trap '' TERM INT; sleep 600) & sleep 600"  # which ignore both signals
CLI = (sys.executable, "-m", "outrider.app.cli")


def alive(mark: str) -> list[int]:
    """The processes whose environment has the mark."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            state = (environment.parent / "stat").read_text().rpartition(")")[2].split()[0]
            if mark.encode() in environment.read_bytes() and state != "Z":
                found.append(int(environment.parent.name))
        except OSError:
            continue
    return found


def ended_by(number: int, command: Sequence[str], ready: str | Callable[[str], bool], cwd: Path) -> tuple[int, str]:
    """Start a command, send it a signal once `ready` is printed or true; its exit code and what it printed."""
    mark = f"OUTRIDER_TEST={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    given = {**os.environ, name: value, "PYTHONUNBUFFERED": "1", "GRADIO_ANALYTICS_ENABLED": "0"}
    process = subprocess.Popen(
        command, cwd=cwd, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    said, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if select.select([process.stdout], [], [], 0.1)[0]:
            said += os.read(process.stdout.fileno(), 1 << 16)
        if ready.encode() in said if isinstance(ready, str) else ready(mark):
            break
    else:
        process.kill()
        raise AssertionError(f"it never became ready: {said.decode()[-2000:]}")
    process.send_signal(number)
    try:
        rest, _ = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in alive(mark)]
        raise AssertionError(f"still alive: {commands}") from None
    finally:
        for pid in alive(mark):
            os.kill(pid, signal.SIGKILL)
    left = alive(mark)
    while left and time.monotonic() < deadline + _PATIENCE:
        time.sleep(0.05)  # a process that was killed may not be gone yet
        left = alive(mark)
    assert not left, left
    return process.returncode, (said + rest).decode()


def test_a_command_that_waits_for_its_input(tmp_path: Path) -> None:
    script = """
import sys, time, outrider.app.cli
class Terminal:
    def read(self):
        print("ready")
        time.sleep(600)
sys.stdin, sys.argv[1:] = Terminal(), ["text", "-"]
outrider.app.cli.main()
"""
    code, said = ended_by(signal.SIGTERM, (sys.executable, "-c", script), "ready", tmp_path)
    assert code == 143 and "Traceback" not in said


@pytest.mark.parametrize("work", ["torch.linalg.eigh(torch.randn(5000, 5000))", "ignoring()", "threads()"])
def test_a_command_that_does_not_come_back(work: str, tmp_path: Path) -> None:
    script = f"""
import subprocess, sys, threading, time, torch
from outrider.app.interrupt import ended_by_signals
def ignoring():
    while True:
        try:
            print("ready", flush=True)
            time.sleep(1)
        except KeyboardInterrupt:
            pass
def threads():
    threading.Thread(target=ignoring).start()
with ended_by_signals():
    subprocess.Popen(["sh", "-c", {CHILDREN!r}])
    {"" if work == "ignoring()" else 'print("ready", flush=True)'}
    {work}
    time.sleep(600)
"""
    code, _ = ended_by(signal.SIGTERM, (sys.executable, "-c", script), "ready", tmp_path)
    assert code == 143 or (work != "ignoring()" and code == -signal.SIGINT), "killed at the deadline, or interrupted"


def test_the_page(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    ended, said = ended_by(signal.SIGTERM, (*CLI, "demo", "--no-browser"), "Outrider is open at", tmp_path)
    assert ended in (0, 143) and "Traceback" not in said


def test_training_keeps_what_it_learned(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = write(tmp_path / "m")
    rows = [{"prompt": [k, 5, 9], "answer": [7, 8, k, 11], "kind": "own", "temperature": 0} for k in range(20, 60)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ("train", "medusa", "--model", str(model), "--data", "answers.jsonl", "--output-dir", "out")
    ended, said = ended_by(
        signal.SIGINT, (*CLI, *command, "--device", "cpu", "--draft-vocab-size", "0"), "minutes, step", tmp_path
    )
    assert ended in (0, 130) and "Traceback" not in said and "resumes the run" in said
    assert (tmp_path / "out" / "checkpoint" / "state.json").is_file()


def test_a_report_ends_with_its_benchmarks(tmp_path: Path) -> None:
    command = (*CLI, "report", "image", "--output-dir", str(tmp_path / "report"), "--only", "methods")
    ended, said = ended_by(signal.SIGTERM, command, lambda mark: len(alive(mark)) > 1, tmp_path)
    assert ended == 143 and "Traceback" not in said


def test_a_server_ends_with_its_children(tmp_path: Path) -> None:
    server = tmp_path / "python"
    server.write_text(
        "#!/bin/sh\nif [ \"$2\" = -c ]; then exit 0; fi\ntrap '' TERM INT\n"
        "sh -c \"trap '' TERM INT; sleep 600\" &\necho ready\nsleep 600\nwait\n"
    )
    server.chmod(0o755)
    model = write(tmp_path / "m")
    command = (*CLI, "serve", "--drafter", "plain", "--model", str(model), "--python", str(server), "--port", "8765")
    ended, said = ended_by(signal.SIGTERM, command, "ready", tmp_path)
    assert ended == 143 and "Traceback" not in said
