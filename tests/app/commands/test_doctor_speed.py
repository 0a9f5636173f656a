"""`outrider doctor --speed`: measurements and their table, with fakes for slow measurements."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.app.commands import doctor_speed
from outrider.app.commands.doctor_speed import Speed
from outrider.app.commands.threads import threads
from outrider.core.bench.overhead import Overhead
from outrider.core.cost import theory as core
from outrider.core.cost.theory import Machine

FOUND = Speed(
    machines=[Machine(20e9, 100e9, 1.5e-6, "cpu", "float32"), Machine(20e9, 400e9, 2e-6, "cpu", "bfloat16")],
    unsupported=["mps float16"],
    threads=2,
    vocabulary=49_152,
    loop=[Overhead("drawn tree", "T=1", 6.5, 0.4, 4.2, 3.9, 2.5)],
)


def test_everything_is_measured_or_listed_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(device: str, dtype: torch.dtype, seconds: float) -> Machine:
        if dtype == torch.float16:
            raise RuntimeError("no such kernel")
        return Machine(20e9, 100e9, 1e-6, device, str(dtype).split(".")[-1])

    monkeypatch.setattr(core, "measure", stand_in)
    monkeypatch.setattr(doctor_speed, "devices", lambda: ["cpu"])
    messages: list[str] = []
    before = torch.get_num_threads()
    found = doctor_speed.measure(messages.append, steps=10, vocabulary=512)
    assert [one.dtype for one in found.machines] == ["float32", "bfloat16"]
    assert found.unsupported == ["cpu float16"]
    assert {(one.draft, one.sampling) for one in found.loop} >= {("fixed tree", "T=0"), ("drawn chain", "top-p 0.9")}
    assert torch.get_num_threads() == before
    assert len(messages) == 4
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["vocabulary"] == 512


def test_torch_s_threads_are_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def fail() -> None:
        with threads(before + 1):
            seen.append(torch.get_num_threads())
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_free_tokens_are_those_whose_arithmetic_takes_no_longer_than_reading_the_weights() -> None:
    assert [doctor_speed.free_tokens(one) for one in FOUND.machines] == [
        10,
        20,
    ]  # 5 and 20 operations a byte; 2 a weight


@pytest.mark.parametrize("width", [60, 80, 120])
def test_each_column_is_explained(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    doctor_speed.draw(console, FOUND)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    message = " ".join(text.split())
    for columns in (doctor_speed.READING, doctor_speed.SPENDING):
        for column, words in columns.items():
            assert f"{column}: {words}" in message
    assert "20.0" in message
    assert "mps float16" in message
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_doctor_speed_prints_a_table_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_speed, "measure", lambda tell: FOUND)
    result = CliRunner().invoke(cli, ["doctor", "--speed"])
    assert result.exit_code == 0
    assert "drawn tree" in result.stdout
    result = CliRunner().invoke(cli, ["doctor", "--speed", "--json"])
    assert json.loads(result.stdout) == FOUND.to_dict()
    assert CliRunner().invoke(cli, ["doctor", "--speed", "--fix"]).exit_code == 2
