"""Sparse and quantized views as drafters: exact outputs, and full acceptance if nothing is left out."""

from __future__ import annotations

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.self_speculative.sparse_view import SparseView, qspec, sparse_cache, triforce
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill
from outrider.core.rules.exact import Exact

CONFIG = Config(vocabulary=61, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)
PROMPTS = [[int(token) for token in (torch.arange(size) * 7 + size) % 57 + 4] for size in (1, 40, 90)]
GREEDY = Sampling(temperature=0)


def run(drafter: SparseView | None, sampling: Sampling = GREEDY) -> tuple[list[list[int]], float]:
    model = Decoder.random(CONFIG, seed=1, dtype=torch.float64)
    found: list[list[int]] = [[] for _ in PROMPTS]
    calls = 0
    for step in decode(model, drafter, Exact(), PROMPTS, sampling=sampling, max_new_tokens=[60, 30, 60]):
        found[step.row] += step.emitted
        calls += 1
    return found, sum(map(len, found)) / calls


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 8, 32])
@pytest.mark.parametrize("sinks", [0, 4])
def test_the_output_is_that_of_plain_decoding(window: int, sinks: int) -> None:
    assert run(sparse_cache(sinks=sinks, window=window))[0] == run(None)[0]


def test_more_of_the_cache_guesses_better_and_all_of_it_is_always_right() -> None:
    rates = [run(sparse_cache(sinks=2, window=window, length=4))[1] for window in (4, 64, 1000)]
    assert rates[0] < rates[1] <= rates[2] and rates[2] == pytest.approx(150 / (12 + 6 + 12))


def test_it_counts_what_it_reads() -> None:
    model, drafter = Decoder.random(CONFIG, seed=1), sparse_cache(length=3)
    steps = list(decode(model, drafter, Exact(), [PROMPTS[1]], sampling=GREEDY, max_new_tokens=20))
    assert drafter.bytes_read > 0
    assert steps[0].cost == pytest.approx(1 + 3)


def test_a_target_without_views_is_refused() -> None:
    with pytest.raises(Incompatible, match="its cache or in fewer bits"):
        sparse_cache().begin(Prefill(), [[1]], GREEDY)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidOption, match="must be 1"):
        sparse_cache(window=0)
    with pytest.raises(InvalidOption, match="the others 1 or more"):
        triforce(chunks=0)
    with pytest.raises(InvalidOption, match="bits"):
        run(qspec(bits=5))
    with pytest.raises(InvalidOption, match="together with a window"):
        Decoder.random(CONFIG).view(chunks=(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "chunk", "refresh"), [(1, 4, 1), (3, 4, 4), (5, 8, 16)])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8)])
def test_retrieval_changes_no_output(chunks: int, chunk: int, refresh: int, sampling: Sampling) -> None:
    drafter = triforce(sinks=2, window=6, chunks=chunks, chunk=chunk, refresh=refresh)
    found = run(drafter, sampling)[0]
    if sampling.greedy:
        assert found == run(None)[0]
    kept = 2 + 6 + chunks * chunk
    slot = Decoder.random(CONFIG, dtype=torch.float64).cache.slot_bytes
    assert 0 < drafter.cache_bytes <= len(PROMPTS) * (kept + 64 + 64) * slot


@pytest.mark.slow
def test_retrieved_chunks_draft_better_than_as_many_latest_entries() -> None:
    """One layer that attends to equal tokens, which are too far back for a window."""
    found = []
    for drafter in (
        sparse_cache(sinks=2, window=22, length=3),
        triforce(sinks=2, window=6, chunks=4, chunk=4, length=3),
    ):
        rates = []
        for seed in range(1, 5):
            model = Decoder.random(CONFIG, seed=seed, dtype=torch.float64)
            prompt = [(index * 11 + seed) % 57 + 4 for index in range(160)]
            steps = list(decode(model, drafter, Exact(), [prompt], sampling=GREEDY, max_new_tokens=60))
            rates.append(60 / len(steps))
        found.append(sum(rates) / len(rates))
    assert found[1] > found[0], found


def test_all_of_the_middle_is_all_of_the_cache() -> None:
    """Chunks that leave nothing out draft as the target does."""
    model = Decoder.random(CONFIG, seed=2, dtype=torch.float64)
    drafter = triforce(sinks=2, window=14, chunks=24, chunk=2, refresh=1, length=2)
    steps = list(decode(model, drafter, Exact(), [PROMPTS[1][:31]], sampling=GREEDY, max_new_tokens=30))
    assert all(step.accepted == 2 for step in steps[:-1])


def test_fewer_bits_are_nearly_always_right_and_change_no_output() -> None:
    for bits in (8, 4):
        found, rate = run(qspec(bits=bits))
        assert found == run(None)[0]
        assert rate > {8: 3.5, 4: 1.5}[bits]


def test_a_model_is_quantized_once_for_all_requests() -> None:
    model = Decoder.random(CONFIG, seed=1, dtype=torch.float64)
    first = model.view(bits=4).network.layers
    assert model.view(bits=8).network.layers[0].down is not first[0].down
    for other in (model, Decoder(model.network)):
        shared = other.view(bits=4, exit=1).network.layers
        assert len(shared) == 1 and shared[0].down is first[0].down
    assert list(model.kept) == [("quantized", 4), ("quantized", 8)]
