"""On a device the host knows how far each row has been read, without asking."""

from __future__ import annotations

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.network import random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.testing.conformance import trial_drafter
from outrider.core.testing.shadow.device import shadow_device

CONFIG = Config(vocabulary=61, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)
PROMPTS = [[1, 2, 3, 4, 5, 2, 3], [6, 7]]


@pytest.mark.parametrize(
    "name", ["prompt-lookup", "draft-model", "sampled-tree", "eagle3", "medusa", "mtp", "layer-skip"]
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_host_knows_all_lengths(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, checked = Cache.keep, 0

    def checking(self: Cache, draft: Draft, verdict: Verdict, count: torch.Tensor) -> torch.Tensor:
        nonlocal checked
        tokens = keep(self, draft, verdict, count)
        assert not self.rows.bounds
        assert self.rows.host == tuple(self.rows.entries.tolist()) and self.rows.host_pending == tuple(
            self.rows.pending_count.tolist()
        )
        checked += 1
        return tokens

    monkeypatch.setattr(Cache, "keep", checking)
    method = DRAFTERS[name]
    with shadow_device():
        target, smaller = (Decoder(random_network(CONFIG, seed, dtype=torch.float64, device="cuda")) for seed in (1, 2))
        drafter = trial_drafter(method, {}, lambda: target if method.draft_head else smaller)
        sampling = Sampling(temperature=temperature)
        steps = list(decode(target, drafter, make_rule(), PROMPTS, sampling=sampling, max_new_tokens=[30, 12]))
    assert checked >= max(step.index for step in steps)
