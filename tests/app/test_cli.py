"""The command line: help, exit codes, JSON, tables and errors."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli, main
from outrider.app.commands import doctor
from outrider.app.commands.doctor import Finding, Report
from outrider.core import __version__
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS, RULES
from outrider.core.trace import Trace

REPORT = Report(
    ok=True,
    machine={"python": "3.13.1", "system": "Linux", "cores": 2, "memory": 24 * 10**9},
    torch={"devices": {"cpu": {"name": "the processor", "dtypes": ["float32"]}}},
    findings=[Finding("gradio", "absent", False, "not installed", "the app", 'pip install "outrider[app]"')],
    repaired=[],
)


def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a process of its own."""
    command = Path(sysconfig.get_path("scripts")) / "outrider"
    return subprocess.run([command, *arguments], capture_output=True, text=True, check=False)


def test_help_lists_the_commands() -> None:
    result = outrider("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in ("demo", "methods", "doctor"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--host", "192.168.1.5"], "needs a password: set OUTRIDER_PASSWORD"),
        (["--host", "0.0.0.0", "--password", "correct horse"], "--allowed-host"),
        (["--password", "short"], "the password has 5 characters"),
    ],
)
def test_the_page_is_not_opened_to_others_without_care(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gradio")
    monkeypatch.setattr("sys.argv", ["outrider", "demo", "--no-browser", *given])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert words in capsys.readouterr().err


def test_the_page_s_password_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio")
    opened: list[Any] = []
    monkeypatch.setattr("outrider.app.cli._open_page", lambda shown, **given: opened.append(given))
    options = ["demo", "--host", "0.0.0.0", "--allowed-host", "box.local", "--allowed-host", "10.0.0.7"]
    result = CliRunner().invoke(cli, options, env={"OUTRIDER_PASSWORD": "correct horse"})
    assert result.exit_code == 0, result.output
    access = opened[0]["access"]
    assert access.host == "0.0.0.0" and access.password == "correct horse" and {"box.local", "10.0.0.7"} < access.hosts
    assert (
        "correct horse"
        not in CliRunner().invoke(cli, ["demo", "--help"], env={"OUTRIDER_PASSWORD": "correct horse"}).output
    )


def test_version_is_that_of_the_package() -> None:
    assert outrider("--version").stdout == f"outrider {__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["methods", "--no-such-option"],
        ["doctor", "more"],
        ["demo", "--seed=0", "--max-new-tokens"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2_without_a_traceback(arguments: list[str]) -> None:
    result = outrider(*arguments)
    assert result.returncode == 2
    assert arguments[-1] in result.stderr
    assert "Traceback" not in result.stderr


def test_the_demo_as_json_is_a_list_of_traces() -> None:
    result = CliRunner().invoke(
        cli, ["demo", "--json", "--max-new-tokens", "8", "--temperature", "0", "--drafter", "top-k-tree"]
    )
    traces = [Trace.from_json(json.dumps(one)) for one in json.loads(result.stdout)]
    assert [(one.options["target"], one.method) for one in traces] == [
        ("table", "plain"),
        ("table", "top-k-tree"),
        ("decoder", "plain"),
        ("decoder", "top-k-tree"),
    ]
    assert all(len(one.tokens()) == 8 for one in traces)


@pytest.mark.parametrize(("option", "message"), [("--drafter=eagle9", "draft-model"), ("--rule=no", "bild, block")])
def test_an_unknown_method_is_one_line_with_the_known_ones(
    option: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OUTRIDER_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["outrider", "demo", option])
    with pytest.raises(SystemExit) as stopped:
        main()
    result = capsys.readouterr()
    assert (stopped.value.code, result.out) == (1, "")
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--max-new-tokens=0", "--max-new-tokens=many", "--seed=-1", "--temperature=warm"])
def test_options_out_of_range_are_exit_code_2(option: str) -> None:
    assert CliRunner().invoke(cli, ["demo", option]).exit_code == 2


@pytest.mark.slow
def test_the_demo_works_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    result = outrider("demo", "--max-new-tokens", "4")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.isascii()


def test_methods_as_json_have_every_method() -> None:
    result = CliRunner().invoke(cli, ["methods", "--json"])
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows if row["kind"] == "drafter"] == list(DRAFTERS)
    assert [row["name"] for row in rows if row["kind"] == "rule"] == list(RULES)
    for row in rows:
        assert row["summary"]
        assert row["paper"]
        assert row["module"].startswith("outrider.")
        assert (row["lossless"] is None) == (row["kind"] == "drafter")
        assert "inspect" not in str(row["options"]), "an option without a default is a need"
    json.dumps(rows, allow_nan=False)


def test_methods_as_a_table_have_every_method() -> None:
    result = CliRunner().invoke(cli, ["methods"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    assert all(name in result.stdout for name in [*DRAFTERS, *RULES])


@pytest.mark.parametrize("ok", [True, False])
def test_doctor_has_an_exit_code_and_json(ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *, fix: replace(REPORT, ok=ok))
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    assert result.exit_code == (0 if ok else 1)
    assert json.loads(result.stdout) == replace(REPORT, ok=ok).to_dict()


def test_doctor_prints_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *, fix: replace(REPORT, repaired=["x [1]"] if fix else []))
    result = CliRunner().invoke(cli, ["doctor", "--fix"])
    assert "Repaired x [1]" in result.stdout
    assert 'pip install "outrider[app]"' in result.stdout
    assert "24 GB" in result.stdout


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InvalidOption("unknown rule 'x'.\nKnown: exact"), "outrider: unknown rule 'x'. Known: exact\n"),
        (
            FileNotFoundError(2, "No such file", "a.json"),
            "outrider: a.json can't be read: there is no such file; check the path\n",
        ),
        (IsADirectoryError(21, "Is a directory", "a"), "outrider: a can't be read: it is a folder; name a file\n"),
        (ValueError("odd"), "outrider: unexpected ValueError: odd\n"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: asked for 9"),
            "fewer tokens or a smaller batch: DefaultCPUAllocator: can't allocate memory: asked for 9\n",
        ),
    ],
)
def test_an_error_is_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*, fix: bool) -> Report:
        raise error

    monkeypatch.delenv("OUTRIDER_DEBUG", raising=False)
    monkeypatch.setattr(doctor, "examine", fail)
    monkeypatch.setattr(sys, "argv", ["outrider", "doctor"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.endswith(line)
