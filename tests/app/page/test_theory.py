"""The theory beside a run computes the published formulas, and finds the run's own place on its curves."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("gradio")

from outrider.app.page.theory import Estimate, advice, estimate, theory
from outrider.core.errors import OutriderError

# Gradio leaves event loops open behind it.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def test_the_prediction_is_the_published_formula() -> None:
    assert f"{(1 - 0.8**5) / (1 - 0.8):.2f} tokens per target pass" in theory(0.8, 0.1, 4, 0.0)
    assert f"{(1 - 0.8**5) / (1 - 0.8) / 1.4:.2f} times the speed of plain decoding" in theory(0.8, 0.1, 4, 0.0)
    with pytest.raises(OutriderError):
        theory(2.0, 0.1, 4, 0.0)


def test_a_run_is_estimated_from_its_trace() -> None:
    from outrider.app.page import recordings

    title = next(title for title in recordings.examples() if title.startswith("text a trained"))
    recording = recordings.read(recordings.examples()[title].read_bytes())
    run, summary = estimate(recording), recording.trace.summary()
    assert 0 < run.acceptance < 1 and run.tokens == summary.tokens_per_pass and run.length >= 1
    assert f"your run {run.tokens:.2f}" in theory(run.acceptance, run.cost, 4, run.growth, run)
    assert "Most would be gained by" in advice(run) and "After a run" in advice(estimate(None))
    alone = estimate(replace(recording, plain=None))  # without plain decoding nothing says what checking costs
    assert alone.growth == Estimate.growth and "best" not in advice(alone) and "A race with plain" in advice(alone)
