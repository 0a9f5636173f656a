"""`outrider report`: its commands parse, its pages contain their results, and wrong arguments are refused."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from outrider.app.bench.speech import SHOWN
from outrider.app.cli import cli
from outrider.app.report import command as report
from outrider.app.report import pages, weights
from outrider.app.report.sections import BENCH, METHODS, REPORTS, SECTIONS, TEXT, Section
from outrider.core.errors import OutriderError
from outrider.core.methods import DRAFTERS, RULES

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {"machine": {"system": "Linux", "threads": 2}, "versions": {"torch": "2.13"}}


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """reports/goals.py, a script outside the package."""
    spec = spec_from_file_location("goals", ROOT / "reports" / "goals.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "goals", module)
    spec.loader.exec_module(module)
    return module


def figures(**changes: object) -> dict[str, object]:
    found = {"tokens_per_second": 100.0, "tokens_per_second_low": 90.0, "tokens_per_second_high": 110.0}
    found |= {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6, "tokens_per_pass": 2.0, "acceptance_rate": 0.5}
    found |= {"equivalents_per_token": 0.6, "identical": 1.0, "near_ties": 0.0, "wrong": 0.0, "memory": 1 << 30}
    found |= {"decode_speedup": 1.7}
    return found | changes


def row(drafter: str, rule: str = "exact") -> dict[str, object]:
    part = {"drafter": drafter, "rule": rule, "lossless": True, "engine": "outrider", "note": "", "quality": {}}
    return figures(**part) | {"without_looping": figures(), "tasks": {"chat": figures(), "code": figures(speedup=1.2)}}


def text_results(*rows: dict[str, object], looping: tuple[str, ...] = ()) -> dict[str, object]:
    settings = {"looping": list(looping), "prompts": 4, "temperature": 0.0, "dtype": "bfloat16"}
    return ENVIRONMENT | {
        "settings": settings,
        "rows": list(rows),
        "peers": [],
        "skipped": {},
        "command": "outrider bench x",
    }


EVERY = [(modality, one) for modality, sections in REPORTS.items() for one in sections]


@pytest.mark.slow
@pytest.mark.parametrize(("modality", "section"), EVERY, ids=lambda one: getattr(one, "name", one))
def test_every_command_of_a_section_parses(modality: str, section: Section) -> None:
    for command in section.commands:
        words = shlex.split(f"{section.verb} {command}")
        for wanted in (words, report.shortened(words) if section.verb == BENCH else words):
            rest = [word.format(prompts="p", store="s", python="py", folder="f", device="cpu") for word in wanted]
            group = get_command(cli)
            while commands := getattr(group, "commands", None):
                group = commands[rest.pop(0)]
            options = group.make_context(group.name, rest).params
        for drafter in str(options.get("drafters", "")).split(","):
            assert drafter in (*DRAFTERS, "auto", "")
        for rule in str(options.get("rules", options.get("rule", "exact"))).split(","):
            assert rule in RULES


def test_every_method_is_measured() -> None:
    from outrider.image.resolve_drafter import drafters as of_image
    from outrider.speech.resolve_drafter import drafters as of_speech

    of_text = [name for name, method in DRAFTERS.items() if "text" in method.modalities]
    for modality, known in (("text", of_text), ("image", of_image()), ("speech", of_speech())):
        named: set[str] = set()
        for section in SECTIONS[modality]:
            for command in section.commands:
                words = command.split()
                named |= set(words[words.index("--drafters") + 1].split(",")) if "--drafters" in words else set()
        assert set(known) - {"spatial"} <= named - {"spatial"}, modality
        assert named <= {*known, "auto"}, modality


def test_a_page_contains_the_figures_and_commands_of_its_results(tmp_path: Path) -> None:
    known = {section.name: section for section in TEXT}
    (tmp_path / "given.json").write_text(json.dumps(text_results(row("plain"), row("suffix"), looping=("1",))))
    for file, rule in zip(known["rules"].files(tmp_path), ("top-beta", "bild", "verify-every", "bild"), strict=True):
        file.write_text(json.dumps(text_results(row("plain"), row("draft-model", rule))))
    precision = {"dtype": "int4", "perplexity": 32.5, "agreement": 0.97, "tokens_per_second": 150.0}
    precision |= {"slowest": 140.0, "fastest": 160.0}
    (tmp_path / "precision.json").write_text(
        json.dumps(ENVIRONMENT | {"rows": [precision], "command": "outrider bench p"})
    )
    batch = {"dtype": "int4", "drafter": "plain", "together": 500.0, "alone": 100.0, "same": 8, "rows": 8}
    (tmp_path / "batch.json").write_text(json.dumps(ENVIRONMENT | {"rows": [batch], "command": "outrider bench b"}))
    rung = {"drafter": "medusa", "tokens_per_pass": 1.5, "spread": 0.01, "minutes": 4.0, "tokens": 9000}
    rungs = {"ladder": True, "rows": [rung | {"kinds": {"code": 1.75}, "conditional": [0.5, 0.25]}]}
    rungs["settings"] = {"data": [{"tokens": 2000, "kinds": {"code": 30}}]}
    (tmp_path / "ladder.json").write_text(json.dumps(ENVIRONMENT | rungs | {"command": "outrider ladder"}))
    page = pages.modality_page(tmp_path, "text")
    assert page.count("threads 2") == 1
    assert "| medusa | 1.500 ± 0.010 | 4.0 | 9,000 | 1.75 | 50% | 25% |" in page
    assert "2,000 tokens (code 30)" in page
    for words in (
        "| int4 | 32.50 | 97.0% |",
        "| int4 | plain | 500 | 100 | 5.00 | 8 of 8 |",
        "| suffix | 100.0 | 1.50 (1.40-1.60) | 1.70 | 2.00 | 50% | 0.60 | 100% | 1 GB |",
        "| draft-model verify-every |",
        "Without the 1 of 4 prompts",
        "| suffix | 1.35 | 1.50 | 1.20 |",
        "| suffix | 1.70 | 1.70 | 1.70 |",
        "`outrider bench x`",
    ):
        assert words in page
    assert "## Editing" not in page
    assert "- Editing: `outrider report text --only editing`" in page


def test_the_break_even_table_has_predicted_and_measured_speedups(tmp_path: Path) -> None:
    section = next(one for one in TEXT if one.name == METHODS)
    found = text_results(row("plain") | {"acceptance_rate": 0.0}, row("swift"), row("draft-verify"))
    found["rows"][2]["acceptance_rate"] = 0.08  # type: ignore[index]
    found["settings"]["pass_cost"] = {"floor": 1.0, "slope": 0.1, "knee": 1.0}  # type: ignore[index]
    section.files(tmp_path)[0].write_text(json.dumps(found))
    page = pages.modality_page(tmp_path, "text")
    settings = "bfloat16, temperature 0"
    assert f"| swift | {settings} | 2.00 | 1.20 | 0.20 | 1.43 | 1.70 | below 0.80 |" in page
    assert f"| draft-verify | {settings} | 2.00 | 2.25 | 0.20 | 0.82 | 1.70 | never |" in page


def test_sections_run_as_commands_and_failures_raise_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    failing: list[bool] = []

    def run(words: list[str], **_: object) -> object:
        called.append(words)
        if words[3] == "bench":
            found = text_results(row("plain"), row("suffix"))
            found["settings"]["pass_cost"] = {"floor": 1.0, "slope": 0.1, "knee": 1.0}  # type: ignore[index]
            Path(words[-1]).write_text(json.dumps(found))
        return type("Done", (), {"returncode": len(failing)})()

    monkeypatch.setattr(report.subprocess, "run", run)
    monkeypatch.setattr(report, "commit", lambda: "abc")
    wanted = ["report", "text", "--only", "given", "--prompts", "/somewhere/own.jsonl", "--output-dir", str(tmp_path)]
    result = CliRunner().invoke(cli, [*wanted, "--quick"])
    assert result.exit_code == 0, result.output
    assert called[0][called[0].index("--num-prompts") + 1] == "2"
    page = (tmp_path / "REPORT.md").read_text()
    assert "--prompts own.jsonl" in page
    assert "/somewhere" not in page
    again = ["report", "text", "--only", "methods,given", "--output-dir", str(tmp_path)]  # without --prompts
    assert CliRunner().invoke(cli, again).exit_code == 0
    assert [words[3] for words in called[1:]] == ["datastore", "bench", "bench"]
    assert "rest.store=python.store" in (tmp_path / "REPORT.md").read_text()
    failing.append(True)
    assert isinstance(CliRunner().invoke(cli, wanted).exception, OutriderError)


def test_what_was_not_measured_is_said_with_the_reason(tmp_path: Path) -> None:
    known = {section.name: section for section in TEXT}
    for file in known[METHODS].files(tmp_path):
        found = text_results(row("plain"), row("suffix"))
        found["settings"]["pass_cost"] = {"floor": 1.0, "slope": 0.1, "knee": 1.0}  # type: ignore[index]
        file.write_text(json.dumps(found))
    page = pages.modality_page(tmp_path, "text")
    assert "because their weights are missing: llasa-plus (`outrider train llasa-plus`)." in page
    later = next(line for line in page.splitlines() if line.startswith("Not measured yet: "))
    assert {"eagle", "dflash2", "prompt-lookup"} <= set(later.removeprefix("Not measured yet: ").strip(".").split(", "))


def image_results(temperature: float, *drafters: str) -> dict[str, object]:
    counts = {
        "background_per_pass": 3.0,
        "foreground_per_pass": 1.5,
        "total_variation": 0.0,
        "nll": 2.0,
        "quality": {"KID": 0.1},
    }
    rows = [figures(drafter=one, name=one, rule="exact", lossless=True, **counts) for one in ("plain", *drafters)]
    return ENVIRONMENT | {"settings": {"temperature": temperature}, "rows": rows, "command": "outrider bench image"}


def test_the_summary_lists_measured_and_missing_sections(tmp_path: Path) -> None:
    for modality in SECTIONS:
        (tmp_path / "reports" / modality).mkdir(parents=True)
    for number, temperature in enumerate((0.0, 1.0), 1):
        found = text_results(row("plain"), row("suffix"))
        found["settings"] |= {"temperature": temperature}  # type: ignore[operator]
        (tmp_path / f"reports/text/{METHODS}-{number}.json").write_text(json.dumps(found))
        (tmp_path / f"reports/image/{METHODS}-{number}.json").write_text(
            json.dumps(image_results(temperature, "jacobi"))
        )
    (tmp_path / "reports/text/editing.json").write_text(json.dumps(text_results(row("plain"), row("input-guided"))))
    path = pages.write_summary(tmp_path, report._goals(tmp_path / "reports"))
    page = path.read_text()
    for words in (
        "| suffix | 2.00 / 2.00 | - |",
        "| jacobi | - | 2.00 / 2.00 |",
        "![tokens-per-call](reports/tokens-per-call.png)",
        "Temperature 1:",
        "- text, input-guided drafting on editing, tokens per target pass: 2.00, wanted at least 2.5 (20% off)",
        "goals are met",
        "- speech: Every method, at temperature 0 and 1:",
        "llasa-plus (`outrider train llasa-plus`)",
    ):
        assert words in page, words
    assert (tmp_path / "reports/speedup.png").stat().st_size > 5000
    pictures = pages.modality_page(tmp_path / "reports" / "image", "image")
    assert "| jacobi | 1.50 (1.40-1.60) | 2.00 | 3.00 | 1.50 |" in pictures and "| KID |" in pictures


def test_goals_refer_to_existing_sections(goals: ModuleType) -> None:
    for goal in goals.GOALS:
        assert goal.section in {section.name for section in SECTIONS[goal.modality]}
        assert (goal.minimum is None) != (goal.maximum is None)
        assert goal.figure([]) is None
    peers = [row("plain") | {"engine": "transformers", "tokens_per_second": 20.0}]
    found = [text_results(row("plain"), row("auto")) | {"peers": peers}]
    assert goals.GOALS[0].figure(found) == 5.0


def quality(**values: float) -> dict[str, dict[str, float]]:
    """Measures of speech quality with their intervals and differences from plain decoding."""
    found = {name: 3.0 for _, name, *_ in SHOWN} | values
    return {
        name: {"value": one, "low": one, "high": one, "apart": one - 3, "apart_low": one - 4, "apart_high": one - 2}
        for name, one in found.items()
    }


def speech_row(drafter: str, rule: str = "exact", **changes: object) -> dict[str, object]:
    work = {"factor_model": 0.3, "factor_codec": 0.05, "factor_vocoder": 0.2}
    found = row(drafter, rule) | {"setting": f"{drafter} {rule}" if rule != "exact" else drafter, "quality": work}
    return found | {"total_variation_per_token": 0.01, "target_entropy": 2.5, "lossless": rule == "exact"} | changes


def test_missed_goals_are_listed_with_their_distance(goals: ModuleType) -> None:
    plain, heads = speech_row("plain"), speech_row("medusa", tokens_per_pass=1.3)
    relaxed = speech_row("jacobi", "tolerance", tokens_per_pass=2.6, speedup=1.9)
    short = goals.short({"speech": {"speed": [text_results(plain, heads, relaxed)]}})
    assert "speech, heads with the speech tree, tokens per target pass: 1.30, wanted at least 1.4 (7% off" in short
    assert f"3 of {len(goals.GOALS)} goals are met, 1 missed" in short
    ladder = {"codec": quality(word_error=0.03)}
    plain["quality"] = quality(word_error=0.2, missing_end=0.01)
    relaxed["quality"] = quality(word_error=2.5, dnsmos=2.9)
    less = speech_row("medusa", "tolerance", tokens_per_pass=2.0, quality=quality(word_error=0.0))
    short = goals.short({"speech": {"judged": [text_results(plain, less, relaxed) | {"ladder": ladder}]}})
    for words in (
        "word error of plain decoding: 0.20, wanted at most 0.12 (67% off)",
        "its word error above plain decoding's, at 95 %: 0.50, wanted at most 0.02",
        "its DNSMOS above plain decoding's: -0.10, wanted at least -0.05 (100% off)",
        f"5 of {len(goals.GOALS)} goals are met, 3 missed",
    ):
        assert words in short, short


def test_the_speech_page_has_speed_and_quality(tmp_path: Path) -> None:
    known = {section.name: section for section in SECTIONS["speech"]}
    files = {"plain": "samples/1-plain.ogg", "jacobi": "samples/1-jacobi.ogg"}
    rows = [
        speech_row("plain"),
        speech_row("jacobi", quality=speech_row("jacobi")["quality"] | quality(word_error=0.1)),
    ]  # type: ignore[operator]
    found = text_results(*rows) | {"ladder": {"codec": quality(word_error=0.04)}, "judged": 500}
    found["samples"] = [{"text": "Yes | no.", "files": files}]
    known["judged"].files(tmp_path)[0].write_text(json.dumps(found))
    (tmp_path / "samples").mkdir()
    (tmp_path / files["plain"]).write_bytes(b"OggS")
    human = {"human": quality(word_error=0.0), "codec": quality(word_error=0.5)}
    alone = text_results() | {"ladder": human, "judged": 30, "skipped": {"teacher": "it is away"}}
    known["human"].files(tmp_path)[0].write_text(json.dumps(alone))
    page = pages.modality_page(tmp_path, "speech")
    for words in (
        "| jacobi | 100.0 | 1.50 (1.40-1.60) | 2.00 | 50% | 0.60 | 100% | 0.0100 | 2.50 | 0.550 |",
        "Speech quality over 500 sentences:",
        "| codec | 4.0 (4.0-4.0) | -296.0 (-396.0 to -196.0) |",
        "| sentence | plain | jacobi |",
        "| Yes / no. | [listen](samples/1-plain.ogg) | - |",
        "Speech quality over 30 clips:",
        "| human | 0.0 (0.0-0.0) |  |",
        "difference from human",
        "- skipped teacher: it is away",
    ):
        assert words in page, page


def test_drafters_without_weights_are_removed_from_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "untrained", lambda modality, names: [n for n in names if n in ("image-draft", "mtp")])
    words = ["bench", "text", "--drafters", "suffix,mtp", "--drafter-option", "mtp.x=1", "--calibrate", "mtp,sequoia"]
    kept = ["bench", "text", "--drafters", "suffix", "--calibrate", "sequoia"]
    assert report._without_untrained("text", words) == kept
    assert report._without_untrained("image", ["bench", "image", "--drafters", "draft-model"]) == []
    assert weights.recipe_of("speech", "specexec") == "speech-draft" and weights.recipe_of("text", "eagle2") == "eagle"


def test_resume_skips_what_this_commit_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def run(words: list[str], **_: object) -> object:
        called.append(words)
        Path(words[-1]).write_text(json.dumps(text_results(row("plain"), row("suffix"))))
        return type("Done", (), {"returncode": 0})()

    monkeypatch.setattr(report, "commit", lambda: "abc")
    monkeypatch.setattr(report, "_goals", lambda folder: "")
    monkeypatch.setattr(report.subprocess, "run", run)
    wanted = ["report", "all", "--only", "editing", "--output-dir", str(tmp_path), "--resume"]
    for count in (1, 1):
        assert CliRunner().invoke(cli, wanted).exit_code == 0
        assert len(called) == count
    monkeypatch.setattr(report, "commit", lambda: "def")
    assert CliRunner().invoke(cli, wanted).exit_code == 0
    assert len(called) == 2
    assert "(commit def, " in (tmp_path / "reports/text/REPORT.md").read_text()


@pytest.mark.parametrize(("words", "expected"), [(["video"], "report"), (["text", "--only", "nothing"], "section")])
def test_unknown_names_are_refused(words: list[str], expected: str) -> None:
    error = CliRunner().invoke(cli, ["report", *words]).exception
    assert isinstance(error, OutriderError)
    assert expected in str(error)
