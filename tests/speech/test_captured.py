"""Captured passes of the voice decoder: each generation uses its own conditioning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.engine.captured_passes import Graphs
from outrider.core.engine.cuda_graphs import record_on_cpu
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.methods import make_rule
from outrider.speech.voice import Voice, VoiceDecoder

PHONEMES = [[1, 2, 3, 4], [7, 8, 9], [5, 6] * 6]
BEGIN = Cache.begin


def bounded(self: Cache, prompts: Any) -> None:
    """The host knows only bounds of lengths, as on a device."""
    self.exact = False
    BEGIN(self, prompts)


def test_captured_passes_generate_the_same(small_voice: Callable[..., Voice], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "begin", bounded)
    voice = small_voice().eval()
    network = voice.network(torch.float64)

    def generate(phonemes: list[int], drafter: Any = None) -> list[int]:
        target = VoiceDecoder(network, voice.script([phonemes]))
        options = {"sampling": Sampling(), "max_new_tokens": 12, "seed": 1}
        steps = decode(target, drafter, make_rule("gumbel-match"), [[voice.end]], **options)  # type: ignore[arg-type]
        return [token for step in steps for token in step.emitted]

    eager = [generate(phonemes) for phonemes in PHONEMES]
    assert eager[0] != eager[1]
    graphs = network.graphs = Graphs(network, record=record_on_cpu)
    for _ in range(2):
        assert [generate(phonemes) for phonemes in PHONEMES] == eager
        assert [generate(phonemes, Jacobi()) for phonemes in PHONEMES] == eager
    assert len(graphs.idle) == 1, "generations one after another share the captures"
    own = graphs.idle[0].graphs
    assert own is not None and own.pool.replayed > own.pool.captured > 1
    # concurrent generations have captures of their own
    first, second = (VoiceDecoder(network, voice.script([phonemes])) for phonemes in PHONEMES[:2])
    streams = [
        decode(target, None, make_rule("gumbel-match"), [[voice.end]], sampling=Sampling(), max_new_tokens=12, seed=1)
        for target in (first, second)
    ]
    outputs = [[step.emitted for step in steps] for steps in zip(*streams, strict=False)]
    assert first.network is not second.network
    for number in range(2):
        tokens = [token for both in outputs for token in both[number]]
        assert tokens == eager[number][: len(tokens)]
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
