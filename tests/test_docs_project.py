"""Workflows, issue templates and the citation agree with the project's files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider.core import __version__

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))


WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_minimal_permissions_and_call_existing_targets(path: Path) -> None:
    workflow, makefile = read(path), (ROOT / "Makefile").read_text(encoding="utf-8")
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job and job["timeout-minutes"] <= (300 if path.stem == "nightly" else 60)
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
            for target in re.findall(r"^make PYTHON=python (\w+)$", step.get("run", ""), re.MULTILINE):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
            for script in re.findall(r"[\w/]+\.py\b", step.get("run", "")):
                assert (ROOT / script).is_file(), script


def test_every_listed_python_version_is_tested() -> None:
    matrix = read(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = [one.rpartition(" :: ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert matrix == named
    assert PROJECT["requires-python"] == f">={matrix[0]}"


@pytest.mark.parametrize("path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem)
def test_issue_templates_are_forms(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_citation_has_the_current_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert citation["authors"] and citation["cff-version"] == "1.2.0"
