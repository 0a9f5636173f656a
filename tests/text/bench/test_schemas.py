"""The measurement of many schemas: its statuses, that it goes on where it stopped, and that its checks can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.core.errors import InvalidOption
from outrider.text import TextModel
from outrider.text.bench import schemas

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

SCHEMAS = {
    "valid": {"enum": [{"cats": [1, 2]}, {"dogs": None}]},
    "refused": {"type": "array", "uniqueItems": True},
    "cut": {"type": "string", "minLength": 200},
}


@pytest.fixture
def folder_of_schemas(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, schema in SCHEMAS.items():
        (folder / f"{name}.json").write_text(json.dumps(schema))
    return folder


def test_each_schema_has_its_status_and_is_decoded_once(lm: TextModel, folder_of_schemas: Path, tmp_path: Path) -> None:
    files, kept = schemas.sample(folder_of_schemas, 9, seed=0), tmp_path / "kept.jsonl"
    drafters = ["prompt-lookup"]
    first = list(schemas.measure(lm, files[:2], folder_of_schemas, drafters, 60, 0, kept))
    with patch.object(schemas, "_outcomes", wraps=schemas._outcomes) as decoded:
        found = list(schemas.measure(lm, files, folder_of_schemas, drafters, 60, 0, kept))
    third = str(files[2].relative_to(folder_of_schemas))
    assert [list(call.args[1]) for call in decoded.call_args_list] == [[third], [third]], "a greedy and a sampled text"
    assert {(Path(one.schema).stem, one.setting): one.status for one in found} == {
        (name, setting): name for name in SCHEMAS for setting in ("greedy", "gumbel-match")
    }
    assert [replace(one, different=()) for one in found[:4]] == [replace(one, different=()) for one in first]
    counts = schemas.summary(found)["greedy"]
    assert (counts["valid"], counts["refused"], counts["cut"], counts["invalid"]) == (1, 1, 1, 0)
    assert counts["different_from_plain"] == 0 and counts["tokens_per_pass"]["prompt-lookup"] > 1
    short = list(schemas.measure(lm, files[:2], folder_of_schemas, drafters, 60, 0, kept, 1))
    passes = [[one.passes.get("prompt-lookup", 0) for one in some] for some in (short, first)]
    assert sum(passes[0]) > sum(passes[1]), "drafts of one token, decoded anew"


def test_an_output_that_is_wrong_is_found(lm: TextModel) -> None:
    result = lm.generate(
        "a cat", response_format={"type": "json_schema", "schema": SCHEMAS["valid"]}, max_new_tokens=60
    )
    assert schemas._status(result, SCHEMAS["valid"]) == ("valid", "")
    for text, why in (("{", "Expecting"), ('{"cats": [1]}', "is not one of")):
        status, detail = schemas._status(replace(result, text=text), SCHEMAS["valid"])
        assert status == "invalid" and why in detail


def test_the_command_reports_counts(folder: Path, folder_of_schemas: Path, tmp_path: Path) -> None:
    options = ["--model", str(folder), "--max-new-tokens", "40", "--drafters", "prompt-lookup", "--json", "-"]
    run = CliRunner().invoke(cli, ["bench", "schemas", str(folder_of_schemas), "--kept", str(tmp_path / "k"), *options])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["rows"]["greedy"]["schemas"] == 3


def test_a_folder_without_schemas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="has no"):
        schemas.sample(tmp_path, 1, 0)
