"""The documentation site: everything its pages name exists, its examples run, and it builds without warnings."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.core.methods import DRAFTERS, RULES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
COMMAND = re.compile(r"^outrider (?!.*\bNAME\b)([^#\n]+?) *(?:#.*)?$", re.MULTILINE)
NEEDS = {
    **dict.fromkeys(("exactness", "batches", "choose-a-drafter", "relaxed-rules", "generation-options"), ""),
    "quick-start": "hibari",
    "structured-output": "llguidance",
}


def code(page: Path) -> str:
    """Return the Python code of a page; included examples are tested in test_examples.py."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))


def commands() -> list[str]:
    return sorted({command for page in PAGES for command in COMMAND.findall(page.read_text(encoding="utf-8"))})


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_and_options_of_pages_exist(command: str) -> None:
    name, *rest = shlex.split(command)
    names = [name, *rest[:1]] if name in ("bench", "export", "datastore", "trace") else [name]
    result = CliRunner().invoke(cli, [*names, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, command
    assert all(option.partition("=")[0] in result.stdout for option in rest if option.startswith("--"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_targets_of_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:core|app|modalities|tests|notebooks|reports|examples|docs)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z][\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    compile(code(page), page.name, "exec")


def test_tables_name_existing_methods() -> None:
    """The first columns of the guides' tables contain existing names."""
    known = {*DRAFTERS, *RULES, "auto"}
    for guide in ("exactness", "relaxed-rules"):
        text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text(encoding="utf-8")
        for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE):
            assert set(re.findall(r"`([\w-]+)`", row)) <= known, row


@pytest.mark.slow
@pytest.mark.parametrize("name", [guide.stem for guide in GUIDES if code(guide)])
def test_the_examples_of_a_guide_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if NEEDS[name]:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    exec(compile(code(ROOT / "docs" / "guides" / f"{name}.md"), name, "exec"), {})


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    subprocess.run(["make", "--silent", "links"], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    for package in setuptools["packages"]:
        assert (tmp_path / "reference" / f"{package.removeprefix('outrider.')}.html").is_file()
    methods = (tmp_path / "methods.html").read_text(encoding="utf-8")
    assert all(f'<h3 id="{name}' in methods for name in (*DRAFTERS, *RULES))
    reference = (tmp_path / "reference" / "text.html").read_text(encoding="utf-8")
    assert "outrider.text.options.Options.temperature" in reference
    assert "0: always the likeliest token" in reference  # the comment beside the field
    for page in tmp_path.rglob("*.html"):  # pages load nothing from other hosts
        assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="(?:https?:)?//', page.read_text(encoding="utf-8"))
