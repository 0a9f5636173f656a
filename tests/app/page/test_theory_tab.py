"""The Theory tab computes the published formulas."""

from __future__ import annotations

import pytest

pytest.importorskip("gradio")

from outrider.app.page.theory_tab import theory
from outrider.core.errors import OutriderError

# Gradio leaves event loops open behind it.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def test_the_prediction_is_the_published_formula() -> None:
    assert f"{(1 - 0.8**5) / (1 - 0.8):.2f} tokens per target pass" in theory(0.8, 0.1, 4, 0.0)
    assert f"{(1 - 0.8**5) / (1 - 0.8) / 1.4:.2f} times as fast" in theory(0.8, 0.1, 4, 0.0)
    with pytest.raises(OutriderError):
        theory(2.0, 0.1, 4, 0.0)
