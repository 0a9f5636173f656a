"""The README: every command and example is run here, or listed with the reason why not; its links and figures hold."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider import text
from outrider.app.cli import cli
from outrider.app.report.method_table import markdown
from outrider.core.assets.store import ASSETS
from outrider.core.methods import DRAFTERS, RULES

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "modalities/PUBLISHED.md"]
PAGES += [f"modalities/{one}/weights/MODEL_CARD.md" for one in ("text", "image", "speech")]
PUBLISHED = (ROOT / "modalities" / "PUBLISHED.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^outrider ([^#\n]+?) *(?:#.*)?$", README, re.MULTILINE)
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PYTHON = dict(zip(("first", "generate", "object", "draft", "text", "image", "speech", "decode"), BLOCKS, strict=True))

# Commands that run as they are with an empty home and cache and no network -> "slow" if they are.
RUN = {
    "demo --drafter top-k-tree --rule typical --temperature 0.7": "",
    "methods": "",
    "doctor": "slow",
    'image "red heart" --drafter jacobi --rule exact -o heart.png': "slow",
    "plot-acceptance -o acceptance.png": "",
}
# Commands that are not run, by their beginning; each has tests of its own on small models.
NOT_RUN = {
    "demo": "serves a page until it is stopped; tests/browser opens it",
    "doctor --speed": "times the machine",
    "text": "downloads the language model; tests/text/test_smollm2.py does the same in Python",
    "bench": "takes minutes to hours, and downloads models",
    "report": "hours",
    "ladder": "hours; tests/text/training/test_ladder.py runs it on a tiny model",
    "train": "minutes to hours; every recipe is trained for some steps in tests/*/test_training.py",
    "advise": "downloads models and times them; tests/app/commands/test_advise.py runs it on small ones",
    "rag": "downloads retrievers and documents",
    "serve": "installs vLLM",
    "export": "downloads the language model",
    "simulate": "downloads the language model and times it",
    "contact-sheet": "384 images",
    "speech": "downloads the vocoder; tests/speech tests a small voice",
}
NOT_RUN_PYTHON = {
    "speech": "downloads the vocoder; run below if it is present",
    "draft": "downloads a model of 3 GB; run below with the small model in its place",
}


def test_every_command_is_run_or_has_a_reason() -> None:
    for command in COMMANDS:
        assert command in RUN or any(command.startswith(name) for name in NOT_RUN), command
    assert set(RUN) <= set(COMMANDS)
    assert not {name for name in NOT_RUN if not any(command.startswith(name) for command in COMMANDS)}


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=[pytest.mark.slow] if word else []) for one, word in RUN.items()]
)
def test_commands_run_with_an_empty_home(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "OUTRIDER_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "HOME").mkdir()
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    if "-o" in words:
        assert (tmp_path / words[words.index("-o") + 1]).stat().st_size > 500
    else:
        assert result.stdout.strip()


@pytest.mark.slow
def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PYTHON["first"], "README.md", "exec"), {})
    *words, tokens_per_pass = capsys.readouterr().out.split()
    assert "sky" in words
    assert float(tokens_per_pass) >= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("example", "place"), [("generate", "HuggingFaceTB/"), ("object", "HuggingFaceTB/")])
def test_the_examples_with_objects_of_transformers_run(
    example: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the folder of the fetched weights in place of the hub id."""
    folder = text.load("smollm2-135m").folder
    code = re.sub(rf'"{place}[^"]*"', repr(str(folder)), PYTHON[example])
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 5
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 8


@pytest.mark.slow
def test_the_example_with_a_draft_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PYTHON["draft"].replace("qwen2.5-coder-1.5b", "smollm2-135m"), "README.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) > 1.5


def test_the_count_of_classes_is_that_of_the_guide() -> None:
    guide = (ROOT / "docs" / "guides" / "transformers-classes.md").read_text(encoding="utf-8")
    equal, refused, compared = re.findall(r"(\d+) equal, (\d+) refused,.*?(\d+) are composite", guide, re.DOTALL)[0]
    said = " ".join(README.split())
    assert (
        f"{equal} give the tokens of their own `generate`, {refused} are refused by name, and {compared} were" in said
    )


def test_the_animation_is_that_of_its_command() -> None:
    """The picture's own sentence has the numbers that the README says."""
    svg = (ROOT / "docs" / "images" / "race.svg").read_text(encoding="utf-8")
    tokens, few, total = re.findall(r"The same (\d+) tokens in (\d+) target passes instead of (\d+)", svg)[0]
    assert f"the same {tokens} tokens, in {total} and in {few} target passes" in README
    assert "@keyframes" in svg and "prefers-reduced-motion" in svg and "<script" not in svg


@pytest.mark.slow
def test_the_batch_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PYTHON["text"], "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_the_image_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON["image"], "README.md", "exec"), {})
    assert float(capsys.readouterr().out) > 1
    assert (tmp_path / "heart.png").stat().st_size > 500


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS["hifi-gan"].here, reason="the vocoder is not downloaded")
def test_the_speech_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hibari")
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON["speech"], "README.md", "exec"), {})
    assert float(capsys.readouterr().out) > 1
    assert (tmp_path / "morning.wav").stat().st_size > 20_000


def test_the_decode_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = PYTHON["decode"]
    assert len([line for line in code.splitlines() if line]) <= 10
    exec(compile(code, "README.md", "exec"), {})
    tokens_per_pass, acceptance = map(float, capsys.readouterr().out.split())
    assert tokens_per_pass > 1.5
    assert 0 < acceptance < 1


def test_every_example_is_run_or_has_a_reason() -> None:
    assert set(PYTHON) == {"first", "generate", "object", "text", "image", "decode", *NOT_RUN_PYTHON}
    for code in (*PYTHON.values(), *re.findall(r"```python\n(.*?)```", PUBLISHED, re.DOTALL)):
        compile(code, "example", "exec")


def exists(command: str) -> None:
    name, *rest = shlex.split(command)
    names = [name, *rest[:1]] if name in ("bench", "export", "datastore") else [name]
    result = CliRunner().invoke(cli, [*names, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, command
    assert all(option.partition("=")[0] in result.stdout for option in rest if option.startswith("--")), command


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist_with_their_options(command: str) -> None:
    exists(command)


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_linked_and_name_existing_files_and_commands(page: str) -> None:
    text, here = (ROOT / page).read_text(encoding="utf-8"), (ROOT / page).parent
    assert f"]({page})" in README or f"`{page}`" in README
    for name in re.findall(r"`((?:core|app|modalities|tests|notebooks|reports|text|image|speech)/[\w./-]*)`", text):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "modalities", here)), name
    for command in re.findall(r"`outrider ([a-z][^`\n]*)`", text):
        exists(command)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_make_targets_and_files_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"\bmake ([\w-]+)", README)
    assert {"demo", "test", "report", "report-quick"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    for name in re.findall(r"`((?:core|app|modalities|tests|notebooks|reports)/[\w./-]*)`", README):
        assert (ROOT / name).exists(), name


def test_the_table_of_methods_is_current() -> None:
    result = CliRunner().invoke(cli, ["methods", "--markdown"])
    assert result.exit_code == 0 and result.stdout == markdown()
    page = (ROOT / "docs" / "guides" / "where-methods-run.md").read_text(encoding="utf-8")
    held = page.partition("<!-- outrider methods --markdown -->\n")[2].partition("<!-- the end of it -->")[0]
    assert held == result.stdout, "outrider methods --markdown"
    assert f"the {len(DRAFTERS)} drafters and {len(RULES)} rules" in README.replace("\n", " ")


def test_figures_are_those_of_the_report() -> None:
    report = (ROOT / "reports" / "text" / "REPORT.md").read_text(encoding="utf-8")
    part = README.partition("## Measured\n")[2].partition("\n## ")[0]
    table, commands = part.partition("```")[0], re.findall(r"^outrider bench .+$", part, re.MULTILINE)
    figures = re.findall(r"\d+\.\d", table)
    assert len(figures) == 18 and len(commands) == 2
    assert all(f"| {figure} |" in report for figure in figures)
    assert all(f"`{command}`" in report for command in commands)
