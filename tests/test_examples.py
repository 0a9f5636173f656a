"""The scripts of examples/ run and print what their docstrings say. Text examples run on a tiny model, and in the slow
tests on the default model."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.core.assets.store import ASSETS

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples"
TINY = runpy.run_path(str(ROOT / "tests" / "text" / "tiny.py"))
SAME = "same tokens as plain decoding: True"
TEXT: dict[str, tuple[list[str], str]] = {  # arguments in addition to the model, and the expected output
    "text_with_drafter": (["--drafter", "suffix", "--max-new-tokens", "12"], SAME),
    "batch": (["--batch-size", "2", "--max-new-tokens", "6"], r"5: \d\.\d\d tokens per target pass"),
    "streaming": (["--characters", "20"], r"\d+ tokens in \d+ target passes"),
    "custom_drafter": ([], SAME),
    "compare_methods": (["--max-new-tokens", "12"], r"ensemble .*x, same output: True"),
    "structured_text": ([], SAME),
    "retrieval": (["--max-new-tokens", "8"], "same tokens as without speculation: True"),
}
NEEDED = {"retrieval": "bm25s", "structured_text": "llguidance"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY["write"](tmp_path_factory.mktemp("models") / "tiny")  # type: ignore[no-any-return]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run an example as a script in its own folder and return its output."""

    def go(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return go


def test_examples_are_short_and_document_their_output() -> None:
    paths = sorted(FOLDER.glob("*.py"))
    tested = {*TEXT, "custom_rule", "conformance", "relaxed_image", "speech", "train_head"}
    tested |= {"constrained_image", "constrained_speech"}
    assert {path.stem for path in paths} == tested
    for path in paths:
        source = path.read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(source)) or ""
        assert len(source.splitlines()) <= 40, path.name
        assert re.search(r"\bPrints\b", text), path.name


@pytest.mark.parametrize("name", TEXT)
def test_text_examples_on_a_tiny_model(name: str, run: Any, tiny: Path) -> None:
    pytest.importorskip(NEEDED.get(name, "torch"))
    arguments, expected = TEXT[name]
    model = [str(tiny)] if name == "custom_drafter" else ["--model", str(tiny)]
    assert re.search(expected, run(name, *model, *arguments))


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT)
def test_text_examples_on_the_default_model(name: str, run: Any) -> None:
    pytest.importorskip(NEEDED.get(name, "torch"))
    assert re.search(TEXT[name][1], run(name))


def test_the_custom_rule_is_exact_at_chance_0(run: Any) -> None:
    exact, relaxed = re.findall(r"chance .*: (\d\.\d+) tokens .*, (\d+\.\d+) total variation", run("custom_rule"))
    assert float(exact[1]) == 0 < float(relaxed[1])
    assert float(relaxed[0]) > float(exact[0]) > 1


def test_conformance_tells_exact_from_relaxed(run: Any) -> None:
    drafter, exact, relaxed = (float(value) for value in re.findall(r"\S+$", run("conformance"), re.MULTILINE))
    assert max(drafter, exact) < 1e-12
    assert relaxed > 1e-3


@pytest.mark.slow
def test_a_relaxed_picture(run: Any, tmp_path: Path) -> None:
    exact, relaxed = re.findall(r"(\d\.\d+) tokens per target pass, (\d+\.\d+) total variation", run("relaxed_image"))
    assert float(exact[1]) == 0 < float(relaxed[1])
    assert all((tmp_path / f"{name}.png").stat().st_size > 500 for name in ("exact", "lantern"))


@pytest.mark.slow
def test_the_border_of_a_picture_is_kept(run: Any, tmp_path: Path) -> None:
    kept, all_, per_pass = re.findall(r"[\d.]+", run("constrained_image"))[:3]
    assert kept == all_ and int(all_) > 50 and float(per_pass) > 1
    assert (tmp_path / "after.png").stat().st_size > 500


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS["hifi-gan"].here, reason="the vocoder is not fetched")
def test_a_beginning_and_an_ending_are_kept(run: Any) -> None:
    pytest.importorskip("hibari")
    assert "20 of 20 tokens kept" in (said := run("constrained_speech")) and "as before: True" in said


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS["hifi-gan"].here, reason="the vocoder is not fetched")
def test_speech(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("hibari")
    assert re.search(r"\d\.\d+ seconds of sound\n\d\.\d+ tokens per target pass", run("speech"))
    assert (tmp_path / "morning.wav").stat().st_size > 20_000


@pytest.mark.slow
def test_a_head_is_trained_and_drafts(run: Any) -> None:
    simulated, reached = (
        float(value) for value in re.findall(r"(\d\.\d+) tokens per target pass", run("train_head", "60"))
    )
    assert reached > 1
    assert reached == pytest.approx(simulated, abs=0.1)
