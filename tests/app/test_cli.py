"""The command line as a person or a script meets it."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

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
    """The installed command, in its own process."""
    command = Path(sysconfig.get_path("scripts")) / "outrider"
    return subprocess.run([command, *arguments], capture_output=True, text=True, check=False)


def test_help_lists_the_commands() -> None:
    told = outrider("--help")
    assert told.returncode == 0
    assert all(command in told.stdout for command in ("demo", "methods", "doctor"))


def test_version_is_the_versions_one_source() -> None:
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
def test_a_wrong_command_line_is_exit_code_2_and_no_trace(arguments: list[str]) -> None:
    told = outrider(*arguments)
    assert told.returncode == 2
    assert arguments[-1] in told.stderr
    assert "Traceback" not in told.stderr


def test_the_demo_as_json_is_a_list_of_traces() -> None:
    told = CliRunner().invoke(
        cli, ["demo", "--json", "--max-new-tokens", "8", "--temperature", "0", "--drafter", "top-k-tree"]
    )
    traces = [Trace.from_json(json.dumps(one)) for one in json.loads(told.stdout)]
    assert [(one.options["target"], one.method) for one in traces] == [
        ("table", "plain"),
        ("table", "top-k-tree"),
        ("decoder", "plain"),
        ("decoder", "top-k-tree"),
    ]
    assert all(len(one.tokens()) == 8 for one in traces)


@pytest.mark.parametrize(("option", "says"), [("--drafter=eagle9", "draft-model"), ("--rule=no", "bild, block")])
def test_an_unknown_method_is_one_line_that_lists_the_known(
    option: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OUTRIDER_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["outrider", "demo", option])
    with pytest.raises(SystemExit) as stopped:
        main()
    told = capsys.readouterr()
    assert (stopped.value.code, told.out) == (1, "")
    assert says in told.err
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--max-new-tokens=0", "--max-new-tokens=many", "--seed=-1", "--temperature=warm"])
def test_an_option_out_of_range_is_a_wrong_command_line(option: str) -> None:
    assert CliRunner().invoke(cli, ["demo", option]).exit_code == 2


@pytest.mark.slow
def test_a_terminal_without_unicode_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    told = outrider("demo", "--max-new-tokens", "4")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.isascii()


def test_methods_as_json_are_the_tables() -> None:
    told = CliRunner().invoke(cli, ["methods", "--json"])
    rows = json.loads(told.stdout)
    assert [row["name"] for row in rows if row["kind"] == "drafter"] == list(DRAFTERS)
    assert [row["name"] for row in rows if row["kind"] == "rule"] == list(RULES)
    for row in rows:
        assert row["summary"]
        assert row["paper"]
        assert row["module"].startswith("outrider.")
        assert (row["lossless"] is None) == (row["kind"] == "drafter")
        assert "inspect" not in str(row["options"]), "an option without a default is a need"
    json.dumps(rows, allow_nan=False)


def test_methods_as_a_table_name_every_method() -> None:
    told = CliRunner().invoke(cli, ["methods"], env={"COLUMNS": "160"})
    assert told.exit_code == 0
    assert all(name in told.stdout for name in [*DRAFTERS, *RULES])


@pytest.mark.parametrize("ok", [True, False])
def test_the_doctor_tells_scripts_by_exit_code_and_json(ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *, fix: replace(REPORT, ok=ok))
    told = CliRunner().invoke(cli, ["doctor", "--json"])
    assert told.exit_code == (0 if ok else 1)
    assert json.loads(told.stdout) == replace(REPORT, ok=ok).to_dict()


def test_the_doctor_tells_people_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *, fix: replace(REPORT, repaired=["x [1]"] if fix else []))
    told = CliRunner().invoke(cli, ["doctor", "--fix"])
    assert "Repaired x [1]" in told.stdout
    assert 'pip install "outrider[app]"' in told.stdout
    assert "24 GB" in told.stdout


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InvalidOption("unknown rule 'x'.\nKnown: exact"), "outrider: unknown rule 'x'. Known: exact\n"),
        (FileNotFoundError(2, "No such file", "a.json"), "outrider: [Errno 2] No such file: 'a.json'\n"),
        (ValueError("odd"), "outrider: unexpected ValueError: odd\n"),
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
