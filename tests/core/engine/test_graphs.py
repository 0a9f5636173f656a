"""Passes by shape, through buffers that stay: the same numbers, on a CPU uncaptured and on a GPU in graphs."""

from __future__ import annotations

import random
import time

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.drafters.lookup import PromptLookup
from outrider.core.engine.audit import random_draft, random_verdict
from outrider.core.engine.graphs import Graphs
from outrider.core.engine.network import Config, random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.laws import Sampling
from outrider.core.methods import make_rule

CONFIG = Config(vocabulary=61, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, hidden=64)
PROMPTS = [[1, 2, 3, 4, 5, 2, 3], [6, 7], [8] * 40]
GREEDY = Sampling(temperature=0)


def pair(device: str = "cpu") -> tuple[Decoder, Decoder]:
    """Without and with; on a CPU both work with bounds, as on a GPU."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    plain = Decoder(random_network(CONFIG, 1, dtype=dtype, device=device))
    network = random_network(CONFIG, 1, dtype=dtype, device=device)
    network.graphs = Graphs(network)
    still = Decoder(network)
    for one in (plain, still):
        one.cache.exact = False
    return plain, still


def histories(device: str) -> Graphs:
    """Random drafts and verdicts through both."""
    plain, still = pair(device)
    taps = frozenset({"layer.0", "last"})
    for seed in range(3):
        rng = random.Random(seed)
        for one in (plain, still):
            one.begin(PROMPTS, GREEDY, taps)
        for _ in range(12):
            draft, parents = random_draft(rng, len(PROMPTS), CONFIG.vocabulary, 7)
            verdict, count = random_verdict(rng, draft, parents, CONFIG.vocabulary)
            found, wanted = still.score(draft), plain.score(draft)
            close = 1e-9 if device == "cpu" else 1e-3
            torch.testing.assert_close(found.logits(), wanted.logits(), rtol=0, atol=close)
            for tap in taps:
                torch.testing.assert_close(found.hidden[tap], wanted.hidden[tap], rtol=0, atol=close)
            for one in (plain, still):
                one.keep(draft, verdict, count)
        for one in (plain, still):
            one.end()
    assert still.network.graphs is not None
    return still.network.graphs


def test_buffers_that_stay_change_nothing() -> None:
    graphs = histories("cpu")
    assert graphs.captured == graphs.replayed == 0 and len(graphs._passes) > 3


def test_a_store_is_lent_again() -> None:
    _, still = pair()
    still.begin(PROMPTS, GREEDY)
    first = still.cache.store.data_ptr()
    still.end()
    still.begin([[9, 9], [3], [4]], GREEDY)
    assert still.cache.store.data_ptr() == first
    other = Decoder(still.network)
    other.begin(PROMPTS, GREEDY)
    assert other.cache.store.data_ptr() != first


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_tokens_are_the_same(sampling: Sampling) -> None:
    outputs = []
    for model in pair():
        for _ in range(2):
            steps = decode(model, PromptLookup(length=3), make_rule("exact"), PROMPTS, sampling=sampling, limit=30)
            outputs.append([(step.row, step.emitted) for step in steps])
    assert all(one == outputs[0] for one in outputs)


@pytest.mark.gpu
def test_graphs_are_captured_and_change_nothing() -> None:
    graphs = histories("cuda")
    assert graphs.capture and graphs.captured > 3
    assert graphs.replayed >= graphs.captured


@pytest.mark.gpu
def test_a_replayed_pass_is_quicker() -> None:
    config = Config(vocabulary=1000, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, hidden=1536)
    seconds = []
    for graphed in (False, True):
        network = random_network(config, 1, dtype=torch.bfloat16, device="cuda")
        network.graphs = Graphs(network) if graphed else None
        steps = decode(Decoder(network), None, make_rule("exact"), [[1, 2, 3]], sampling=GREEDY, limit=120)
        for _ in range(20):
            next(steps)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(80):
            next(steps)
        seconds.append(time.perf_counter() - start)
        steps.close()  # type: ignore[attr-defined]
    assert seconds[1] < seconds[0] / 2, seconds
