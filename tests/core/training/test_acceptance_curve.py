"""Acceptance curves of several drafters, read from training results, as a table and a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import OutriderError
from outrider.core.training.acceptance_curve import Curve, drawn, figure, gathered, table

GOOD = Curve(calls=10, tokens=25, tried=(10, 8, 4, 0), right=(8, 4, 3, 0))
POOR = Curve(calls=20, tokens=25, tried=(20, 5, 0, 0), right=(5, 0, 0, 0))


def beside(path: Path, curve: Curve, draft_head: str = "MedusaHeads") -> Path:
    provenance = {"validation": {"rows": 3, **curve.to_dict()}, "done": {"minutes": 7.5}}
    path.write_text(json.dumps({"schema": 1, "architecture": draft_head, "config": {}, "provenance": provenance}))
    return path


def run(path: Path, **draft_heads: Curve) -> Path:
    rows: list[dict[str, Any]] = [
        {"minutes": 0.0, "steps": 0, "models": {name: {"loss": None, **GOOD.to_dict()} for name in draft_heads}},
        {
            "minutes": 1.0,
            "steps": 9,
            "models": {name: {"loss": 2.0, **one.to_dict()} for name, one in draft_heads.items()},
        },
    ]
    path.write_text(json.dumps(rows))
    return path


def test_the_best_curve_of_each_drafter_is_kept(tmp_path: Path) -> None:
    files = [
        run(tmp_path / "curve.json", medusa=POOR, eagle3=GOOD),
        beside(tmp_path / "smollm2.medusa.json", POOR + GOOD),
        beside(tmp_path / "specdec-plus-plus.json", GOOD, "AcceptanceChance"),
    ]
    found = gathered(files)
    assert [one.name for one in found] == ["eagle3", "medusa"]  # what stood before training doesn't count
    assert found[0].conditional == (0.8, 0.5, 0.75) and found[0].unconditional == (0.8, 0.4, 0.3)
    assert found[0].minutes == 1.0 and found[1].minutes == 7.5
    assert found[1].conditional == pytest.approx((13 / 30, 4 / 13, 0.75))


def test_a_table_and_a_figure_are_written(tmp_path: Path) -> None:
    files = [run(tmp_path / "curve.json", medusa=POOR, eagle3=GOOD)]
    found = drawn(files, tmp_path / "report" / "acceptance.png")
    assert (tmp_path / "report" / "acceptance.png").read_bytes()[:4] == b"\x89PNG"
    written = (tmp_path / "report" / "acceptance.md").read_text()
    assert written == table(found)
    lines = written.splitlines()
    assert lines[2] == "| eagle3 | 2.50 | 80% (80%) | 50% (40%) | 75% (30%) |"
    assert lines[3] == "| medusa | 1.25 | 25% (25%) | 0% (0%) |  |"
    left, right = figure(found).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[0.8, 0.5, 0.75], [0.25, 0.0]]
    assert [list(line.get_ydata()) for line in right.lines] == [[0.8, 0.4, 0.3], [0.25, 0.0]]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"architecture": "MedusaHeads"}')
    with pytest.raises(OutriderError, match="neither"):
        gathered([tmp_path / "other.json"])
    with pytest.raises(OutriderError, match="no curves"):
        drawn([], tmp_path / "out.png")
