"""Fetching: once, whole, and nothing half-written ever stays; and opening what was fetched runs nobody's code."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.core.assets.sources import Hub, Index, SourceError
from outrider.core.assets.store import (
    ASSETS,
    Asset,
    AssetError,
    Checkpoint,
    convert_pickle,
    extract_zip,
    fetch,
    read_json,
)
from outrider.core.errors import InvalidOption
from tests.core.assets.given import DATA, Given, held, pinned, table

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.usefixtures("cache")


def test_what_was_fetched_is_not_fetched_again(cache: Path) -> None:
    asked: list[int] = []
    things = table(Given(pinned(), asked=asked))
    assert fetch("thing", table=things) == fetch("thing", table=things) == cache / "thing"
    assert (cache / "thing" / "a.bin").read_bytes() == DATA
    assert len(asked) == 1
    (cache / "thing" / "a.bin").write_bytes(DATA[:10])
    fetch("thing", table=things)
    assert len(asked) == 2, "a file that was cut short since is not taken for whole"


def test_the_next_source_is_tried_and_all_are_named_when_none_works(cache: Path) -> None:
    broken = Given(pinned(), stops=SourceError)
    assert fetch("thing", table=table(broken, Given(pinned()))).is_dir()
    other = {"other": Asset("other", "", "MIT", "", (broken, broken))}
    with pytest.raises(AssetError, match=r"other could not be fetched. somewhere: the line broke. somewhere:"):
        fetch("other", table=other)
    assert held(cache) == ["thing/a.bin"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError, OSError])
def test_whatever_breaks_it_leaves_nothing(stop: type[BaseException], cache: Path) -> None:
    with pytest.raises((stop, AssetError)):
        fetch("thing", table=table(Given(pinned(), stops=stop)))
    assert held(cache) == []
    assert not (cache / "thing").exists()


def test_what_a_killed_process_left_is_cleared(cache: Path) -> None:
    (cache / "thing.partial").mkdir(parents=True)
    (cache / "thing.partial" / "half").write_bytes(b"x")
    fetch("thing", table=table(Given(pinned())))
    assert held(cache) == ["thing/a.bin"]


def test_two_at_once_fetch_once(cache: Path) -> None:
    asked: list[int] = []
    things = table(Given(pinned(), asked=asked))
    both = [threading.Thread(target=fetch, args=("thing",), kwargs={"table": things}) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(asked) == 1


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InvalidOption, match=r"unknown asset 'smollm'\. Did you mean 'smollm2-135m'\?"):
        fetch("smollm")


def test_a_cache_that_cannot_be_written_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(AssetError, match="set OUTRIDER_CACHE"):
        fetch("thing", table=table(Given(pinned())))


@pytest.mark.parametrize("asset", ASSETS.values(), ids=lambda asset: asset.name)
def test_every_asset_is_pinned_and_says_whose_it_is(asset: Asset) -> None:
    assert asset.licence
    assert asset.origin
    assert asset.sources
    for source in asset.sources:
        assert source.files
        for file in source.files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            assert file.size > 0
            assert Path(file.name).name == file.name
        if isinstance(source, Hub):
            assert re.fullmatch("[0-9a-f]{40}", source.revision)
        if isinstance(source, Index):
            assert all("==" in package for package, _ in source.parts)


def test_a_pickle_of_tensors_is_converted_once(cache: Path, tmp_path: Path) -> None:
    good, evil = tmp_path / "good.pt", tmp_path / "evil.pt"
    torch.save({"generator": {"a.weight": torch.arange(4.0)}, "steps": 3}, good)
    torch.save({"a": Path("runs code when it is opened")}, evil)
    for path, name in ((good, "thing"), (evil, "worse")):
        rows = {name: Asset(name, "", "", "", (Given(pinned("a.pt", path.read_bytes()), path.read_bytes()),))}
        if path is evil:
            with pytest.raises(AssetError, match="more than weights"):
                convert_pickle(name, table=rows)
            continue
        found = convert_pickle(name, table=rows)
        assert torch.equal(Checkpoint(found)["generator.a.weight"], torch.arange(4.0)) and len(Checkpoint(found)) == 1
        before = found.stat().st_mtime_ns
        assert convert_pickle(name, table=rows).stat().st_mtime_ns == before
    with pytest.raises(InvalidOption, match="asset"):
        convert_pickle("nothing", table=rows)
    assert not [one for one in held(cache) if "worse-" in one]


def test_a_zip_gives_up_its_model_and_nothing_else(cache: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in ("config.json", "model.safetensors", "run.py", "deeper/config.json", "../model.safetensors"):
            archive.writestr(name, name)
    rows = {"thing": Asset("thing", "", "", "", (Given(pinned("a.zip", data.getvalue()), data.getvalue()),))}
    folder = extract_zip("thing", table=rows)
    assert {one.name: one.read_text() for one in folder.iterdir() if one.name[0] != "."} == {
        name: name for name in ("config.json", "model.safetensors")
    }
    assert extract_zip("thing", table=rows) == folder
    with pytest.raises(InvalidOption, match="asset"):
        extract_zip("nothing", table=rows)


# Opening


def test_tensors_are_read_from_one_file_or_several(tmp_path: Path) -> None:
    whole = {name: torch.full((2, 2), float(number)) for number, name in enumerate("abc")}
    save_file(whole, tmp_path / "model.safetensors")
    found = Checkpoint(tmp_path)
    assert len(found) == 3
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert found.get("d") is None
    (tmp_path / "parts").mkdir()
    save_file({"a": whole["a"]}, tmp_path / "parts" / "one.safetensors")
    save_file({"b": whole["b"], "c": whole["c"]}, tmp_path / "parts" / "two.safetensors")
    where = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert sorted(Checkpoint(tmp_path / "parts")) == ["a", "b", "c"]


def _pickled(folder: Path) -> None:
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")


def _truncated(folder: Path) -> None:
    save_file({"a": torch.zeros(100)}, folder / "model.safetensors")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])


def _index(names: object) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names})) and None
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "holds no safetensors"),
        (_pickled, "pickled weights only"),
        (_truncated, "not a whole safetensors file"),
        (_index({"a": "gone.safetensors"}), "not beside it: gone.safetensors"),
        (_index({"a": "../../etc/passwd"}), "not beside it"),
        (_index({}), "not beside it"),
        (_index(["a.safetensors"]), "no weight_map"),
        (_index("a.safetensors"), "no weight_map"),
        (_index(None), "no weight_map"),
        (_index({"a": 3}), "no weight_map"),
        (lambda folder: os.mkfifo(folder / "model.safetensors"), "holds no safetensors"),
    ],
)
def test_what_are_no_weights_is_said(make: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(AssetError, match=said):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a list"),
        ("[" * 100_000, "is not JSON"),
        ('{"auto_map": {"AutoModel": "evil--modeling.Evil"}}', "code of its own"),
    ],
)
def test_a_config_that_is_none_or_names_code_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(AssetError, match=said):
        read_json(tmp_path / "config.json")


@pytest.mark.slow
def test_nothing_else_unpickles_or_runs_code_of_others() -> None:
    for folder in ("core", "modalities", "app"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                    assert isinstance(node.value, ast.Constant), path
                    assert node.value.value is False, path
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [one.name for one in node.names] + [getattr(node, "module", "") or ""]
                    assert not {"pickle", "dill", "joblib"} & set(names), path
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
                    safe = "weights_only=True" if ast.unparse(node.func) == "torch.load" else "allow_pickle=False"
                    assert safe in [f"{one.arg}={ast.unparse(one.value)}" for one in node.keywords], path
