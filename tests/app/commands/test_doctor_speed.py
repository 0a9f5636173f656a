"""What `doctor --speed` measures and draws, on stand-ins where measuring takes long."""

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


def test_everything_is_measured_and_what_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(device: str, dtype: torch.dtype, seconds: float) -> Machine:
        if dtype == torch.float16:
            raise RuntimeError("no such kernel")
        return Machine(20e9, 100e9, 1e-6, device, str(dtype).split(".")[-1])

    monkeypatch.setattr(core, "measure", stand_in)
    monkeypatch.setattr(doctor_speed, "devices", lambda: ["cpu"])
    told: list[str] = []
    before = torch.get_num_threads()
    found = doctor_speed.measure(told.append, steps=10, vocabulary=512)
    assert [one.dtype for one in found.machines] == ["float32", "bfloat16"]
    assert found.unsupported == ["cpu float16"]
    assert {(one.draft, one.sampling) for one in found.loop} >= {("fixed tree", "T=0"), ("drawn chain", "top-p 0.9")}
    assert torch.get_num_threads() == before
    assert len(told) == 4
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["vocabulary"] == 512


def test_torch_gets_its_threads_back_even_after_an_error() -> None:
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


def test_free_tokens_are_those_that_arithmetic_hides_behind_reading() -> None:
    assert [doctor_speed.free_tokens(one) for one in FOUND.machines] == [
        10,
        20,
    ]  # 5 and 20 operations a byte; 2 a weight


@pytest.mark.parametrize("width", [60, 80, 120])
def test_each_column_is_explained(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    doctor_speed.draw(console, FOUND)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    said = " ".join(text.split())
    for columns in (doctor_speed.READING, doctor_speed.SPENDING):
        for column, words in columns.items():
            assert f"{column}: {words}" in said
    assert "20.0" in said
    assert "mps float16" in said
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_the_doctor_measures_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_speed, "measure", lambda tell: FOUND)
    told = CliRunner().invoke(cli, ["doctor", "--speed"])
    assert told.exit_code == 0
    assert "drawn tree" in told.stdout
    told = CliRunner().invoke(cli, ["doctor", "--speed", "--json"])
    assert json.loads(told.stdout) == FOUND.to_dict()
    assert CliRunner().invoke(cli, ["doctor", "--speed", "--fix"]).exit_code == 2
