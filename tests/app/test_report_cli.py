"""`outrider report`: commands that exist, a page from their JSON, and what is told to whoever asks wrongly."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from outrider.app import report
from outrider.app.cli import cli
from outrider.core.errors import OutriderError
from outrider.core.methods import DRAFTERS, RULES

PLACE = {"machine": {"system": "Linux", "threads": 2}, "versions": {"torch": "2.13"}}


def figures(**changes: object) -> dict[str, object]:
    found = {"tokens_per_second": 100.0, "tokens_per_second_low": 90.0, "tokens_per_second_high": 110.0}
    found |= {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6, "tokens_per_call": 2.0, "acceptance_rate": 0.5}
    found |= {"equivalents_per_token": 0.6, "identical": 1.0, "near_ties": 0.0, "wrong": 0.0, "memory": 1 << 30}
    return found | changes


def row(drafter: str, rule: str = "exact") -> dict[str, object]:
    part = {"drafter": drafter, "rule": rule, "engine": "outrider", "note": "", "quality": {}}
    return figures(**part) | {"without_looping": figures(), "tasks": {"chat": figures(), "code": figures(speedup=1.2)}}


def benched(*rows: dict[str, object], looping: tuple[str, ...] = ()) -> dict[str, object]:
    settings = {"looping": list(looping), "prompts": 4}
    return PLACE | {"settings": settings, "rows": list(rows), "peers": [], "skipped": {}, "command": "outrider bench x"}


@pytest.mark.parametrize("section", report.TEXT, ids=lambda one: one.name)
def test_every_command_is_one_that_the_command_line_takes(section: report.Section) -> None:
    bench = get_command(cli).commands["bench"]  # type: ignore[attr-defined]
    for command in section.commands:
        name, *words = shlex.split(command)
        for wanted in (words, report._hurried(words)):
            wanted = [word.format(prompts="p", store="s", python="py", folder="f") for word in wanted]
            options = bench.commands[name].make_context(name, list(wanted)).params
        for drafter in str(options.get("drafters", "")).split(","):
            assert drafter in (*DRAFTERS, "auto", "")
        assert options.get("rule", "exact") in RULES


def test_a_page_holds_every_figure_beside_its_command(tmp_path: Path) -> None:
    known = {one.name: one for one in report.TEXT}
    (tmp_path / "greedy.json").write_text(json.dumps(benched(row("plain"), row("suffix"), looping=("1",))))
    for file, rule in zip(known["rules"].files(tmp_path), ("top-beta", "bild", "verify-every"), strict=True):
        file.write_text(json.dumps(benched(row("plain"), row("draft-model", rule))))
    precision = {"dtype": "int4", "perplexity": 32.5, "agreement": 0.97, "tokens_per_second": 150.0}
    precision |= {"slowest": 140.0, "fastest": 160.0}
    (tmp_path / "precision.json").write_text(json.dumps(PLACE | {"rows": [precision], "command": "outrider bench p"}))
    batch = {"dtype": "int4", "drafter": "plain", "together": 500.0, "alone": 100.0, "same": 8, "rows": 8}
    (tmp_path / "batch.json").write_text(json.dumps(PLACE | {"rows": [batch], "command": "outrider bench b"}))
    page = report.written(tmp_path)
    assert page.count("threads 2") == 1
    for words in (
        "| int4 | 32.50 | 97.0% |",
        "| int4 | plain | 500 | 100 | 5.00 | 8 of 8 |",
        "| suffix | 100.0 | 1.50 (1.40-1.60) | 2.00 | 50% | 0.60 | 100% | 1 GB |",
        "| draft-model, rule verify-every |",
        "Without the 1 of 4 prompts",
        "| suffix | 1.50 | 1.20 |",
        "`outrider bench x`",
    ):
        assert words in page
    assert "## Editing" not in page


def test_sections_run_as_commands_and_what_fails_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    failing: list[bool] = []

    def run(words: list[str], **_: object) -> object:
        called.append(words)
        if words[3] == "bench":
            Path(words[-1]).write_text(json.dumps(benched(row("plain"), row("suffix"))))
        return type("Done", (), {"returncode": len(failing)})()

    monkeypatch.setattr(report.subprocess, "run", run)
    wanted = ["report", "text", "--only", "given", "--prompts", "/somewhere/own.jsonl", "--out", str(tmp_path)]
    told = CliRunner().invoke(cli, [*wanted, "--quick"])
    assert told.exit_code == 0, told.output
    assert called[0][called[0].index("--limit") + 1] == "2"
    page = (tmp_path / "REPORT.md").read_text()
    assert "--prompts own.jsonl" in page
    assert "/somewhere" not in page
    again = ["report", "text", "--only", "sampled,given", "--out", str(tmp_path)]  # nobody gives prompts here
    assert CliRunner().invoke(cli, again).exit_code == 0
    assert [words[3] for words in called[1:]] == ["datastore", "bench"]
    assert "rest.store=python.store" in (tmp_path / "REPORT.md").read_text()
    failing.append(True)
    assert isinstance(CliRunner().invoke(cli, wanted).exception, OutriderError)


@pytest.mark.parametrize(("words", "said"), [(["video"], "modality"), (["text", "--only", "nothing"], "section")])
def test_unknown_names_are_told(words: list[str], said: str) -> None:
    error = CliRunner().invoke(cli, ["report", *words]).exception
    assert isinstance(error, OutriderError)
    assert said in str(error)
