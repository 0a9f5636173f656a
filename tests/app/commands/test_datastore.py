"""`outrider datastore`: built from text files and used by the drafter 'rest'."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.core.errors import OutriderError

TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "text" / "tiny.py")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TINY.write(tmp_path_factory.mktemp("models") / "tiny"))


def outrider(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(one) for one in arguments], catch_exceptions=False)


def test_a_datastore_is_built_listed_and_used(folder: str, tmp_path: Path) -> None:
    corpus, store = tmp_path / "corpus", tmp_path / "my.store"
    corpus.mkdir()
    (corpus / "one.txt").write_text(TINY.TEXT, encoding="utf-8")
    (corpus / "two.md").write_text("# the dog sat on the mat", encoding="utf-8")
    (corpus / "no.bin").write_bytes(b"\xff")
    result = outrider("datastore", "build", corpus, "-o", store, "--model", folder)
    assert result.exit_code == 0 and "of 2 files" in result.stdout
    shown = json.loads(outrider("datastore", "show", store, "--json").stdout)
    assert shown["tokens"] > 20 and shown["bytes"] == store.stat().st_size
    assert "tokens" in outrider("datastore", "show", store).stdout
    arguments = [
        "text",
        "the cat sat on",
        "--no-chat-template",
        "--max-new-tokens",
        "16",
        "--model",
        folder,
        "--dtype",
        "float32",
    ]
    drafted = outrider(*arguments, "--drafter", "rest", "--drafter-option", f"store={store}")
    assert drafted.exit_code == 0 and drafted.stdout == outrider(*arguments, "--drafter", "plain").stdout


def test_errors_have_a_message(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutriderError, match="no files"):
        outrider("datastore", "build", tmp_path / "empty", "-o", tmp_path / "a.store", "--model", folder)
    with pytest.raises(OutriderError, match="is not a folder"):
        outrider("datastore", "build", tmp_path / "x.txt", "-o", tmp_path / "no" / "a.store", "--model", folder)
    (tmp_path / "x.store").write_bytes(b"0123456789")
    with pytest.raises(OutriderError, match="it is a folder; name a file"):
        outrider("datastore", "show", tmp_path)
    with pytest.raises(OutriderError, match="not a datastore"):
        outrider("datastore", "show", tmp_path / "x.store")
