"""Errors that are told before any work: outputs that can't be written, busy ports, unknown recipes, missing extras."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.app.commands.port import check_port
from outrider.core.errors import InvalidOption, install_command


@pytest.mark.parametrize(
    ("command", "output", "words"),
    [
        (["image", "red heart", "-o"], "x.xyz", "must end in .png or .jpg"),
        (["speech", "Hello.", "-o"], "x.mp3", "must end in .wav"),
        (["plot-acceptance", "-o"], "x.txt", "must end in .png or .svg or .pdf"),
        (["text", "hi", "-o"], "file/x.txt", "is no folder"),
        (["text", "hi", "--trace"], ".", "is a folder"),
        (["bench", "text", "--json"], "file/x.json", "is no folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_first(
    command: list[str], output: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    done = CliRunner().invoke(cli, [*command, output], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and words in done.output, done.output


def test_a_busy_port_is_told() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidOption, match=f"port {port} of 127.0.0.1: .*in use; give another --port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    check_port("127.0.0.1", None)


def test_unknown_recipes_are_told_all_recipes() -> None:
    with pytest.raises(InvalidOption, match=r"unknown recipe 'nope'.*eagle3.*image-tokens.*speech-voice"):
        CliRunner().invoke(cli, ["train", "nope"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        ({"url": "file:///home/a%20b", "dir_info": {"editable": True}}, "pip install -e '/home/a b[bench]'"),
        ({"url": "file:///home/x", "dir_info": {}}, "pip install '/home/x[bench]'"),
        (
            {"url": "https://git.example/o.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "pip install 'made-up[bench] @ git+https://git.example/o.git@12ab'",
        ),
        (None, "pip install 'made-up[bench]'"),
    ],
)
def test_missing_extras_are_installed_from_where_this_came_from(
    origin: dict[str, Any] | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "made_up-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n")
    if origin is not None:
        (about / "direct_url.json").write_text(json.dumps(origin))
    built = tmp_path / "checkout" / "made_up.egg-info"
    built.mkdir(parents=True)
    (built / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(built.parent))
    assert install_command("bench", "made-up") == wanted
