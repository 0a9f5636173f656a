"""The batch benchmark: equal outputs and consistent figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.core.bench.runner import Item
from outrider.core.errors import InvalidOption
from outrider.text import TextModel
from outrider.text.bench.batch import compare, median_round


def test_rows_give_the_same_output_as_alone(lm: TextModel) -> None:
    items = [Item("1", "chat", "one two three four five"), Item("2", "chat", "the cat")]
    rounds = list(compare(lm, items, tokens=5, repeat=3))
    assert len(rounds) == 3
    result = median_round(rounds)
    assert result.same == result.rows == 2
    assert sorted(one.ratio for one in rounds)[1] == result.ratio == result.batched_speed / result.serial_speed
    assert 2 <= result.tokens <= 10


def test_one_prompt_raises(lm: TextModel) -> None:
    with pytest.raises(InvalidOption, match="2 prompts"):
        list(compare(lm, [Item("1", "chat", "one")]))


def test_the_command_prints_a_table_or_json(folder: Path) -> None:
    arguments = [
        "bench",
        "batch",
        "--model",
        str(folder),
        "--num-prompts",
        "2",
        "--repeat",
        "1",
        "--max-new-tokens",
        "3",
    ]
    result = CliRunner().invoke(cli, [*arguments, "--dtypes", "float32"])
    assert result.exit_code == 0, result.output
    assert "2 of 2" in result.stdout
    rows = json.loads(CliRunner().invoke(cli, [*arguments, "--dtypes", "int8", "--json", "-"]).stdout)["rows"]
    assert [(row["dtype"], row["drafter"], row["rows"]) for row in rows] == [("int8", "plain", 2)]
