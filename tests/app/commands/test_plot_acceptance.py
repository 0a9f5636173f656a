"""`outrider plot-acceptance`: a plot and a table of acceptance curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.app.commands import plot_acceptance
from outrider.core.errors import InvalidOption
from outrider.core.training.acceptance_curve import Curve, DrafterCurve


@pytest.mark.slow
def test_files_become_a_plot_and_a_table(tmp_path: Path) -> None:
    found = Curve(calls=10, tokens=25, tried=(10, 8, 4), right=(8, 4, 3)).to_dict()
    rows = [{"minutes": 1.0, "steps": 9, "models": {"medusa": found, "hydra": found}}]
    (tmp_path / "curve.json").write_text(json.dumps(rows))
    out = tmp_path / "made" / "curves.svg"
    result = CliRunner().invoke(cli, ["plot-acceptance", str(tmp_path / "curve.json"), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "| medusa | 2.50 | 80% (80%) |" in result.output
    assert "medusa (2.50)" in out.read_text() and out.with_suffix(".md").read_text() == result.stdout


def test_installed_weights_are_found(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["plot-acceptance", "-o", str(tmp_path / "curves.png")])
    assert result.exit_code == 0 and "| draft-model |" in result.stdout


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_shows_whole_columns(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shares = (0.8,) * 12
    curve = DrafterCurve(name="medusa", tokens_per_pass=2.5, conditional=shares, unconditional=shares)
    plot_acceptance._show([curve])
    out = capsys.readouterr().out
    assert out.count("80% (80%)") == 12 and "…" not in out
    assert all(len(line) <= width for line in out.splitlines()[:-1])


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    result = CliRunner().invoke(cli, ["plot-acceptance", str(tmp_path / "other.json"), "-o", str(tmp_path / "c.png")])
    assert isinstance(result.exception, InvalidOption) and "other.json" in str(result.exception)
