"""The ledger that `outrider bench device --counted` prints is that of tests/ledger-of-a-round.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.app.bench.counted import SHAPE, ledger

PINNED = json.loads((Path(__file__).parents[2] / "ledger-of-a-round.json").read_text())
SMALL = replace(SHAPE, vocabulary=256, hidden_size=64, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate_size=96)


@pytest.mark.slow
def test_the_counts_are_those_pinned() -> None:
    rows = list(ledger(["prompt-lookup", "eagle3"], SMALL))
    found = [{name: row[name] for name in PINNED[0]} for row in rows]
    assert found == PINNED


def test_products_are_counted_as_by_hand() -> None:
    """Plain decoding of one token: two operations a weight in a product, and those of attention to 512 slots."""
    config = replace(SMALL, layers=1)
    score = next(row for row in ledger([], config) if row["part"] == "score")
    width, heads = config.hidden_size, config.heads * config.head_dim
    weights = width * (heads + 2 * config.kv_heads * config.head_dim) + heads * width
    weights += 3 * width * config.intermediate_size + width * config.vocabulary
    assert score["mflops"] == pytest.approx((2 * weights + 4 * heads * 512) / 1e6)
    assert score["waits"] == 0 and score["mbytes"] > 4 * weights / 1e6
