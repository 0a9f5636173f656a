"""`outrider bench` for the engine: its figures are consistent, and outputs equal plain decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.core.errors import InvalidOption
from tests.text.tiny import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("engine") / "tiny")


def run(folder: Path, *words: str) -> dict[str, object]:
    given = [
        "--model",
        str(folder),
        "--dtype",
        "float32",
        "--max-new-tokens",
        "6",
        "--repeat",
        "1",
        "--num-prompts",
        "2",
    ]
    result = CliRunner().invoke(cli, ["bench", *words, *given, "--json", "-"])
    assert result.exit_code == 0, result.output
    report: dict[str, object] = json.loads(result.stdout)
    rows = report["rows"]
    assert isinstance(rows, list)
    for row in rows:
        assert row["same"] == row["of"] and row["tokens_per_second"] > 0 and row["tokens_per_pass"] >= 1
    return report


def test_crowd(folder: Path) -> None:
    report = run(folder, "throughput", "--batch-sizes", "1,3", "--drafters", "prompt-lookup")
    rows = report["rows"]
    assert [(row["rows"], row["drafter"]) for row in rows] == [  # type: ignore[attr-defined]
        (size, name) for size in (1, 3) for name in ("plain", "prompt-lookup")
    ]
    assert set(report["settings"]["stops_paying_at"]) == {"prompt-lookup"}  # type: ignore[index]
    assert all(row["cache_bytes"] > 0 for row in rows)  # type: ignore[attr-defined]


def test_long(folder: Path) -> None:
    rows = run(folder, "long-context", "--context-lengths", "120", "--drafters", "sparse-cache,prompt-lookup")["rows"]
    kinds = [(row["cache"], row["drafter"]) for row in rows]  # type: ignore[attr-defined]
    assert kinds == [
        (kind, name) for kind in ("float32", "int8") for name in ("plain", "sparse-cache", "prompt-lookup")
    ]
    exact, copied, _, small = (row for row in rows[:4])  # type: ignore[index]
    assert small["cache_bytes"] < 0.5 * exact["cache_bytes"]
    assert copied["copied_bytes"] > 0 == exact["copied_bytes"] and exact["read_seconds"] > 0
    assert all(0 <= row["as_exact"] <= 1 for row in rows) and exact["as_exact"] == 1  # type: ignore[attr-defined]


def test_long_contexts_on_one_cache_that_fit(folder: Path) -> None:
    given = "long-context", "--context-lengths", "60,120", "--drafters", "prompt-lookup", "--kv-cache-dtypes", "int8"
    rows = run(folder, *given)["rows"]
    assert [(row["cache"], row["context"]) for row in rows] == [("int8", 60)] * 2 + [("int8", 120)] * 2  # type: ignore[attr-defined]
    for words, message in ((("--context-lengths", "60,450"), "context"), (("--kv-cache-dtypes", "int4"), "int4")):
        refused = CliRunner().invoke(cli, ["bench", "long-context", "--model", str(folder), *words])
        assert isinstance(refused.exception, InvalidOption) and message in str(refused.exception)


def test_offload(folder: Path) -> None:
    rows = run(folder, "offload", "--memory-budgets", "0.5,1", "--drafters", "suffix")["rows"]
    assert [row["budget"] for row in rows] == [0.5, 0.5, 1.0, 1.0]  # type: ignore[attr-defined]
    assert rows[0]["read_bytes_per_token"] > 0 == rows[2]["read_bytes_per_token"]  # type: ignore[index]
    assert rows[0]["held_bytes"] < rows[2]["held_bytes"]  # type: ignore[index]


def test_device(folder: Path) -> None:
    rows = run(folder, "device", "--device", "cpu", "--drafters", "suffix")["rows"]
    assert [row["drafter"] for row in rows] == ["plain", "plain, captured", "suffix, captured"]  # type: ignore[attr-defined]
    assert all(row["launches_per_call"] is None and row["times_floor"] > 0 for row in rows)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("modality", ["image", "speech"])
def test_device_of_pictures_and_speech(folder: Path, modality: str) -> None:
    words = ["device", "--device", "cpu", "--modality", modality]
    rows = run(folder, *words)["rows"]
    assert [row["drafter"] for row in rows] == [  # type: ignore[attr-defined]
        *("plain", "plain, captured", "jacobi, captured", "token-recycling, captured")
    ]
    with pytest.raises(InvalidOption, match="modality"):
        CliRunner().invoke(cli, ["bench", "device", "--modality", "video"], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["plain", "prompt-lookup"])
def test_soak(folder: Path, drafter: str) -> None:
    given = ["--requests", "12", "--drafter", drafter, "--check-every", "2", "--batch-size", "3"]
    for model, dtype in (("random", "bfloat16"), ("random", "int4"), (str(folder), "float32")):
        result = CliRunner().invoke(cli, ["bench", "soak", "--model", model, "--dtype", dtype, *given, "--json", "-"])
        found = json.loads(result.stdout)
        assert found["wrong"] == 0 and found["finished"] + found["cancelled"] == found["requests"] == 12
        assert len(found["resident"]) >= 4 and found["emitted"] > found["finished"]
        assert result.exit_code == (0 if found["flat"] else 1)


def test_the_table(folder: Path) -> None:
    given = [
        "--model",
        str(folder),
        "--dtype",
        "float32",
        "--max-new-tokens",
        "4",
        "--repeat",
        "1",
        "--num-prompts",
        "1",
    ]
    words = ["bench", "throughput", "--batch-sizes", "1", "--drafters", "suffix", *given]
    result = CliRunner(env={"COLUMNS": "160"}).invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "tokens / pass" in result.stdout and "suffix: " in result.stdout and "2 of 2" in result.stdout
