"""`outrider plot-acceptance`: a picture and a table of what files say, and a word on what they don't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.core.errors import InvalidOption
from outrider.core.training.acceptance_curve import Curve


@pytest.mark.slow
def test_files_become_a_picture_and_a_table(tmp_path: Path) -> None:
    found = Curve(calls=10, tokens=25, tried=(10, 8, 4), right=(8, 4, 3)).to_dict()
    rows = [{"minutes": 1.0, "steps": 9, "models": {"medusa": found, "hydra": found}}]
    (tmp_path / "curve.json").write_text(json.dumps(rows))
    out = tmp_path / "made" / "curves.svg"
    said = CliRunner().invoke(cli, ["plot-acceptance", str(tmp_path / "curve.json"), "-o", str(out)])
    assert said.exit_code == 0, said.output
    assert "| medusa | 2.50 | 80% (80%) |" in said.output
    assert "medusa (2.50)" in out.read_text() and out.with_suffix(".md").read_text() == said.stdout


def test_weights_that_are_there_are_found_by_themselves(tmp_path: Path) -> None:
    said = CliRunner().invoke(cli, ["plot-acceptance", "-o", str(tmp_path / "curves.png")])
    assert said.exit_code == 0 and "| draft-model |" in said.stdout


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    said = CliRunner().invoke(cli, ["plot-acceptance", str(tmp_path / "other.json"), "-o", str(tmp_path / "c.png")])
    assert isinstance(said.exception, InvalidOption) and "other.json" in str(said.exception)
