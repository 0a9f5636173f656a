"""`outrider advise` on a tiny model: the screen, the JSON, the picture, and predictions held against measurement."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from outrider.app.bench.advice_plot import draw
from outrider.app.cli import cli
from outrider.app.commands.advise import lines
from outrider.core.advice.advise import advise
from outrider.core.advice.measure import RoundCosts
from outrider.core.advice.predict import Candidate, DraftCost, Machine
from outrider.core.advice.replay import Attempt
from outrider.core.errors import InvalidOption

TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "text" / "tiny.py")))


@pytest.mark.slow
def test_a_tiny_model_is_measured_and_its_predictions_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    texts = ("the cat sat on the mat and", "a dog", "the rain fell", "one two one two", "the log", "the cat " * 400)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    folder, found, picture = TINY.write(tmp_path / "tiny"), tmp_path / "advice.json", tmp_path / "advice.png"
    command = ["advise", "--model", str(folder), "--drafters", "prompt-lookup,suffix,auto"]
    command += ["--prompts", str(prompts)]
    command += ["--max-new-tokens", "32", "--max-draft-tokens", "3", "--batch-sizes", "2", "--check"]
    command += ["--dtype", "float32", "--device", "cpu", "--json", str(found), "--plot", str(picture)]
    result = CliRunner().invoke(cli, command, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "Use " in result.stdout or "Don't draft: " in result.stdout
    assert "Predictions held against measurement" in result.stdout, result.stdout
    report = json.loads(found.read_text())
    names = {each["drafter"] for each in report["candidates"]}
    assert "prompt-lookup" in names and len(report["checked"]) >= 3
    assert all(each["measured"] > 0 for each in report["checked"])
    assert {each["rows"] for each in report["batches"]} == {1, 2}
    assert picture.stat().st_size > 1000
    assert (
        list(report["skipped"]) == ["1 of 6 prompts"] and "skipped 1 of 6 prompts: they leave no room" in result.stdout
    )


def test_the_advice_in_words_and_as_a_picture(tmp_path: Path) -> None:
    machine = Machine(RoundCosts.of({(1, 1): 10.0, (1, 4): 11.0, (4, 1): 11.0, (4, 4): 44.0}), draws=8)
    record = (Attempt(3, 3, 3, 4), Attempt(3, 3, 1, 2)) * 4
    chain = Candidate("draft-model", (record, record), DraftCost({(1, 0): 0, (1, 3): 1.0}), always=True, longest=3)
    tree = Candidate("eagle3, tree of 8", (record,), DraftCost({}), shape="tree of 8", options={"nodes": 8})
    given = advise(machine, [chain], (1, 4))
    first, why, batches = lines(given)
    assert first.startswith("Use draft-model with drafts of 2 tokens: 2.") and why.startswith("Why: a round yields")
    assert "stops paying at 4 rows" in batches
    assert lines(advise(machine, [tree]))[0].startswith("Use eagle3 (tree of 8): ")
    nothing = Candidate("x", ((Attempt(3, 3, 0, 1),),), DraftCost({(1, 3): 2.0}))
    assert lines(advise(machine, [nothing]))[0].startswith("Don't draft: the best drafter, x, yields 1.00 tokens")
    draw(given, (1, 4), tmp_path / "a.svg")
    assert "draft tokens" in (tmp_path / "a.svg").read_text()
    result = CliRunner().invoke(cli, ["advise", "--plot", str(tmp_path / "a.txt")])
    said = " ".join(result.output.replace("│", "").split())
    assert result.exit_code == 2 and "must end in .png" in said  # before anything is measured


@pytest.mark.parametrize("sizes", ["a", "0", "1,,2"])
def test_wrong_batch_sizes_are_refused(sizes: str) -> None:
    result = CliRunner().invoke(cli, ["advise", "--batch-sizes", sizes])
    assert isinstance(result.exception, InvalidOption)
