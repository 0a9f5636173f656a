"""`outrider simulate`: predictions from a written measurement, an error without one, and a real measurement of a tiny
model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.app.commands import simulate as app
from outrider.core.cost.simulate import DEVICES
from outrider.core.errors import InvalidOption


def row(dtype: str, drafter: str, case: str, nodes: int, emitted: int, score: float, cost: float) -> dict[str, Any]:
    times = {"draft": 0.0005 * nodes * (cost > 1), "score": score, "rule": 0.0, "rest": 0.0001}
    step = {"nodes": nodes, "chain": True, "emitted": emitted, "cost": cost, "times": times}
    return {
        "dtype": dtype,
        "drafter": drafter,
        "case": case,
        "tokens_per_second": emitted / sum(times.values()),
        "steps": [step] * 20,
    }


def kept(path: Path) -> None:
    rows = []
    for dtype, drafter, options in app.CASES:
        length = int(options.get("length", 6))
        cost = 1 + 0.1 * length * (drafter == "draft-model")
        case = f"{drafter} {options.get('length', '')}".strip()
        rows.append(row(dtype, "plain", case, 0, 1, 0.007, 1.0))
        rows.append(row(dtype, drafter, case, length, 3, 0.007 + 0.0002 * length, cost))
    whole = {"1": 0.006, "5": 0.0062}
    models = {
        "bfloat16": {"weight_bytes": 269e6, "layers": 30, "width": 576, "parameters": 134e6, "products": whole},
        "int4": {"weight_bytes": 98e6, "layers": 30, "width": 576, "parameters": 134e6, "products": whole},
    }
    path.write_text(json.dumps({"schema": 1, "settings": {"model": "m", "models": models}, "rows": rows}))


def test_measurements_are_printed_with_simulated_figures_marked(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    kept(path)
    result = CliRunner().invoke(cli, ["simulate", "--json", str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "fitted to" in result.stdout and "within 15 %" in result.stdout
    assert all(name in result.stdout for name in DEVICES)
    assert result.stdout.count("simulation") >= len(app.CASES)
    larger = ["--parameters", "8", "--layers", "32", "--hidden-size", "4096"]
    result = CliRunner().invoke(cli, ["simulate", "--json", str(path), *larger], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "a target of 8 billion" in result.stdout
    result = CliRunner().invoke(cli, ["simulate", "--json", str(path), "--parameters", "8"])
    assert isinstance(result.exception, InvalidOption)


def test_without_a_measurement_the_error_names_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["simulate"], env={"OUTRIDER_CACHE": str(tmp_path)})
    assert isinstance(result.exception, InvalidOption) and "--measure" in str(result.exception)


def test_a_measurement_contains_the_inputs_of_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.text.tiny import write

    monkeypatch.setattr(app, "CASES", (("bfloat16", "prompt-lookup", {}), ("bfloat16", "token-recycling", {})))
    found = app._measure(str(write(tmp_path / "m")), None, 1, 12, 1)
    assert [one["drafter"] for one in found["rows"]] == ["plain", "prompt-lookup", "plain", "token-recycling"]
    assert all(sum(step["emitted"] for step in one["steps"]) == 12 for one in found["rows"])
    here = found["settings"]["models"]["bfloat16"]
    assert here["layers"] == 2 and set(here["products"]) == {1, 5}
    assert json.loads(json.dumps(found))["rows"] == found["rows"]
    assert [len(app.steps_of(one)) for one in found["rows"]] == [len(one["steps"]) for one in found["rows"]]
