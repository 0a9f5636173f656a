"""`outrider speech`, `outrider bench speech` and `outrider bench codec` on small random models."""

from __future__ import annotations

import json
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outrider import speech
from outrider.app.cli import cli
from outrider.speech import loading
from outrider.speech.audio import Sound
from outrider.speech.evaluation import bench, human_speech, opus
from outrider.speech.training.kokoro import TeacherError

TINY = runpy.run_path(str(Path(__file__).parents[2] / "speech" / "conftest.py"))


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the voice with a small one with random weights."""
    made = TINY["small_speaker"]()
    monkeypatch.setattr(speech, "load", lambda **options: made)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["speech", *arguments])


def test_speech_is_written_to_a_file(tmp_path: Path) -> None:
    file, trace = tmp_path / "fox.wav", tmp_path / "fox.json"
    options = ("--drafter", "jacobi", "--rule", "gumbel-match", "-o", str(file), "--trace", str(trace), "--compare")
    done = run("The quick brown fox jumps over the lazy dog.", *options)
    assert done.exit_code == 0, done.output
    assert "s of speech" in done.stdout and "vocoder" in done.stdout
    assert "plain decoding" in done.output and "the same tokens" in done.output
    sound = Sound.load(file)
    assert sound.seconds > 0.3 and f"{sound.seconds:.1f} s of speech" in done.stdout
    assert json.loads(trace.read_text())["method"] == "jacobi"


@pytest.mark.parametrize(("named", "method"), [((), "jacobi"), (("--drafter", "plain"), "plain")])
def test_jacobi_is_the_default_drafter(named: tuple[str, ...], method: str, tmp_path: Path) -> None:
    trace = tmp_path / "yes.json"
    done = run("Yes.", *named, "-o", str(tmp_path / "yes.wav"), "--trace", str(trace))
    assert done.exit_code == 0 and json.loads(trace.read_text())["method"] == method


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "text is empty"),
        (("...",), "nothing to speak"),
        (("Hello.", "--drafter", "psychic"), "psychic"),
        (("Hello.", "--speed", "7"), "speed is 7"),
        (("Hello.", "-o", "a.mp3"), ".wav"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code and message in done.output + str(done.exception)


@pytest.mark.slow
def test_bench_speech_writes_a_table_and_json(tmp_path: Path) -> None:
    file, written = tmp_path / "said.txt", tmp_path / "bench.json"
    file.write_text("Yes.\n\nNo.\n")
    options = ["--drafters", "jacobi", "--rules", "exact,tolerance", "--rule-option", "tau=1,4", "--prompts", str(file)]
    done = CliRunner().invoke(cli, ["bench", "speech", *options, "--num-prompts", "1", "--json", str(written)])
    assert done.exit_code == 0, done.output
    assert "jacobi tolerance (tau=4)" in done.stdout and "entropy" in done.stdout and "vocoder" in done.stdout
    rows = json.loads(written.read_text())["rows"]
    assert [row["rule_options"] for row in rows] == [{}, {}, {"tau": 1}, {"tau": 4}]
    assert rows[2]["total_variation_per_token"] < 1e-9 and rows[3]["rule"] == "tolerance"
    done = CliRunner().invoke(cli, ["bench", "speech", "--drafters", "psychic"])
    assert done.exit_code and "psychic" in done.output + str(done.exception)


@pytest.mark.slow
def test_bench_speech_measures_a_published_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "load", loading.load)
    classes = runpy.run_path(str(Path(__file__).parents[2] / "tiny_classes.py"))
    model = classes["llasa"]()
    model.save_pretrained(tmp_path / "llasa")
    model.tokenizer.save_pretrained(tmp_path / "llasa")
    options = ["--model", str(tmp_path / "llasa"), "--dtype", "float32", "--max-new-tokens", "12", "--num-prompts", "2"]
    options += ["--drafters", "jacobi", "--rules", "gumbel-match,lantern", "--json", str(tmp_path / "bench.json")]
    done = CliRunner().invoke(cli, ["bench", "speech", *options])
    assert done.exit_code == 0, done.output
    plain, same, lantern = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert plain["tokens_per_pass"] == 1 and same["lossless"] and same["tokens_per_pass"] >= 1
    assert not lantern["lossless"] and lantern["total_variation_per_token"] >= 0
    done = CliRunner().invoke(cli, ["bench", "speech", *options, "--quality"])
    assert done.exit_code and "our own voice only" in done.output


@pytest.mark.slow
def test_bench_speech_writes_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")

    def nobody(*threads: int) -> bench.Read:
        raise TeacherError("the teacher is away")

    monkeypatch.setattr(bench, "load_teacher", nobody)
    file, written = tmp_path / "said.txt", tmp_path / "bench.json"
    file.write_text("Yes.\n")
    options = ["--drafters", "jacobi", "--prompts", str(file), "--json", str(written), "--samples"]
    done = CliRunner().invoke(cli, ["bench", "speech", *options, str(tmp_path / "heard")])
    assert done.exit_code == 0, done.output
    report = json.loads(written.read_text())
    assert report["samples"] == [{"text": "Yes.", "files": {n: f"heard/1-{n}.ogg" for n in ("plain", "jacobi")}}]
    assert report["skipped"]["teacher"] == "the teacher is away" and (tmp_path / "heard/1-jacobi.ogg").is_file()
    assert ("hibari-tts" in report["skipped"]) == (find_spec("hibari") is None)
    monkeypatch.setitem(sys.modules, "av", None)
    done = CliRunner().invoke(cli, ["bench", "speech", *options, str(tmp_path / "other")])
    assert isinstance(done.exception, opus.MissingPyAV) and not (tmp_path / "other").exists()


def test_bench_codec_writes_a_table_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    heard = bench.Quality(5, 1, 20, 2, 3.0, 3.0, 3.0, 0.9, 1.0, False)
    asked: list[int] = []

    def ladder(sp: Any, clips: Any, judges: Any, limit: int, step: Any) -> dict[str, list[bench.Quality]]:
        asked.append(limit)
        return {"human": [heard], "vocoder alone": [heard], "codec": [heard]}

    monkeypatch.setattr(human_speech, "ladder", ladder)
    written = tmp_path / "human.json"
    done = CliRunner().invoke(cli, ["bench", "codec", "--num-prompts", "3", "--json", str(written)])
    assert done.exit_code == 0 and asked == [3], done.output
    assert "1 human clips" in done.stdout and "vocoder alone" in done.stdout and "20.0" in done.stdout
    assert list(json.loads(written.read_text())["ladder"]) == ["human", "vocoder alone", "codec"]
