"""`outrider image` and `outrider bench image` on small random models."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from outrider import image
from outrider.app.cli import cli

TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "image" / "conftest.py")))


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the image model with a small one with random weights."""
    import torch

    from outrider.image.model import ImageModel
    from outrider.image.tokenizer import Layout, Tokenizer

    torch.manual_seed(0)
    codec = Tokenizer(Layout(levels=(4, 3, 3), channels=(8, 16, 16))).eval()
    tokens = TINY.made()
    made = ImageModel(tokens.network(), tokens.prompt_encoder, codec, name="tiny")
    monkeypatch.setattr(image, "load", lambda name, **options: made)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["image", *arguments], catch_exceptions=False)


def test_a_picture_is_written(tmp_path: Path) -> None:
    file, trace = tmp_path / "heart.png", tmp_path / "heart.json"
    options = ("--drafter", "jacobi", "--rule", "exact", "-o", str(file), "--trace", str(trace), "--upscale", "2")
    done = run("red heart", *options, "--negative-prompt", "cat")
    assert done.exit_code == 0, done.output
    assert "256 codes in" in done.stdout and "per pass" in done.stdout
    with Image.open(file) as picture:
        assert picture.size == (128, 128)
    written = json.loads(trace.read_text())
    assert written["method"] == "jacobi" and written["options"]["negative_prompt"] == "cat"


@pytest.mark.slow
def test_compare_prints_plain_decoding(tmp_path: Path) -> None:
    done = run(
        "cat", "--rule", "gumbel-match", "--drafter-option", "window=4", "--compare", "-o", str(tmp_path / "a.png")
    )
    assert done.exit_code == 0, done.output
    assert "256 of 256 codes" in done.output and "plain decoding  256 passes" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((" ",), "empty"), (("cat", "--guidance-scale", "-1"), "guidance"), (("cat", "--style", "x"), "unknown style")],
)
def test_errors_have_a_message(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    from outrider.core.errors import InvalidOption

    with pytest.raises(InvalidOption, match=message):
        run(*arguments, "-o", str(tmp_path / "none.png"))
    assert not (tmp_path / "none.png").exists()


@pytest.mark.slow
def test_a_table_of_drafters_and_rules(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    options = ["--drafters", "jacobi", "--rules", "exact,annealed", "--num-prompts", "1", "--guidance-scale", "1"]
    options += ["--drafter-option", "window=4", "--rule-option", "weight=3", "--json", str(file)]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("cat\n\nred heart\n")
    done = CliRunner().invoke(cli, ["bench", "image", "--prompts", str(prompts), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert [row["rule"] for row in report["rows"]] == ["exact", "exact", "annealed"]
    assert report["rows"][0]["tokens_per_pass"] == 1 and report["settings"]["pictures"] == 1
    assert "1.00" in done.output and "annealed" in done.output.replace("\n", "")


@pytest.mark.slow
def test_listed_option_values_become_rows(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    options = ["--drafters", "jacobi", "--rules", "annealed", "--num-prompts", "1", "--guidance-scale", "1"]
    options += ["--rule-option", "annealed.weight=1.5,4", "--json", str(file)]
    done = CliRunner().invoke(cli, ["bench", "image", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert [row["options"] for row in json.loads(file.read_text())["rows"][1:]] == [{"weight": 1.5}, {"weight": 4}]


@pytest.mark.slow
def test_a_contact_sheet(tmp_path: Path) -> None:
    file, prompts = tmp_path / "sheet.png", tmp_path / "prompts.txt"
    prompts.write_text("cat\nred heart\n")
    options = ["--prompts", str(prompts), "--guidance-scale", "1", "--tile-size", "16", "-o", str(file)]
    done = CliRunner().invoke(cli, ["contact-sheet", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == 6 and "jacobi lantern:" in done.stdout
    with Image.open(file) as picture:
        assert picture.width == 3 * (8 * 16 + 24)
