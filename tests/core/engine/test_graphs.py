"""Passes by shape, through buffers that stay: the same numbers, on a CPU uncaptured and on a GPU in graphs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.core.conformance import untaught
from outrider.core.decode import decode
from outrider.core.drafters.lookup import PromptLookup
from outrider.core.engine.audit import random_draft, random_verdict
from outrider.core.engine.cache import Cache
from outrider.core.engine.graphs import Graphs, Recorder, Replay, Stills, again
from outrider.core.engine.network import Config, random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.laws import Sampling
from outrider.core.methods import DRAFTERS, make_rule

CONFIG = Config(vocabulary=61, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, hidden=64)
PROMPTS = [[1, 2, 3, 4, 5, 2, 3], [6, 7], [8] * 40]
GREEDY = Sampling(temperature=0)


RECORDERS = [None, again]


def pair(device: str = "cpu", record: Recorder | None = None) -> tuple[Decoder, Decoder]:
    """Without and with; on a CPU both work with bounds, as on a GPU."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    plain = Decoder(random_network(CONFIG, 1, dtype=dtype, device=device))
    network = random_network(CONFIG, 1, dtype=dtype, device=device)
    network.graphs = Graphs(network, record=record)
    still = Decoder(network)
    for one in (plain, still):
        one.cache.exact = False
    return plain, still


def histories(device: str, record: Recorder | None = None) -> Stills:
    """Random drafts and verdicts through both."""
    plain, still = pair(device, record)
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
    return still.network.graphs.stills


def test_buffers_that_stay_change_nothing() -> None:
    stills = histories("cpu")
    assert stills.captured == stills.replayed == 0 and len(stills) > 3


def test_what_is_recorded_is_replayed_from_buffers_alone() -> None:
    stills = histories("cpu", again)
    assert stills.captured == len(stills) > 3 and stills.replayed > 2 * stills.captured


def test_work_that_would_not_do_in_a_graph_is_told_apart() -> None:
    stills = Stills(torch.device("cpu"), again)
    for number in (1.0, 2.0):  # read from outside of the buffers
        found = stills.run(("outside",), [torch.ones(2)], lambda given, number=number: given[0] * number)
    assert found.tolist() == [1, 1], "the number is that of the recording"
    stills.run(("shape",), [torch.ones(3)], lambda given: given[0][given[0] > 0])
    with pytest.raises(RuntimeError, match="recorded with"):
        stills.run(("shape",), [torch.tensor([1.0, -1, 1])], lambda given: given[0])


def test_what_cannot_be_recorded_runs_as_it_is() -> None:
    def refuses(work: Callable[[], Any]) -> tuple[Any, Replay]:
        raise RuntimeError("operation not permitted when stream is capturing")

    stills = Stills(torch.device("cpu"), refuses)
    with pytest.warns(UserWarning, match="not captured in CUDA graphs: operation not permitted"):
        first = stills.run(("sum",), [torch.ones(2)], lambda given: given[0].sum())
    assert first == 2 and stills.run(("sum",), [torch.zeros(2)], lambda given: given[0].sum()) == 0
    assert stills.captured == stills.replayed == 0


BOUNDED = Cache.begin


def bounded(self: Cache, prompts: Any) -> None:
    """As on a device, the host knows bounds alone."""
    self.exact = False
    BOUNDED(self, prompts)


@pytest.mark.parametrize("name", [name for name, one in DRAFTERS.items() if "pupil" in one.needs])
def test_trained_drafters_guess_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "begin", bounded)
    method, found = DRAFTERS[name], []
    for record in (None, again):
        network = random_network(CONFIG, 1, dtype=torch.float64)
        if record is not None:
            network.graphs = Graphs(network, record=record)
        target = Decoder(network)
        torch.manual_seed(5)
        pupil = untaught(method, target, vocabulary=0)
        for _ in range(2):  # the second generation replays what the first one recorded
            steps = list(decode(target, method.make(pupil), make_rule("exact"), PROMPTS, sampling=GREEDY, limit=7))
            found.append([(step.row, step.emitted, step.drafted, step.path) for step in steps])
        if record is not None and name != "pass":  # whose places the target itself reads
            stills = getattr(pupil, "stills", None) or pupil.network.graphs.stills
            assert stills.captured and stills.replayed > stills.captured
    assert all(one == found[0] for one in found)


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


@pytest.mark.parametrize("record", RECORDERS)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_tokens_are_the_same(sampling: Sampling, record: Recorder | None) -> None:
    outputs = []
    for model in pair(record=record):
        for _ in range(2):
            steps = decode(model, PromptLookup(length=3), make_rule("exact"), PROMPTS, sampling=sampling, limit=30)
            outputs.append([(step.row, step.emitted) for step in steps])
    assert all(one == outputs[0] for one in outputs)


@pytest.mark.gpu
def test_graphs_are_captured_and_change_nothing() -> None:
    stills = histories("cuda")
    assert stills.record is not None and stills.captured > 3
    assert stills.replayed >= stills.captured


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
