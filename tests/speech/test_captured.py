"""Speech whose passes are recorded: what is told is looked for where the next script is put, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.engine.cuda_graphs import record_on_cpu
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.network import Graphs
from outrider.core.methods import make_rule
from outrider.speech.voice import Speaker, Voice

SAID = [[1, 2, 3, 4], [7, 8, 9], [5, 6] * 6]
BEGUN = Cache.begin


def bounded(self: Cache, prompts: Any) -> None:
    """As on a device, the host knows bounds alone."""
    self.exact = False
    BEGUN(self, prompts)


def test_recorded_passes_say_the_same(small_voice: Callable[..., Voice], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "begin", bounded)
    voice = small_voice().eval()
    network = voice.network(torch.float64)

    def spoken(said: list[int], drafter: Any = None) -> list[int]:
        target = Speaker(network, voice.script([said]))
        how = {"sampling": Sampling(), "max_new_tokens": 12, "seed": 1}
        steps = decode(target, drafter, make_rule("gumbel-match"), [[voice.end]], **how)  # type: ignore[arg-type]
        return [token for step in steps for token in step.emitted]

    eager = [spoken(one) for one in SAID]
    assert eager[0] != eager[1]
    graphs = network.graphs = Graphs(network, record=record_on_cpu)
    for _ in range(2):
        assert [spoken(one) for one in SAID] == eager
        assert [spoken(one, Jacobi()) for one in SAID] == eager
    assert len(graphs.idle) == 1, "one after another share what is recorded"
    own = graphs.idle[0].graphs
    assert own is not None and own.pool.replayed > own.pool.captured > 1
    # side by side, each has its own
    one, other = (Speaker(network, voice.script([said])) for said in SAID[:2])
    streams = [
        decode(target, None, make_rule("gumbel-match"), [[voice.end]], sampling=Sampling(), max_new_tokens=12, seed=1)
        for target in (one, other)
    ]
    outputs = [[step.emitted for step in steps] for steps in zip(*streams, strict=False)]
    assert one.network is not other.network
    for number in range(2):
        found = [token for both in outputs for token in both[number]]
        assert found == eager[number][: len(found)]
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
