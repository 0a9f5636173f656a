"""`outrider bench text` on a tiny model, and its tables and plots on a report written by hand."""

from __future__ import annotations

import io
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.app.bench import plots, tables
from outrider.app.cli import cli
from outrider.core.bench.runner import Bench
from outrider.core.errors import InvalidOption
from outrider.text.bench.run import PromptsError

TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "text" / "tiny.py")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TINY.write(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "140")


@pytest.fixture
def few(folder: str, tmp_path: Path) -> list[str]:
    """Arguments of a benchmark that takes about a second."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["the cat sat"], "category": "a"}\n{"prompt": "a quick fox", "task": "b"}\n')
    tail = ["--model", folder, "--dtype", "float32", "--prompts", str(path), "--max-new-tokens", "6"]
    return ["bench", "text", *tail, "--drafters", "prompt-lookup,jacobi"]


@pytest.mark.slow
def test_a_run_writes_tables_json_and_plots(few: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, pictures = tmp_path / "out.json", tmp_path / "plots"
    result = CliRunner().invoke(cli, [*few, "--json", str(out), "--plots", str(pictures)])
    assert result.exit_code == 0, result.output
    for words in ("2 prompts, up to 6 tokens, greedy", "speedup", "same output", "By task", "prompt-lookup", "jacobi"):
        assert words in result.stdout
    found = json.loads(out.read_text())
    assert [row["drafter"] for row in found["rows"]] == ["plain", "prompt-lookup", "jacobi"]
    assert [row["identical"] for row in found["rows"]] == [1.0, 1.0, 1.0]
    drawn = {path.name for path in pictures.iterdir()}
    assert {"speed.png", "tokens-per-call.png", "predicted.png"} <= drawn
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures.iterdir())


def test_rules_and_values_of_options_have_rows_with_their_price(few: list[str]) -> None:
    given = ["--drafters", "prompt-lookup", "--drafter-option", "prompt-lookup.length=2,4"]
    given += ["--rules", "exact,verify-every", "--rule-option", "every=2"]
    result = CliRunner().invoke(cli, [*few, *given])
    assert result.exit_code == 0, result.output
    for words in (
        "prompt-lookup (length=2)",
        "prompt-lookup verify-every (length=4, every=2)",
        "TV / token",
        "NLL / token",
    ):
        assert words in result.stdout


def test_json_to_stdout_prints_nothing_else(few: list[str]) -> None:
    result = CliRunner().invoke(cli, [*few, "--json", "-", "--num-prompts", "1"])
    assert json.loads(result.stdout)["settings"]["prompts"] == 1


def test_ctrl_c_shows_the_results_so_far(few: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Bench.go

    def go(self: Bench) -> Iterator[str]:
        for count, name in enumerate(whole(self), 1):
            yield name
            if count == 6:
                raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "go", go)
    result = CliRunner().invoke(cli, few)
    assert result.exit_code == 130
    assert "1 of 2 prompts" in result.stdout
    assert "jacobi" in result.stdout


def test_ctrl_c_before_the_first_result_is_an_error(few: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def go(self: Bench) -> Iterator[str]:
        raise KeyboardInterrupt
        yield ""

    monkeypatch.setattr(Bench, "go", go)
    result = CliRunner().invoke(cli, few)
    assert isinstance(result.exception, InvalidOption)
    assert "before anything was measured" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--drafters", "promt-lookup"], "Did you mean 'prompt-lookup'?"),
        (["--drafters", ","], "no drafters"),
        (["--rules", "exat"], "unknown rule 'exat'"),
        (["--json", "/no/such/folder/x.json"], "can't be written"),
        (["--dtype", "float3"], "unknown dtype 'float3'"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], words: str, few: list[str]) -> None:
    result = CliRunner().invoke(cli, [*few, *arguments])
    assert isinstance(result.exception, InvalidOption)
    assert words in str(result.exception)


@pytest.mark.slow
def test_errors_are_one_line(tmp_path: Path) -> None:
    missing = CliRunner().invoke(cli, ["bench", "text", "--prompts", str(tmp_path / "none.jsonl")])
    assert str(missing.exception) == f"{tmp_path / 'none.jsonl'} can't be read: there is no such file; check the path"
    assert CliRunner().invoke(cli, ["bench", "text", "--num-prompts", "0"]).exit_code == 2


def test_a_prompts_file_is_read_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("no JSON\n")
    result = CliRunner().invoke(cli, ["bench", "text", "--prompts", str(path), "--model", "none"])
    assert isinstance(result.exception, PromptsError)
    assert "line 1 is not JSON" in str(result.exception)


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, outrider.app.cli; print([m for m in ('torch', 'rich.table', 'matplotlib') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def row(drafter: str, speedup: float, **more: Any) -> dict[str, Any]:
    numbers = {"tokens_per_second": 60.0 * speedup, "tokens_per_second_low": 50.0, "tokens_per_second_high": 400.0}
    found = {"speedup": speedup, "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1, "tokens_per_pass": 1.5}
    found |= {"acceptance_rate": 0.3, "equivalents_per_token": 0.7, "identical": 0.5, "near_ties": 0.5, "wrong": 0.0}
    found |= {"memory": 10**9, "drafter": drafter, "rule": "exact", "engine": "outrider", "note": "", **numbers}
    return found | {"without_looping": {**found, **numbers}, "tasks": {"a": found, "b": None}, **more}


def drawn(report: dict[str, Any], width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    tables.draw(console, report)
    return console.export_text()


@pytest.mark.parametrize("width", [60, 140])
def test_tables_report_wrong_disabled_looping_and_skipped_contenders(width: int) -> None:
    asked = {"model": "m", "dtype": "int4", "device": "cpu", "prompts": 3, "prompts_wanted": 3, "max_new_tokens": 9}
    faulty = row("bad", 0.8, wrong=0.5, near_ties=0.0, quality={"worst_gap": 3.5}, note="switched off throughout")
    peer = row("plain", 2.0, engine="vllm", tokens_per_pass=None, acceptance_rate=None, identical=None)
    report = {
        "machine": {"threads": 2},
        "settings": asked | {"temperature": 0.0, "looping": ["x"]},
        "rows": [row("plain", 1.0), row("good", 1.5), faulty],
        "peers": [peer],
        "skipped": {"openvino-genai": "not installable here"},
    }
    report["rows"][0]["tasks"]["c"] = report["rows"][0]["tasks"]["a"]
    text = " ".join(drawn(report, width).split())
    assert "50% WRONG" in text or width < 100
    assert "bad: 50% of outputs contain tokens" in text
    assert "up to 3.50 below the most likely token" in text
    assert "bad: switched off throughout" in text
    assert "skipped openvino-genai: not installable here" in text
    assert "Without the 1 of 3 prompts" in text
    assert ("vllm plain" in text) or width < 100
    assert ("1 GB" in text) == (width >= 100), "narrow tables have no memory column"


def test_plots_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match=r"\[bench\]"):
        plots.check()


@pytest.mark.slow
def test_calibrations_are_saved_and_used(few: list[str], folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    names = ["--calibrate", "draft-verify,sequoia", "--drafters", "draft-verify,sequoia,draft-model"]
    result = CliRunner().invoke(cli, [*few, *names, "--draft-model", folder, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "draft-verify: " in result.stderr and "sequoia: acceptance 1.00" in result.stderr
    assert len(list((tmp_path / "cache" / "calibrations").glob("*.json"))) == 2
    rows = json.loads(out.read_text())["rows"]
    assert [row["identical"] for row in rows] == [1.0] * 4
    assert rows[3]["tokens_per_pass"] > 2, "the draft model is the target"
