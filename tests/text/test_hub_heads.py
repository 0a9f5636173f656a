"""Published draft heads by name: a local mirror of the hub serves a small target and heads, and the documented commands
run on them."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider import text
from outrider.app.cli import cli
from outrider.app.page.app import backends
from outrider.app.page.backends.interface import ModelSpec, checked, selectable_drafters
from outrider.core.assets.store import AssetError
from outrider.core.drafters.trained.export_checkpoints import write_speculators
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.text import recipes

mirror = runpy.run_path(str(Path(__file__).with_name("hub_mirror.py")))["mirror"]

PROMPT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def hub(tiny: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str], Path]]:
    """The address, requests and root of a mirror with a target and its EAGLE-3 head, as safetensors and as a pickle."""
    root = tmp_path_factory.mktemp("hub")
    folder = tiny.write(root / "someone" / "tiny")
    target = text.load(folder, dtype="float32").target()
    assert isinstance(target, Decoder)
    torch.manual_seed(0)
    taps = ("layer.0", "layer.1", "layer.1")
    head = recipes.RECIPES["eagle3"].make(target, torch.arange(0, 300, 2), lora=0, taps=taps)
    write_speculators(head, root / "someone" / "tiny-eagle3", "someone/tiny", length=3)
    pickled(root / "someone" / "tiny-eagle3", root / "someone" / "tiny-eagle3-bin")
    with mirror(root) as (address, requests):
        yield address, requests, root


def pickled(source: Path, folder: Path) -> None:
    """The same head as older heads were published: config.json and pytorch_model.bin."""
    from safetensors.torch import load_file

    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    torch.save(load_file(source / "model.safetensors"), folder / "pytorch_model.bin")


@pytest.fixture
def online(hub: tuple[str, list[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Path]:
    """Use the mirror in this process, with a cache of its own."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub[0])
    monkeypatch.setattr(constants, "ENDPOINT", hub[0])
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    return hub[1], hub[2]


@pytest.mark.parametrize("head", ["someone/tiny-eagle3", "someone/tiny-eagle3-bin"])
def test_python_takes_a_head_by_its_hub_id(head: str, online: tuple[list[str], Path]) -> None:
    lm = text.load("someone/tiny", dtype="float32")
    plain = lm.generate(PROMPT, drafter=None, max_new_tokens=12)
    options: list[dict[str, Any]] = [
        {"drafter": "eagle3", "head": head},
        {"drafter": "eagle3", "drafter_options": {"head": head}},
        {"head": head, "drafter_options": {"costs": "1:10 2:10 32:10"}},
    ]
    for given in options:
        out = lm.generate(PROMPT, max_new_tokens=12, **given)
        assert out.tokens == plain.tokens and any(step.drafted for step in out.trace.steps)
        assert out.trace.method.startswith("eagle3" if "drafter" in given else "auto")
    assert out.trace.options["head"] == head
    assert any(request.startswith(f"GET {head}/resolve/") for request in online[0])


def test_a_model_keeps_the_head_it_was_loaded_with(online: tuple[list[str], Path]) -> None:
    lm = text.load("someone/tiny", dtype="float32", head="someone/tiny-eagle3")
    plain = lm.generate(PROMPT, drafter=None, max_new_tokens=12)
    for drafter in ("auto", "eagle3"):
        out = lm.generate(PROMPT, drafter=drafter, max_new_tokens=12)
        assert out.tokens == plain.tokens and out.trace.method.startswith(drafter)
    assert lm.drafters["eagle3"].ready and not lm.drafters["medusa"].ready
    assert lm.generate(PROMPT, drafter="prompt-lookup", max_new_tokens=12).trace.method.startswith("prompt-lookup")
    with pytest.raises(AssetError, match="'someone/nothing' could not be downloaded"):
        text.load("someone/tiny", dtype="float32", head="someone/nothing")


def test_the_page_runs_a_model_and_its_head(online: tuple[list[str], Path]) -> None:
    spec = ModelSpec(model="someone/tiny", options={"head": "someone/tiny-eagle3"})
    backend = backends(dtype="float32", text=spec)["text"]
    assert "eagle3" in selectable_drafters(backend) and "medusa" not in selectable_drafters(backend)
    found = {}
    for drafter in ("plain", "auto", "eagle3"):
        run = backend.begin(checked(backend, {"prompt": PROMPT, "drafter": drafter, "max_new_tokens": 12}))
        assert [*run]
        found[drafter] = run.recording().trace
    assert {*map(str, (trace.tokens() for trace in found.values()))} == {str(found["plain"].tokens())}
    assert found["eagle3"].method.startswith("eagle3") and found["auto"].method.startswith("auto")


def test_a_head_is_refused_in_one_line(online: tuple[list[str], Path]) -> None:
    lm = text.load("someone/tiny", dtype="float32")
    head = "someone/tiny-eagle3"
    with pytest.raises(Incompatible, match="the drafter 'medusa' can't use; choose eagle3"):
        lm.generate(PROMPT, drafter="medusa", head=head)
    with pytest.raises(InvalidOption, match="'prompt-lookup' takes no draft head"):
        lm.generate(PROMPT, drafter="prompt-lookup", head=head)
    with pytest.raises(InvalidOption, match="head is given twice"):
        lm.generate(PROMPT, drafter="eagle3", head=head, drafter_options={"head": head})
    with pytest.raises(InvalidOption, match="head goes with a drafter's name"):
        lm.generate(PROMPT, drafter=None, head=head)
    with pytest.raises(InvalidOption, match=r"no file nowhere; give a file .* hub id"):
        lm.generate(PROMPT, drafter="eagle3", head="nowhere")
    with pytest.raises(AssetError, match="'someone/nothing' could not be downloaded"):
        lm.generate(PROMPT, drafter="eagle3", head="someone/nothing")
    with pytest.raises(InvalidOption, match="head is a int, which no drafter runs"):
        lm.generate(PROMPT, head=3)


def test_the_command_takes_a_head(online: tuple[list[str], Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = ["text", PROMPT, "--model", "someone/tiny", "--dtype", "float32", "--max-new-tokens", "8"]
    arguments += ["--trace", str(trace)]
    doors = [
        ("eagle3", ["--drafter", "eagle3", "--head", "someone/tiny-eagle3"]),
        ("eagle3", ["--drafter", "eagle3", "--drafter-option", "head=someone/tiny-eagle3"]),
        ("auto", ["--head", "someone/tiny-eagle3-bin"]),
    ]
    for method, door in doors:
        done = CliRunner().invoke(cli, [*arguments, *door], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert json.loads(trace.read_text())["method"].startswith(method)


def test_a_target_is_its_own_head(online: tuple[list[str], Path], tiny: SimpleNamespace, tmp_path: Path) -> None:
    """The MTP layer of a checkpoint that transformers' class reads without it."""
    make = runpy.run_path(str(Path(__file__).with_name("test_heads_on_transformers.py")))["written"]
    make(online[1] / "someone" / "glm", "Glm4Moe", tiny, copies=True)
    trace = tmp_path / "trace.json"
    command = ["text", PROMPT, "--model", "someone/glm", "--head", "someone/glm", "--dtype", "float32"]
    done = CliRunner().invoke(cli, [*command, "--max-new-tokens", "8", "--trace", str(trace)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(trace.read_text())
    assert found["method"].startswith("mtp") and any(step["drafted"] for step in found["steps"])


@pytest.mark.slow
def test_the_documented_text_command_runs_from_a_mirror(hub: tuple[str, list[str], Path], tmp_path: Path) -> None:
    """In a process of its own that knows the mirror by HF_ENDPOINT."""
    environment = {**os.environ, "HF_ENDPOINT": hub[0], "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    command = ["text", PROMPT, "--model", "someone/tiny", "--drafter", "eagle3", "--head", "someone/tiny-eagle3"]
    done = subprocess.run(
        [sys.executable, "-m", "outrider.app.cli", *command, "--compare", "--max-new-tokens", "16"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "eagle3" in done.stderr and "the same tokens as plain decoding" in done.stderr


@pytest.mark.slow
def test_the_documented_bench_command_runs_from_a_mirror(
    online: tuple[list[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside transformers, which needs no installation."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    file = tmp_path / "report.json"
    command = ["bench", "text", "--model", "someone/tiny", "--drafters", "eagle3", "--head", "someone/tiny-eagle3"]
    command += ["--peers", "transformers", "--num-prompts", "1", "--max-new-tokens", "8", "--json", str(file)]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["settings"]["head"] == "someone/tiny-eagle3" and not report["skipped"]
    assert [row["drafter"] for row in report["rows"]] == ["plain", "eagle3"]
    assert {row["engine"] for row in report["peers"]} == {"transformers"}
