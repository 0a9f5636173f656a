"""Writing is whole or leaves nothing; a full disk is one sentence; damaged conversions are made again."""

from __future__ import annotations

import errno
import os
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.core.assets import files
from outrider.core.assets.files import AssetError, read_json, replacing, write_atomically, write_tensors, writing
from outrider.core.assets.store import Checkpoint, convert_gguf, convert_pickle
from tests.core.assets.given import Given, full_disk, held, pinned, table

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_tensors(path, {"a": torch.zeros(50_000)}),
        lambda path: write_atomically(path, "x" * 200_000),
        lambda path: _saved_by_torch(path),
    ],
)
def test_a_full_disk_is_named_and_leaves_the_old_file(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with full_disk(100_000), pytest.raises(AssetError, match=r"can't be written: the disk is full .*free some space"):
        write(path)
    assert held(tmp_path) == ["file"] and path.read_text() == "old"


def _saved_by_torch(path: Path) -> None:
    with replacing(path) as temporary:
        torch.save({"a": torch.zeros(50_000)}, temporary)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"Read-only file system\); choose another folder"), writing(tmp_path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    with pytest.raises(ValueError, match="other"), writing(tmp_path):
        raise ValueError("other errors are not touched")


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json.123.partial").write_text("{")
    write_atomically(tmp_path / "a.json", "{}")
    assert held(tmp_path) == ["a.json", "a.json.123.partial"], "its writer may still be at work"
    monkeypatch.setattr(files, "_STALE", -1)
    write_atomically(tmp_path / "a.json", "{}")
    assert held(tmp_path) == ["a.json"]


def test_a_config_that_is_no_file_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(AssetError, match="not a regular file"):
        read_json(tmp_path / "fifo.json")
    monkeypatch.setattr(files, "_MAX_JSON", 3)
    (tmp_path / "large.json").write_text("[1, 2]")
    with pytest.raises(AssetError, match="6 bytes; a config has at most 3"):
        read_json(tmp_path / "large.json")


def _gguf(folder: Path) -> Path:
    path: Path = runpy.run_path(str(HERE / "test_gguf.py"))["write"](folder / "m.gguf")
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("size", [0, 10, None])
def test_a_converted_model_that_is_cut_is_converted_again(cache: Path, tmp_path: Path, name: str, size: int) -> None:
    path = _gguf(tmp_path)
    folder = convert_gguf(path)
    whole = (folder / name).read_bytes()
    if size is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(whole[:size])
    assert convert_gguf(path) == folder
    assert (folder / name).read_bytes() == whole and len(Checkpoint(folder))


def test_a_pickle_converted_in_part_is_converted_again(cache: Path, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4.0)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    rows = table(Given(pinned("a.pt", data), data))
    path = convert_pickle("thing", table=rows)
    path.write_bytes(path.read_bytes()[:-3])
    assert torch.equal(Checkpoint(convert_pickle("thing", table=rows))["a"], torch.arange(4.0))


def test_a_full_disk_while_converting_is_named_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    path = _gguf(tmp_path)
    with full_disk(20_000), pytest.raises(AssetError, match="the disk is full"):
        convert_gguf(path)
    assert held(cache) == []
    assert len(Checkpoint(convert_gguf(path)))
