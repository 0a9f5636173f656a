"""`outrider train` on a tiny model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from outrider.app.cli import cli

TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "text" / "tiny.py")))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["train", *arguments], catch_exceptions=False)


def test_a_missing_extra_is_told_before_answers_are_generated(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as where it is not installed
    result = CliRunner().invoke(cli, ["train", "eagle3", "-o", str(cache / "out")])
    assert "training needs accelerate" in str(result.exception) + result.output
    assert not (cache / "training").exists()


def test_recipes_are_listed() -> None:
    listed = run("--list")
    assert listed.exit_code == 0
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert {"draft-model", "medusa", "hydra", "eagle3"} <= set(names)
    nothing = run()
    assert nothing.exit_code == 2 and "draft-model" in nothing.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("medusa", "--head-option", "heads=2"), "OWNER.NAME=VALUE"),
        (("medusa", "--head-option", "medusa.heads"), "NAME=VALUE"),
        (("image-medusa", "--keep-states", "1"), "heads of text models"),
        (("speech-medusa", "--dtype", "int8"), "heads of text models"),
    ],
)
def test_options_of_heads_are_checked(options: tuple[str, ...], words: str) -> None:
    result = run(*options)
    assert result.exit_code == 2 and words in " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
def test_a_draft_model_is_trained_and_resumed(tmp_path: Path, cache: Path) -> None:
    """The target generates prompts and answers to train on; running the command again resumes the training."""
    folder = str(TINY.write(tmp_path / "models" / "tiny"))
    out = tmp_path / "out"
    options = (
        "draft-model",
        "--model",
        folder,
        "--minutes",
        "0.05",
        "--batch-size",
        "512",
        "--output-dir",
        str(out),
        "--quiet",
    )
    first = run(*options)
    assert first.exit_code == 0, first.output
    assert "tokens per target pass" in first.stdout and (cache / "training" / "tiny" / "answers.jsonl").is_file()
    assert {"draft-model.safetensors", "draft-model.json", "curve.json", "checkpoint"} <= {
        p.name for p in out.iterdir()
    }
    progress = json.loads((out / "checkpoint" / "state.json").read_text())
    assert progress["steps"] > 0
    again = run(*[one.replace("0.05", "0.1") for one in options])
    assert again.exit_code == 0, again.output
    after = json.loads((out / "checkpoint" / "state.json").read_text())
    assert after["steps"] > progress["steps"] and after["history"][: len(progress["history"])] == progress["history"]
