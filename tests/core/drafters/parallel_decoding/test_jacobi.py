"""Jacobi windows: what a few rows renew on the host is what whole batches renew."""

from __future__ import annotations

import pytest

from outrider.core.decode import decode
from outrider.core.drafters.parallel_decoding.jacobi import RENEWALS, Jacobi
from outrider.core.rules import small_batch
from outrider.core.rules.exact import Exact
from outrider.core.testing.table_target import TableTarget


@pytest.mark.slow
@pytest.mark.parametrize("renew", RENEWALS)
@pytest.mark.parametrize("window", [1, 3, 9])
def test_a_few_rows_on_the_host_say_the_same(renew: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[tuple[int, ...]]:
        target = TableTarget(11, seed=3)
        steps = decode(
            target, Jacobi(window=window, renew=renew), Exact(), [[1], [2, 3], [4]], max_new_tokens=30, seed=8
        )
        return [(step.row, *step.drafted, *step.emitted) for step in steps]

    alone = run()
    monkeypatch.setattr(small_batch, "_FEW", 0)
    assert alone == run()
    assert len(alone) < 90 or window == 1
