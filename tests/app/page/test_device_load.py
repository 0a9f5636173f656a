"""The chip of the page: device, precision, and how busy the machine is."""

from __future__ import annotations

import pytest

from outrider.app.page import device_load


@pytest.mark.parametrize(
    ("load", "said"),
    [(0.3, "quiet"), (1.4, ""), (2.0, ""), (2.6, "CPU busy: timings unreliable")],
)
def test_the_chip_says_device_precision_and_load(monkeypatch: pytest.MonkeyPatch, load: float, said: str) -> None:
    monkeypatch.setattr(device_load.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(device_load, "load_average", lambda: load)
    shown = device_load.chip("cpu", "bfloat16")
    state = f" · {said}" if said else ""
    assert f"cpu · bfloat16{state} · load {load} of 2 cores" in shown  # a phone cuts the end
    assert [word for word in ("quiet", "CPU busy: timings unreliable") if word in shown] == [said] * bool(said)
    assert ("or-busy" in shown) == ("busy" in said)
