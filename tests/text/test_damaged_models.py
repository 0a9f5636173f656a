"""Damaged and unusual files of models and draft heads end in one plain sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import text
from outrider.core.assets.store import AssetError
from outrider.core.engine.loading.folder import LoadError
from outrider.core.errors import Incompatible, OutriderError
from outrider.core.training.checkpoint import DraftHeadError, save
from outrider.core.training.optim import TrainingError
from outrider.text import TextModel
from outrider.text.recipes import recipe
from outrider.text.training.run import TrainingRequest, _vocabulary
from tests.core.assets.given import full_disk, held

PLAIN: dict[str, Any] = {"drafter": None, "max_new_tokens": 2}


def changed(folder: Path, name: str, **values: Any) -> Path:
    path = folder / name
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(known | values), encoding="utf-8")
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["num_attention_heads", "vocab_size", "hidden_size", "intermediate_size"])
def test_a_null_that_the_config_needs_is_named(copy: Path, name: str) -> None:
    with pytest.raises(OutriderError, match=name):
        text.load(changed(copy, "config.json", **{name: None}))


def test_a_null_that_has_a_default_takes_it(copy: Path, lm: TextModel) -> None:
    changed(copy, "config.json", rms_norm_eps=None, rope_theta=None)
    absent = text.load(copy, dtype="float32").generate("ab", **PLAIN).tokens
    described = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({name: value for name, value in described.items() if value is not None})
    )
    assert absent == text.load(copy, dtype="float32").generate("ab", **PLAIN).tokens


@pytest.mark.parametrize("given", [[], "x", None, 3, {"a": 1}, {"a": None}, {"a": ["x"]}, {}, {"a": "../x"}])
def test_a_weight_map_of_another_type_is_refused(copy: Path, given: Any) -> None:
    with pytest.raises(AssetError, match=r"no weight_map from tensors to files|names files that are not beside it"):
        text.load(changed(copy, "model.safetensors.index.json", weight_map=given))


@pytest.mark.parametrize("name", ["x", ["x"], {}, None, 3])
def test_a_list_of_odd_chat_templates_is_passed_over(copy: Path, name: Any) -> None:
    odd = ["odd", None, {}, [], {"name": name, "template": "y"}]
    assert text.load(changed(copy, "tokenizer_config.json", chat_template=odd)).tokens.template is None
    odd.append({"name": "default", "template": "{{ messages[0].content }}"})
    lm = text.load(changed(copy, "tokenizer_config.json", chat_template=odd))
    assert lm.tokens.render([{"role": "user", "content": "hello"}]) == "hello"


def test_pipes_in_place_of_files_are_not_opened(copy: Path) -> None:
    for name, message in (
        ("model.safetensors", "no safetensors file"),
        ("config.json", "no config.json"),
        ("tokenizer.json", "has no tokenizer|no fast version"),
        ("model.safetensors.index.json", None),
        ("chat_template.jinja", None),
        ("generation_config.json", None),
    ):
        kept = (copy / name).read_bytes() if (copy / name).is_file() else None
        (copy / name).unlink(missing_ok=True)
        os.mkfifo(copy / name)
        if message is None:
            text.load(copy)
        else:
            with pytest.raises((AssetError, LoadError, OutriderError), match=message):
                text.load(copy)
        (copy / name).unlink()
        if kept is not None:
            (copy / name).write_bytes(kept)


# ---- draft heads


@pytest.fixture
def made(lm: TextModel, tmp_path: Path) -> Callable[..., Path]:
    """A file of a recipe's draft head with changes of its configuration."""

    def write(name: str, **config: Any) -> Path:
        path = tmp_path / f"{name}.safetensors"
        head: Any = recipe(name).make(lm.target(), None)  # type: ignore[arg-type]
        save(head, path, {})
        data = json.loads(path.with_suffix(".json").read_text())
        path.with_suffix(".json").write_text(json.dumps(data | {"config": data["config"] | config}))
        return path

    return write


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *(("dflash", "block", value) for value in (None, True, "x", [], {}, 1.5, 0, -1, 200, 1 << 19, float("nan"))),
        ("dflash", "block_offset", "x"),
        ("ctc", "length", 1.5),
        ("layer-skip", "exit", 1.5),
        ("mtp", "modules", True),
        ("medusa", "layers", 1 << 19),
        ("medusa", "heads", 10_000),
        ("eagle", "form", {"heads": 1 << 30}),
        ("eagle", "form", {"norm_eps": "x"}),
        ("eagle", "surprise", 1),
    ],
)
def test_a_wrong_configuration_of_a_head_is_refused(
    lm: TextModel, made: Callable[..., Path], name: str, option: str, value: Any
) -> None:
    path = made(name, **{option: value})
    if value == 200:  # a longer block than it was trained for is another draft, not a damaged file
        assert lm.generate("ab", max_new_tokens=2, drafter=name, head=str(path)).tokens
        return
    with pytest.raises(OutriderError) as caught:
        lm.generate("ab", max_new_tokens=2, drafter=name, head=str(path))
    assert "\n" not in str(caught.value) and type(caught.value) is not OutriderError


def test_what_a_file_cannot_hold_is_not_made(
    lm: TextModel, made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.core.training import checkpoint

    monkeypatch.setattr(checkpoint, "_FEW_WEIGHTS", 0)
    path = made("medusa", layers=200)
    with pytest.raises(DraftHeadError, match="many times the weights"):
        lm.generate("ab", max_new_tokens=2, drafter="medusa", head=str(path))


@pytest.mark.parametrize("drafter", ["draft-model", "specinfer", "sequoia", "pearl"])
@pytest.mark.parametrize("kind", ["specdec-plus-plus", "medusa"])
def test_a_head_given_as_a_draft_model_is_refused(
    lm: TextModel, made: Callable[..., Path], drafter: str, kind: str
) -> None:
    path = str(made(kind))
    with pytest.raises(Incompatible, match="the drafter 'draft-model' can't use; choose"):
        lm.generate("ab", max_new_tokens=2, drafter=drafter, draft_model=path)
    with pytest.raises(Incompatible, match="the drafter 'draft-model' can't use"):
        lm.generate("ab", max_new_tokens=2, drafter=drafter, drafter_options={"model": path})


def test_a_head_of_another_drafter_is_refused(lm: TextModel, made: Callable[..., Path]) -> None:
    with pytest.raises(Incompatible, match="holds a MedusaHeads, which the drafter 'eagle3' can't use; choose medusa"):
        lm.generate("ab", max_new_tokens=2, drafter="eagle3", head=str(made("medusa")))


def test_a_full_disk_keeps_the_weights_that_were_there(lm: TextModel, made: Callable[..., Path]) -> None:
    path = made("medusa")
    before, target = path.read_bytes(), lm.target()
    with full_disk(2_000), pytest.raises(AssetError, match="the disk is full"):
        save(recipe("medusa").make(target, None), path, {})  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert held(path.parent) == ["medusa.json", "medusa.safetensors"]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{}", b"null", b"[]", b'["a"]', b"[1.5]", b"[-1]", b"[300]", b"[1,1]", b"[[1]]", b"\xff"]
)
def test_a_damaged_reduced_vocabulary_is_named(lm: TextModel, tmp_path: Path, data: bytes) -> None:
    request = TrainingRequest(recipes=("medusa",), draft_vocab_size=3)
    (tmp_path / "vocabulary.json").write_bytes(data)
    with pytest.raises(TrainingError, match=r"vocabulary.json is damaged; give --no-resume"):
        _vocabulary(request, [], lm.target(), tmp_path)  # type: ignore[arg-type]
    (tmp_path / "vocabulary.json").write_bytes(b"[1, 5, 9]")
    kept = _vocabulary(request, [], lm.target(), tmp_path)  # type: ignore[arg-type]
    assert kept is not None and torch.equal(kept, torch.tensor([1, 5, 9]))
