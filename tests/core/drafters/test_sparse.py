"""Sparse-cache self-drafting: exact whatever is left out, and right every time if nothing is."""

from __future__ import annotations

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.drafters.sparse import SparseCache
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.laws import Sampling
from outrider.core.rules.exact import Exact
from outrider.core.target import Prefill

CONFIG = Config(vocabulary=61, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=64)
PROMPTS = [[int(token) for token in (torch.arange(size) * 7 + size) % 57 + 4] for size in (1, 40, 90)]
GREEDY = Sampling(temperature=0)


def run(drafter: SparseCache | None, sampling: Sampling = GREEDY) -> tuple[list[list[int]], float]:
    model = Decoder.random(CONFIG, seed=1, dtype=torch.float64)
    found: list[list[int]] = [[] for _ in PROMPTS]
    calls = 0
    for step in decode(model, drafter, Exact(), PROMPTS, sampling=sampling, limit=[60, 30, 60]):
        found[step.row] += step.emitted
        calls += 1
    return found, sum(map(len, found)) / calls


@pytest.mark.parametrize("window", [1, 8, 32])
@pytest.mark.parametrize("sinks", [0, 4])
def test_what_comes_out_is_plain_decodings(window: int, sinks: int) -> None:
    assert run(SparseCache(sinks=sinks, window=window))[0] == run(None)[0]


def test_more_of_the_cache_guesses_better_and_all_of_it_is_always_right() -> None:
    rates = [run(SparseCache(sinks=2, window=window, length=4))[1] for window in (4, 64, 1000)]
    assert rates[0] < rates[1] <= rates[2] and rates[2] == pytest.approx(150 / (12 + 6 + 12))


def test_it_counts_what_it_reads() -> None:
    model, drafter = Decoder.random(CONFIG, seed=1), SparseCache(length=3)
    steps = list(decode(model, drafter, Exact(), [PROMPTS[1]], sampling=GREEDY, limit=20))
    assert drafter.bytes_read > 0
    assert steps[0].cost == pytest.approx(1 + 3)


def test_a_target_that_cannot_be_seen_cheaper_is_refused() -> None:
    with pytest.raises(Incompatible, match="own cache"):
        SparseCache().begin(Prefill(), [[1]], GREEDY)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidOption, match="must be 1"):
        SparseCache(window=0)
