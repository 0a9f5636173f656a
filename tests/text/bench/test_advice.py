"""What `outrider advise` measures of a text model."""

from __future__ import annotations

import pytest

from outrider.core.bench.runner import Item
from outrider.text import TextModel
from outrider.text.bench import advice


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 9), (float("inf"), 36)], ids=["slow", "fast"])
def test_costs_are_measured_several_times_where_that_is_quick(
    lm: TextModel, monkeypatch: pytest.MonkeyPatch, seconds: float, lines: int
) -> None:
    monkeypatch.setattr(advice, "_RUNS_SECONDS", seconds)
    costs = advice.Study(lm, [Item("one", "chat", "one two three")], tokens=8, longest=1).rounds()
    assert costs.samples.shape == (lines, len(costs.shapes)) and (costs.samples > 0).all()
