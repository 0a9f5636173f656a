"""The inputs that text models supply to drafters: documents, datastores, bigrams; every drafter by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from outrider.core.assets.catalogue import ASSETS
from outrider.core.drafters.lookup.retrieval import Datastore, DatastoreError
from outrider.core.errors import InvalidOption
from outrider.core.kernels import native
from outrider.core.methods import DRAFTERS
from outrider.text import TextModel, bigrams, datastore, load, measurements, recipes
from outrider.text.measurements import MeasuredDefault
from outrider.text.options import Options
from outrider.text.resolve_drafter import resolve_drafter

PROMPT = "the cat sat on the mat and the dog sat on the"
FREE = (
    "jacobi",
    "prompt-lookup",
    "input-guided",
    "anpd",
    "n-grammys",
    "lookahead",
    "suffix",
    "token-recycling",
    "sparse-cache",
    "ensemble",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plain(lm: TextModel) -> list[int]:
    return lm.generate(PROMPT, drafter=None, raw=True, max_new_tokens=48).tokens


@pytest.mark.parametrize("name", FREE)
def test_every_training_free_drafter_runs_by_its_name(lm: TextModel, plain: list[int], name: str) -> None:
    out = lm.generate(PROMPT, drafter=name, raw=True, max_new_tokens=48)
    assert out.tokens == plain and out.trace.method == name
    assert any(step.drafted for step in out.trace.steps)


def test_the_list_of_training_free_drafters_is_complete() -> None:
    assert {*FREE, "rest"} <= {*DRAFTERS}


@pytest.mark.slow
@pytest.mark.parametrize("name", FREE)
def test_a_ragged_batch_gives_the_same_output_as_alone(lm: TextModel, name: str) -> None:
    prompts = [PROMPT, "a quick brown fox", f"{PROMPT} log while the rain fell on the plain"]
    batch = lm.generate(prompts, drafter=name, raw=True, max_new_tokens=40)
    for prompt, out in zip(prompts, batch, strict=True):
        assert out.tokens == lm.generate(prompt, drafter=None, raw=True, max_new_tokens=40).tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", FREE)
def test_long_outputs_equal_plain_decoding(lm: TextModel, name: str) -> None:
    plain, out = (lm.generate(PROMPT, drafter=one, raw=True, max_new_tokens=300) for one in (None, name))
    assert out.tokens == plain.tokens
    assert len(out.trace.steps) < 300 or name == "input-guided"  # the output does not repeat the prompt


def test_rest_takes_a_store_by_its_path(lm: TextModel, plain: list[int], tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(lm.tokens.decode(plain), encoding="utf-8")
    store = datastore.build(lm.tokens, [corpus], progress=False)
    path = tmp_path / "a.store"
    store.save(path)
    for given in (str(path), path, store, [lm.tokens.decode(plain)]):
        out = lm.generate(PROMPT, drafter="rest", raw=True, max_new_tokens=48, drafter_options={"store": given})
        assert out.tokens == plain and any(step.drafted for step in out.trace.steps)


def test_rest_without_a_store_names_the_command(lm: TextModel) -> None:
    with pytest.raises(InvalidOption, match="outrider datastore build"):
        lm.generate(PROMPT, drafter="rest")


def test_missing_weights_name_a_command_for_the_model_s_own_file() -> None:
    said = str(recipes.missing("my models/x.gguf", "eagle3"))
    assert "`outrider train eagle3 --model 'my models/x.gguf'`" in said and "--head" in said


def test_a_store_of_another_tokenizer_raises(lm: TextModel, tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    Datastore.build([[1, 2, 3]], {"tokenizer": "another"}).save(path)
    with pytest.raises(DatastoreError, match="another tokenizer"):
        lm.generate(PROMPT, drafter="rest", drafter_options={"store": path})
    Datastore.build([[1, 2, 100_000]], {"tokenizer": lm.tokens.fingerprint}).save(path)
    with pytest.raises(DatastoreError, match="another model's tokenizer"):
        lm.generate(PROMPT, drafter="rest", drafter_options={"store": path})


def test_long_files_are_tokenised_in_pieces_without_loss(lm: TextModel, tmp_path: Path, capsys: Any) -> None:
    whole = "".join(f"line {number} of many\n" for number in range(8000)) + "x" * 70_000
    path = tmp_path / "long.txt"
    path.write_text(whole, encoding="utf-8")
    store = datastore.build(lm.tokens, [path])
    assert lm.tokens.decode(store.tokens[:-1].tolist()) == whole
    assert "Tokenising" in capsys.readouterr().err


def test_files_without_text_raise(lm: TextModel, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatastoreError, match="UTF-8"):
        datastore.build(lm.tokens, [path], progress=False)
    path.write_text("")
    with pytest.raises(DatastoreError, match="no text"):
        datastore.build(lm.tokens, [path], progress=False)
    with pytest.raises(DatastoreError, match="can't be read"):
        datastore.build(lm.tokens, [tmp_path / "none"], progress=False)


def test_references_can_be_text(lm: TextModel, plain: list[int]) -> None:
    said = lm.tokens.decode(plain)
    for name, options in (
        ("input-guided", {"source": said}),
        ("prompt-lookup", {"references": said}),
        ("prompt-lookup", {"references": ["nothing", said]}),
    ):
        out = lm.generate(PROMPT, drafter=name, raw=True, max_new_tokens=48, drafter_options=options)
        assert out.tokens == plain and len(out.trace.steps) < 24


def test_bigrams_are_computed_once(lm: TextModel, cache: Path) -> None:
    first = bigrams.bigrams(lm)
    (path,) = (cache / "bigrams").iterdir()
    marked = first.clone()
    marked[0] = torch.arange(first.shape[1])
    save_file({"successors": marked.int()}, path)
    assert torch.equal(bigrams.bigrams(lm), marked), "the file is read"
    for damaged in (torch.full_like(first, 10**6), torch.zeros(3, 3), first - 1000):
        save_file({"successors": damaged.int()}, path)
        assert torch.equal(bigrams.bigrams(lm), first)
    save_file({"else": marked}, path)
    assert torch.equal(bigrams.bigrams(lm), first)
    path.write_bytes(b"junk")
    assert torch.equal(bigrams.bigrams(lm), first)


def test_slow_bigrams_are_only_computed_on_request(lm: TextModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigrams, "_SOON", 0)
    for drafter in ("token-recycling", "ensemble"):
        lm.generate("a cat", drafter=drafter, max_new_tokens=2)
    assert not (cache / "bigrams").exists()
    lm.generate("a cat", drafter="token-recycling", drafter_options={"initial_table": "bigrams"}, max_new_tokens=2)
    assert (cache / "bigrams").exists()


def test_recycling_starts_with_bigrams_by_default(lm: TextModel, cache: Path) -> None:
    lm.generate(PROMPT, drafter="token-recycling", max_new_tokens=4, drafter_options={"initial_table": None})
    assert not (cache / "bigrams").exists()
    out = lm.generate("x", drafter="token-recycling", raw=True, max_new_tokens=4)
    assert (cache / "bigrams").exists() and out.trace.steps[0].drafted


def test_members_of_an_ensemble_get_their_inputs(lm: TextModel, plain: list[int]) -> None:
    options = {"drafters": ["n-grammys", "rest"], "options": {"rest": {"store": [lm.tokens.decode(plain)]}}}
    out = lm.generate(PROMPT, drafter="ensemble", raw=True, max_new_tokens=48, drafter_options=options)
    assert out.tokens == plain and len(out.trace.steps) < 40
    with pytest.raises(InvalidOption, match="dictionary"):
        lm.generate(PROMPT, drafter="ensemble", drafter_options={"options": 3})


def test_auto_stands_for_what_was_measured_for_the_target(lm: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    row = MeasuredDefault(drafter="prompt-lookup", options={"length": 3}, measured="in this test")
    monkeypatch.setattr(measurements, "DEFAULTS", {lm.name: row})
    out = lm.generate(PROMPT, raw=True, max_new_tokens=24)
    assert out.trace.method == "prompt-lookup" and max(len(step.drafted) for step in out.trace.steps) <= 3
    monkeypatch.setattr(measurements, "DEFAULTS", {lm.name: replace(row, dtype="int4")})
    assert resolve_drafter(lm, Options()).name == "auto"
    monkeypatch.setattr(measurements, "DEFAULTS", {lm.name: replace(row, dtype=lm.dtype)})
    assert resolve_drafter(lm, Options()).name == "prompt-lookup"
    assert resolve_drafter(lm, Options(), rows=2).name == "auto"
    assert resolve_drafter(lm, Options(), continuous=True).name == "auto"
    out = lm.generate(PROMPT, raw=True, max_new_tokens=4, drafter_options={"max_guesses": 2})
    assert out.trace.method == "auto"


def test_a_published_draft_model_is_used_where_one_is_needed(
    lm: TextModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = MeasuredDefault(draft_model=str(folder))
    monkeypatch.setattr(measurements, "DEFAULTS", {lm.name: row})
    assert {"draft-model", "dynamic-tree", "specexec", "cross-vocabulary"} <= set(lm.drafters.ready)
    out = lm.generate(PROMPT, raw=True, max_new_tokens=16, drafter="draft-model")
    assert out.trace.summary().acceptance_rate == 1  # it is the target itself


def test_auto_drafts_with_the_published_model_once_it_is_here(
    lm: TextModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, asset = MeasuredDefault(draft_model=str(folder), drafter="prompt-lookup", dtype="int4"), Mock(here=True)
    monkeypatch.setattr(measurements, "DEFAULTS", {lm.name: row})
    monkeypatch.setattr(measurements, "ASSETS", {str(folder): asset})
    assert lm.generate(PROMPT, raw=True, max_new_tokens=4).trace.method == "draft-model"
    assert (
        resolve_drafter(lm, Options(), rows=2).name == resolve_drafter(lm, Options(num_draft_tokens=2)).name == "auto"
    )
    asset.here = False
    assert resolve_drafter(lm, Options()).name == "auto"
    monkeypatch.setattr(measurements, "DEFAULTS", {lm.name: replace(row, dtype=None)})
    assert resolve_drafter(lm, Options()).name == "prompt-lookup"


def test_a_draft_model_for_16_bits_has_4_where_kernels_multiply_them(folder: Path) -> None:
    kernels = native.library() is not None
    assert load(folder, dtype="bfloat16").companion(str(folder)).dtype == ("int4" if kernels else "bfloat16")
    assert load(folder, dtype="bfloat16").companion(f"{folder}:int8").dtype == "int8"
    assert load(folder, dtype="float32").companion(str(folder)).dtype == "float32"


def test_published_draft_models_have_the_targets_tokens() -> None:
    """Both are of the catalogue, and their licences are said there."""
    for target, row in measurements.DEFAULTS.items():
        for name in (target, row.draft_model):
            assert name is None or (ASSETS[name].language_model and ASSETS[name].licence)
