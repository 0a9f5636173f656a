"""Passes by shape, through buffers that stay: the same numbers, on a CPU uncaptured and on a GPU in graphs."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.engine.cuda_graphs import GraphPool, Recorder, Replay, again
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.network import Graphs, random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.testing.cache_audit import random_draft, random_verdict
from outrider.core.testing.conformance import equip, untaught

pytestmark = pytest.mark.slow
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


def histories(device: str, record: Recorder | None = None) -> GraphPool:
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
    stills = GraphPool(torch.device("cpu"), again)
    for number in (1.0, 2.0):  # read from outside of the buffers
        found = stills.run(("outside",), [torch.ones(2)], lambda given, number=number: given[0] * number)
    assert found.tolist() == [1, 1], "the number is that of the recording"
    stills.run(("shape",), [torch.ones(3)], lambda given: given[0][given[0] > 0])
    with pytest.raises(RuntimeError, match="recorded with"):
        stills.run(("shape",), [torch.tensor([1.0, -1, 1])], lambda given: given[0])


def test_what_cannot_be_recorded_runs_as_it_is() -> None:
    def refuses(work: Callable[[], Any]) -> tuple[Any, Replay]:
        raise RuntimeError("operation not permitted when stream is capturing")

    stills = GraphPool(torch.device("cpu"), refuses)
    with pytest.warns(UserWarning, match="not captured in CUDA graphs: operation not permitted"):
        first = stills.run(("sum",), [torch.ones(2)], lambda given: given[0].sum())
    assert first == 2 and stills.run(("sum",), [torch.zeros(2)], lambda given: given[0].sum()) == 0
    assert stills.captured == stills.replayed == 0


BOUNDED = Cache.begin


def bounded(self: Cache, prompts: Any) -> None:
    """As on a device, the host knows bounds alone."""
    self.exact = False
    BOUNDED(self, prompts)


@pytest.mark.parametrize("name", [name for name, one in DRAFTERS.items() if "draft_head" in one.needs])
def test_trained_drafters_guess_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "begin", bounded)
    method, found = DRAFTERS[name], []
    for record in (None, again):
        network = random_network(CONFIG, 1, dtype=torch.float64)
        if record is not None:
            network.graphs = Graphs(network, record=record)
        target = Decoder(network)
        torch.manual_seed(5)
        draft_head = untaught(method, target, vocabulary=0)
        for _ in range(2):  # the second generation replays what the first one recorded
            steps = list(
                decode(target, method.make(draft_head), make_rule("exact"), PROMPTS, sampling=GREEDY, max_new_tokens=7)
            )
            found.append([(step.row, step.emitted, step.drafted, step.path) for step in steps])
        if record is not None and name != "pass":  # whose places the target itself reads
            stills = draft_head.network.graphs.stills if isinstance(draft_head, Decoder) else draft_head.graph_pool
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


def test_recordings_end_with_the_store_they_are_of() -> None:
    _, still = recorded()
    assert still.network.graphs is not None
    stills = still.network.graphs.stills
    for rows in (1, 2, 3, 4):
        still.cache.exact = False
        still.begin([[5, 6, 7]] * rows, GREEDY)
        still.cache.rows = replace(still.cache.rows, even=False)
        still.score(Draft.empty(rows))
        assert any(key[0] == still.cache.store.data_ptr() for key in stills._stills)
        still.end()
    assert len(stills) == 2, "of the two stores that are kept"


@pytest.mark.parametrize("record", RECORDERS)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_tokens_are_the_same(sampling: Sampling, record: Recorder | None) -> None:
    outputs = []
    for model in pair(record=record):
        for _ in range(2):
            steps = decode(
                model, PromptLookup(length=3), make_rule("exact"), PROMPTS, sampling=sampling, max_new_tokens=30
            )
            outputs.append([(step.row, step.emitted) for step in steps])
    assert all(one == outputs[0] for one in outputs)


def recorded(device: str = "cpu", record: Recorder | None = again) -> tuple[Decoder, Decoder]:
    """The same network twice: plainly, and with all that can be recorded."""
    plain, still = (Decoder(random_network(CONFIG, 1, dtype=torch.float64, device=device)) for _ in range(2))
    still.network.graphs = Graphs(still.network, record=record)
    return plain, Decoder(still.network)


def written(model: Decoder, name: str, rule: str, sampling: Sampling, limit: int = 24) -> list[Any]:
    """All that two generations' steps say."""

    def small() -> Decoder:
        return Decoder(random_network(CONFIG, 3, dtype=torch.float64, device=model.device))

    found: list[Any] = []
    for seed in (1, 2):
        drafter = equip(DRAFTERS[name], DRAFTERS[name].trials[0], small)
        for step in decode(
            model, drafter, make_rule(rule), PROMPTS, sampling=sampling, max_new_tokens=limit, seed=seed
        ):
            found.append((step.row, step.emitted, step.sources, step.drafted, step.tried, step.path))
            found.append([[round(one, 6) for one in numbers] for numbers in (step.chance, step.p, step.q)])
    return found


SAMPLINGS = [GREEDY, Sampling(), Sampling(temperature=0.7, top_k=5), Sampling(top_p=0.9)]


@pytest.mark.parametrize(
    ("name", "rule", "sampling"),
    [
        *(("prompt-lookup", "exact", one) for one in SAMPLINGS),
        *(("draft-model", "exact", one) for one in SAMPLINGS),
        *(("draft-model", "token", one) for one in (GREEDY, SAMPLINGS[2])),
        *((name, "exact", one) for name in ("token-recycling", "sequoia") for one in (GREEDY, Sampling())),
        ("prompt-lookup", "sample-match", Sampling()),
    ],
)
def test_verdicts_are_replayed_and_the_same(
    name: str, rule: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cache, "begin", bounded)
    plain, still = recorded()
    assert written(still, name, rule, sampling) == written(plain, name, rule, sampling)
    graphs = still.network.graphs
    assert graphs is not None and graphs.rules.captured == len(graphs.rules) > 0
    assert graphs.rules.replayed > graphs.rules.captured


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [("gumbel-match", Sampling()), ("typical", Sampling()), ("exact", Sampling(repetition_penalty=1.3))],
)
def test_rules_that_can_not_be_recorded_judge_as_they_are(rule: str, sampling: Sampling) -> None:
    plain, still = recorded()
    assert written(still, "prompt-lookup", rule, sampling) == written(plain, "prompt-lookup", rule, sampling)
    graphs = still.network.graphs
    assert graphs is not None and not len(graphs.rules)


VIEWED = ["draft-on-the-fly", "layer-skip", "sparse-cache", "triforce", "qspec"]


@pytest.mark.parametrize("name", [name for name in VIEWED if name in DRAFTERS])
def test_views_are_recorded_and_guess_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "begin", bounded)
    plain, still = recorded()
    assert written(still, name, "exact", GREEDY) == written(plain, name, "exact", GREEDY)
    graphs = still.network.graphs
    assert graphs is not None and len(graphs.views) >= 1
    passes = [one.graphs.stills for one in graphs.views.values() if one.graphs is not None]
    assert len(passes) == len(graphs.views)
    assert sum(one.replayed for one in passes) > sum(one.captured for one in passes) > 0


def test_views_that_nobody_wants_any_more_are_let_go() -> None:
    _, still = recorded()
    graphs = still.network.graphs
    assert graphs is not None
    for exit in (*range(1, 4), 1, 2):
        for skip in ("attention.0", "mlp.0", "mlp.1", "attention.1"):
            still.begin(PROMPTS, GREEDY)
            still.view(skip={skip}, exit=max(exit, 2))
            still.end()
    assert len(graphs.views) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "top-k", "top-p"])
@pytest.mark.parametrize("name", ["prompt-lookup", "token-recycling", "draft-model", "layer-skip", "sparse-cache"])
def test_what_is_captured_says_the_same_with_one_wait_a_step(name: str, sampling: Sampling) -> None:
    plain, still = recorded("cuda", None)
    assert [one[:2] for one in written(still, name, "exact", sampling)[::2]] == [
        one[:2] for one in written(plain, name, "exact", sampling)[::2]
    ]
    graphs = still.network.graphs
    assert graphs is not None and graphs.rules.captured > 0 and graphs.rules.record is not None
    small = Decoder(random_network(CONFIG, 3, dtype=torch.float64, device="cuda"))
    drafter = equip(DRAFTERS[name], DRAFTERS[name].trials[0], lambda: small)
    steps = decode(still, drafter, make_rule("exact"), PROMPTS, sampling=sampling, max_new_tokens=120)
    while next(steps).index < 40:  # shapes are captured
        pass
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            first = next(steps).index
            last = next(step for step in steps if step.index > first + 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        steps.close()  # type: ignore[attr-defined]
    assert sum("synchroniz" in str(one.message) for one in waits) <= last.index - first


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
        steps = decode(Decoder(network), None, make_rule("exact"), [[1, 2, 3]], sampling=GREEDY, max_new_tokens=120)
        for _ in range(20):
            next(steps)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(80):
            next(steps)
        seconds.append(time.perf_counter() - start)
        steps.close()  # type: ignore[attr-defined]
    assert seconds[1] < seconds[0] / 2, seconds
