"""Captured passes and rules give the same numbers as uncaptured ones: on a CPU with a mock recorder, on a GPU in
graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.engine.captured_passes import Graphs
from outrider.core.engine.cuda_graphs import GraphPool, Recorder, Replay, record_on_cpu
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.network import random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.testing.cache_audit import random_draft, random_verdict
from outrider.core.testing.conformance import random_draft_head, trial_drafter
from outrider.core.testing.cuda_device import cuda_device
from tests.core.shadow.cases import DEVICES, WAITS, Device

pytestmark = pytest.mark.slow
CONFIG = Config(vocabulary=61, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)
PROMPTS = [[1, 2, 3, 4, 5, 2, 3], [6, 7], [8] * 40]
GREEDY = Sampling(temperature=0)


RECORDERS = [None, record_on_cpu]


def pair(device: str = "cpu", record: Recorder | None = None) -> tuple[Decoder, Decoder]:
    """A decoder without captures and one with; on a CPU both know only bounds on the row lengths, as on a GPU."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    plain = Decoder(random_network(CONFIG, 1, dtype=dtype, device=device))
    network = random_network(CONFIG, 1, dtype=dtype, device=device)
    network.graphs = Graphs(network, record=record)
    captured = Decoder(network)
    for model in (plain, captured):
        model.cache.exact = False
    return plain, captured


def compare_histories(device: str, record: Recorder | None = None) -> GraphPool:
    """Run both decoders on random drafts and verdicts, compare all logits and states, and return the graph pool."""
    plain, captured = pair(device, record)
    taps = frozenset({"layer.0", "last"})
    for seed in range(3):
        rng = random.Random(seed)
        for model in (plain, captured):
            model.begin(PROMPTS, GREEDY, taps)
        for _ in range(12):
            draft, parents = random_draft(rng, len(PROMPTS), CONFIG.vocabulary, 7, device)
            verdict, count = random_verdict(rng, draft, parents, CONFIG.vocabulary)
            result, expected = captured.score(draft), plain.score(draft)
            close = 1e-9 if device == "cpu" else 1e-3
            torch.testing.assert_close(result.logits(), expected.logits(), rtol=0, atol=close)
            for tap in taps:
                torch.testing.assert_close(result.hidden[tap], expected.hidden[tap], rtol=0, atol=close)
            for model in (plain, captured):
                model.keep(draft, verdict, count)
        for model in (plain, captured):
            model.end()
    assert captured.network.graphs is not None
    return captured.network.graphs.pool


def test_fixed_buffers_do_not_change_results() -> None:
    pool = compare_histories("cpu")
    assert pool.captured == pool.replayed == 0 and len(pool) > 3


def test_replays_read_only_the_buffers() -> None:
    pool = compare_histories("cpu", record_on_cpu)
    assert pool.captured == len(pool) > 3 and pool.replayed > 2 * pool.captured


def test_the_mock_recorder_has_the_limits_of_a_graph() -> None:
    pool = GraphPool(torch.device("cpu"), record_on_cpu)
    for number in (1.0, 2.0):  # read from outside the buffers
        result = pool.run(("outside",), [torch.ones(2)], lambda inputs, number=number: inputs[0] * number)
    assert result.tolist() == [1, 1], "the number is that of the recording"
    pool.run(("shape",), [torch.ones(3)], lambda inputs: inputs[0][inputs[0] > 0])
    with pytest.raises(RuntimeError, match="recorded with shape"):
        pool.run(("shape",), [torch.tensor([1.0, -1, 1])], lambda inputs: inputs[0])


def test_a_failed_capture_falls_back_to_eager_execution() -> None:
    def failing(work: Callable[[], Any]) -> tuple[Any, Replay]:
        raise RuntimeError("operation not permitted when stream is capturing")

    pool = GraphPool(torch.device("cpu"), failing)
    with pytest.warns(UserWarning, match="not captured in a CUDA graph: operation not permitted"):
        first = pool.run(("sum",), [torch.ones(2)], lambda inputs: inputs[0].sum())
    assert first == 2 and pool.run(("sum",), [torch.zeros(2)], lambda inputs: inputs[0].sum()) == 0
    assert pool.captured == pool.replayed == 0


CACHE_BEGIN = Cache.begin


def begin_with_bounds(self: Cache, prompts: Any) -> None:
    """Cache.begin as on a device, where the host knows only bounds on the row lengths."""
    self.exact = False
    CACHE_BEGIN(self, prompts)


HEADS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name, method in DRAFTERS.items() if method.draft_head is not None),
    ("eagle3", {"layers": 2}),
    ("eagle3", {"layers": 2, "windows": (3, None)}),
    ("dflash", {"windows": (3, None), "causal": (True, False)}),
    ("dflash", {"windows": (3, 2), "anchored": True}),
]


@pytest.mark.parametrize(("name", "options"), HEADS)
def test_trained_drafters_propose_the_same_when_captured(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cache, "begin", begin_with_bounds)
    method, histories = DRAFTERS[name], []
    for record in (None, record_on_cpu):
        network = random_network(CONFIG, 1, dtype=torch.float64)
        if record is not None:
            network.graphs = Graphs(network, record=record)
        target = Decoder(network)
        torch.manual_seed(5)
        draft_head = random_draft_head(method, target, vocabulary=0, **options)
        for _ in range(2):  # the second generation replays what the first one recorded
            steps = list(
                decode(target, method.make(draft_head), make_rule("exact"), PROMPTS, sampling=GREEDY, max_new_tokens=7)
            )
            histories.append([(step.row, step.emitted, step.drafted, step.path) for step in steps])
        if record is not None and name != "pass":  # PaSS has no network of its own
            pool = draft_head.network.graphs.pool if isinstance(draft_head, Decoder) else draft_head.graph_pool
            if name == "eagle3" and "windows" in options:  # runs eagerly
                assert not pool.captured
            else:
                assert pool.captured and pool.replayed > pool.captured
    assert all(history == histories[0] for history in histories)


def test_a_returned_store_is_reused() -> None:
    _, captured = pair()
    captured.begin(PROMPTS, GREEDY)
    first = captured.cache.store.data_ptr()
    captured.end()
    captured.begin([[9, 9], [3], [4]], GREEDY)
    assert captured.cache.store.data_ptr() == first
    other = Decoder(captured.network)
    other.begin(PROMPTS, GREEDY)
    assert other.cache.store.data_ptr() != first


def test_captures_are_dropped_with_their_store() -> None:
    _, captured = plain_and_captured()
    assert captured.network.graphs is not None
    pool = captured.network.graphs.pool
    for rows in (1, 2, 3, 4):
        captured.cache.exact = False
        captured.begin([[5, 6, 7]] * rows, GREEDY)
        captured.cache.rows = replace(captured.cache.rows, uniform=False)
        captured.score(Draft.empty(rows))
        assert any(key[0] == captured.cache.store.data_ptr() for key in pool._captures)
        captured.end()
    assert len(pool) == 2, "one for each of the two stores that are kept"


@pytest.mark.parametrize("record", RECORDERS)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_captured_decoding_emits_the_same_tokens(sampling: Sampling, record: Recorder | None) -> None:
    outputs = []
    for model in pair(record=record):
        for _ in range(2):
            steps = decode(
                model, PromptLookup(length=3), make_rule("exact"), PROMPTS, sampling=sampling, max_new_tokens=30
            )
            outputs.append([(step.row, step.emitted) for step in steps])
    assert all(output == outputs[0] for output in outputs)


def plain_and_captured(device: str = "cpu", record: Recorder | None = record_on_cpu) -> tuple[Decoder, Decoder]:
    """A decoder without captures and one of the same weights with passes and rules captured."""
    plain, captured = (Decoder(random_network(CONFIG, 1, dtype=torch.float64, device=device)) for _ in range(2))
    captured.network.graphs = Graphs(captured.network, record=record)
    return plain, Decoder(captured.network)


def traces(model: Decoder, name: str, rule: str, sampling: Sampling, limit: int = 24) -> list[Any]:
    """The steps of two generations as tuples."""

    def small() -> Decoder:
        return Decoder(random_network(CONFIG, 3, dtype=torch.float64, device=model.device))

    result: list[Any] = []
    for seed in (1, 2):
        drafter = trial_drafter(DRAFTERS[name], DRAFTERS[name].test_options[0], small)
        for step in decode(
            model, drafter, make_rule(rule), PROMPTS, sampling=sampling, max_new_tokens=limit, seed=seed
        ):
            result.append((step.row, step.emitted, step.sources, step.drafted, step.tried, step.path))
            result.append([[round(number, 6) for number in numbers] for numbers in (step.chance, step.p, step.q)])
    return result


SAMPLINGS = [GREEDY, Sampling(), Sampling(temperature=0.7, top_k=5), Sampling(top_p=0.9)]


@pytest.mark.parametrize(
    ("name", "rule", "sampling"),
    [
        *(("prompt-lookup", "exact", sampling) for sampling in SAMPLINGS),
        *(("draft-model", "exact", sampling) for sampling in SAMPLINGS),
        *(("draft-model", "token", sampling) for sampling in (GREEDY, SAMPLINGS[2])),
        *((name, "exact", sampling) for name in ("token-recycling", "sequoia") for sampling in (GREEDY, Sampling())),
        ("prompt-lookup", "sample-match", Sampling()),
    ],
)
def test_captured_rules_return_the_same_verdicts(
    name: str, rule: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cache, "begin", begin_with_bounds)
    plain, captured = plain_and_captured()
    assert traces(captured, name, rule, sampling) == traces(plain, name, rule, sampling)
    graphs = captured.network.graphs
    assert graphs is not None and graphs.rules.captured == len(graphs.rules) > 0
    assert graphs.rules.replayed > graphs.rules.captured


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [("gumbel-match", Sampling()), ("typical", Sampling()), ("exact", Sampling(repetition_penalty=1.3))],
)
def test_rules_that_cannot_be_captured_run_eagerly(rule: str, sampling: Sampling) -> None:
    plain, captured = plain_and_captured()
    assert traces(captured, "prompt-lookup", rule, sampling) == traces(plain, "prompt-lookup", rule, sampling)
    graphs = captured.network.graphs
    assert graphs is not None and not len(graphs.rules)


VIEWED = ["draft-on-the-fly", "layer-skip", "sparse-cache", "triforce", "qspec"]


@pytest.mark.parametrize("name", [name for name in VIEWED if name in DRAFTERS])
def test_captured_views_propose_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "begin", begin_with_bounds)
    plain, captured = plain_and_captured()
    assert traces(captured, name, "exact", GREEDY) == traces(plain, name, "exact", GREEDY)
    graphs = captured.network.graphs
    assert graphs is not None and len(graphs.views) >= 1
    pools = [view.graphs.pool for view in graphs.views.values() if view.graphs is not None]
    assert len(pools) == len(graphs.views)
    assert sum(pool.replayed for pool in pools) > sum(pool.captured for pool in pools) > 0


def test_the_oldest_views_are_evicted() -> None:
    _, captured = plain_and_captured()
    graphs = captured.network.graphs
    assert graphs is not None
    for exit in (*range(1, 4), 1, 2):
        for skip in ("attention.0", "mlp.0", "mlp.1", "attention.1"):
            captured.begin(PROMPTS, GREEDY)
            captured.view(skip={skip}, exit=max(exit, 2))
            captured.end()
    assert len(graphs.views) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "top-k", "top-p"])
@pytest.mark.parametrize("name", ["prompt-lookup", "token-recycling", "draft-model", "layer-skip", "sparse-cache"])
def test_captured_rounds_emit_the_same_tokens_and_synchronise_once(name: str, sampling: Sampling) -> None:
    plain, captured = plain_and_captured("cuda", None)
    assert [step[:2] for step in traces(captured, name, "exact", sampling)[::2]] == [
        step[:2] for step in traces(plain, name, "exact", sampling)[::2]
    ]
    graphs = captured.network.graphs
    assert graphs is not None and graphs.rules.captured > 0 and graphs.rules.record is not None
    small = Decoder(random_network(CONFIG, 3, dtype=torch.float64, device="cuda"))
    drafter = trial_drafter(DRAFTERS[name], DRAFTERS[name].test_options[0], lambda: small)
    steps = decode(captured, drafter, make_rule("exact"), PROMPTS, sampling=sampling, max_new_tokens=120)
    with cuda_device() as device:
        while next(steps).index < 40:  # until all shapes are captured
            pass
        device.reset()
        first = next(steps).index
        last = next(step for step in steps if step.index > first + 5)
        steps.close()  # type: ignore[attr-defined]
        assert device.counts.waits <= WAITS.get(name, 1) * (last.index - first), device.counts.places


@pytest.mark.parametrize("device", DEVICES)
def test_cuda_graphs_do_not_change_results(device: Device) -> None:
    with device():
        pool = compare_histories("cuda")
    assert pool.record is not None and pool.captured > 3
    assert pool.replayed >= pool.captured
