"""What the README says is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^outrider ([^#\n]+?) *(?:#.*)?$", README, re.MULTILINE)


TEXT, TABLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_the_real_model_says_the_same_with_drafting(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(TEXT, "README.md", "exec"), {})
    *said, tokens_per_call = capsys.readouterr().out.split()
    assert "sky" in said
    assert float(tokens_per_call) >= 1


def test_its_example_runs_and_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code = TABLES
    assert len([line for line in code.splitlines() if line]) <= 10
    exec(compile(code, "README.md", "exec"), {})
    tokens_per_call, acceptance = map(float, capsys.readouterr().out.split())
    assert tokens_per_call > 1.5
    assert 0 < acceptance < 1


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_exist_with_their_options(command: str) -> None:
    name, *rest = command.split()
    names = [name, rest[0]] if name == "bench" else [name]
    told = CliRunner().invoke(cli, [*names, "--help"], env={"COLUMNS": "200"})
    assert told.exit_code == 0
    assert all(option in told.stdout for option in rest if option.startswith("--"))


def test_its_make_targets_and_files_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"\bmake (\w+)", README)
    assert {"demo", "test"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets if target != ":")
    for name in re.findall(r"`((?:core|app|modalities|tests)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name
