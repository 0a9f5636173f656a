"""`outrider text` and `outrider assets` on a tiny model."""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli, main
from outrider.core.assets.store import ASSETS
from outrider.core.trace import Trace

TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "text" / "tiny.py")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TINY.write(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


COMMAND = str(Path(sysconfig.get_path("scripts")) / "outrider")


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Run the command as its process does, within this one; only starting Python and torch is left out."""

    def run(*arguments: str, given: str = "") -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=stop.value.code, stdout=out, stderr=err)

    return run


def ask(*arguments: str, model: str) -> str:
    result = CliRunner().invoke(
        cli, ["text", *arguments, "--model", model, "--dtype", "float32"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


RAW = ("--no-chat-template", "--max-new-tokens", "16")
PROMPT = "the cat sat on the mat and the dog sat on"


def test_text_is_printed_and_written_with_its_trace(folder: str, tmp_path: Path) -> None:
    text, trace = tmp_path / "out.txt", tmp_path / "trace.json"
    options = ("--drafter", "prompt-lookup", "--drafter-option", "length=3", "--seed", "4", "--rule", "token")
    shown = ask(PROMPT, *RAW, *options, "-o", str(text), "--trace", str(trace), model=folder)
    assert shown == text.read_text(encoding="utf-8")
    found = Trace.from_json(trace.read_text(encoding="utf-8"))
    assert (found.method, found.rule, found.seed) == ("prompt-lookup", "token", 4)
    assert found.options["drafter.length"] == 3
    assert len(found.tokens()) == 16
    assert shown == ask(PROMPT, *RAW, "--drafter", "plain", model=folder)


def test_options_of_rules_and_sampling(folder: str) -> None:
    drawn = ("--temperature", "1", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3")
    relaxed = ("--rule", "threshold", "--rule-option", "threshold=0.5", "--drafter", "jacobi")
    assert ask(PROMPT, *RAW, *drawn, *relaxed, model=folder) == ask(PROMPT, *RAW, *drawn, *relaxed, model=folder)
    whole = ask(PROMPT, *RAW, model=folder)
    assert ask(PROMPT, *RAW, "--stop", whole[4:7], model=folder) == whole[: whole.index(whole[4:7])] + "\n"


def test_a_draft_model_is_named_on_the_command_line(folder: str) -> None:
    options = ("--draft-model", folder, "--num-draft-tokens", "3", "--compare", "--dtype", "float32")
    result = CliRunner().invoke(cli, ["text", PROMPT, *RAW, *options, "--model", folder])
    assert result.exit_code == 0, result.output
    assert "draft-model: the same tokens as plain decoding" in result.stderr


def test_compare_prints_agreement_and_speedup(folder: str) -> None:
    result = CliRunner().invoke(
        cli, ["text", PROMPT, *RAW, "--compare", "--drafter", "prompt-lookup", "--model", folder, "--dtype", "float32"]
    )
    assert result.exit_code == 0
    assert "prompt-lookup: the same tokens as plain decoding" in result.stderr
    assert "tokens per target pass" in result.stderr
    assert "x, median of 3 runs in turns" in result.stderr
    drawn = ["--compare", "--temperature", "1", "--drafter", "jacobi", "--model", folder, "--dtype", "float32"]
    other = CliRunner().invoke(cli, ["text", PROMPT, *RAW, *drawn])
    assert "--rule gumbel-match gives the same tokens" in other.stderr or "the same tokens" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "medussa"], "outrider: unknown drafter 'medussa'. Did you mean 'medusa'?|unknown drafter"),
        (["--model", "no-such-model"], "outrider: there is no model 'no-such-model'"),
        (["--temperature", "-1"], "outrider: temperature is -1"),
        (["--dtype", "float9"], "outrider: unknown dtype 'float9'"),
        (["--drafter", "prompt-lookup", "--drafter-option", "size=3"], "outrider: unknown option of the drafter"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    outrider: Callable[..., SimpleNamespace], arguments: list[str], message: str, folder: str
) -> None:
    model = [] if "--model" in arguments else ["--model", folder]
    result = outrider("text", "x", *model, *arguments)
    assert result.returncode == 1
    assert any(one in result.stderr for one in message.split("|"))
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [["text"], ["text", "x", "--max-new-tokens", "0"], ["text", "x", "--rule-option", "k"], ["assets", "x"]],
)
def test_a_wrong_command_line_is_exit_code_2(outrider: Callable[..., SimpleNamespace], arguments: list[str]) -> None:
    result = outrider(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_prompt_can_come_from_stdin(outrider: Callable[..., SimpleNamespace], folder: str) -> None:
    """The installed command in a process of its own."""
    command = [COMMAND, "text", "-", "--model", folder, "--dtype", "float32", *RAW]
    result = subprocess.run(command, capture_output=True, text=True, check=True, input=PROMPT)
    assert result.stdout == ask(PROMPT, *RAW, model=folder)
    assert outrider("text", "-", "--model", folder, given="").stderr.startswith("outrider: the prompt is empty")


def test_assets_are_listed_as_text_and_json(cache: Path) -> None:
    people = CliRunner().invoke(cli, ["assets"])
    assert people.stdout == CliRunner().invoke(cli, ["assets", "list"]).stdout
    assert all(word in people.stdout for word in [*ASSETS, "Apache-2.0", "sha256", "not fetched"])
    result = CliRunner().invoke(cli, ["assets", "--json"])
    assert result.stdout == CliRunner().invoke(cli, ["assets", "list", "--json"]).stdout
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows] == list(ASSETS)
    assert not any(row["here"] for row in rows)
    assert rows[0]["sources"][1]["files"] == {
        source.name: source.sha256 for source in ASSETS["smollm2-135m"].sources[1].files
    }


def test_fetching_an_unknown_asset_lists_the_known_ones(outrider: Callable[..., SimpleNamespace]) -> None:
    result = outrider("assets", "fetch", "smollm")
    assert result.returncode == 1
    assert (
        result.stderr
        == f"outrider: unknown asset 'smollm'. Did you mean 'smollm2-135m'? Known: {', '.join(sorted(ASSETS))}\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_the_text_without_an_error(folder: str) -> None:
    import signal
    import time

    command = [COMMAND, "text", PROMPT, "--model", folder]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, "--no-chat-template", "--max-new-tokens", "460"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as child:
        assert child.stdout is not None
        child.stdout.read(5)
        child.send_signal(signal.SIGINT)
        time.sleep(0)
        rest, errors = child.communicate(timeout=60)
    assert child.returncode == 0
    assert rest.endswith(b"\n")
    assert errors == b""
