"""The precision benchmark: perplexity against a hand computation, agreement with itself, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from outrider import text
from outrider.app.cli import cli
from outrider.core.bench.runner import Item
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.errors import InvalidOption
from outrider.text import TextModel
from outrider.text.bench.precision import Precision, compare, forced


def test_a_forced_text_is_scored_token_by_token(lm: TextModel) -> None:
    ids = lm.tokens.encode("one two three four five six seven one two", special=False)
    lost, chosen = forced(lm.target(), ids)
    target, wanted, likeliest = lm.target(), 0.0, []
    for place in range(1, len(ids)):
        target.begin([ids[:place]], Sampling(), frozenset())
        logits = target.score(Draft.empty(1)).logits()[0, 0].double()
        wanted -= float(torch.log_softmax(logits, -1)[ids[place]])
        likeliest.append(int(logits.argmax()))
    assert chosen == likeliest
    assert lost == pytest.approx(wanted, rel=1e-5)


def test_fewer_bits_agree_less_and_take_fewer_bytes(folder: Path) -> None:
    models = {dtype: text.load(folder, dtype=dtype) for dtype in ("float32", "bfloat16", "int4")}
    items = [Item("1", "chat", "one two three four five"), Item("2", "chat", "the cat sat on the mat")]
    output = list(compare(models, items, tokens=4))
    rows = [row for row in output if isinstance(row, Precision)]
    assert [row.dtype for row in rows] == list(models)
    assert rows[0].agreement == 1.0
    assert all(0 <= row.agreement <= 1 and math.isfinite(row.perplexity) for row in rows)
    assert rows[0].weight_bytes > rows[1].weight_bytes > rows[2].weight_bytes
    assert all(0 < row.slowest <= row.tokens_per_second <= row.fastest for row in rows)
    assert any("reading" in line for line in output if isinstance(line, str))


def test_a_missing_reference_raises(folder: Path) -> None:
    with pytest.raises(InvalidOption, match="float32"):
        list(compare({"int4": text.load(folder, dtype="int4")}, [Item("1", "chat", "one two")]))


def test_the_command_prints_a_table_and_writes_json(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "one two three"}) + "\n")
    arguments = ["bench", "precision", "--model", str(folder), "--prompts", str(prompts), "--max-new-tokens", "3"]
    result = CliRunner().invoke(cli, [*arguments, "--dtypes", "int8", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert "int8" in result.stdout
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "int8"]
