"""The cache between turns holds what reading the whole conversation would give, bit for bit, in any precision."""

from __future__ import annotations

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.engine.linear import fastest
from outrider.core.engine.network import random_network
from outrider.core.engine.quantization.quantize import quantize
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.kernels import native
from outrider.core.methods import make_rule
from outrider.text.prefix_cache import PrefixCache

GREEDY = Sampling(temperature=0)


@pytest.mark.skipif(native.library() is None, reason="torch's kernels round by the shape of a pass")
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_next_turn_reads_what_the_whole_conversation_says(bits: int | None) -> None:
    shape = Config(
        vocabulary=96, hidden_size=64, layers=3, heads=2, kv_heads=1, head_dim=32, intermediate_size=96, context=512
    )
    network = random_network(shape, 1, dtype=torch.bfloat16)
    network = network.map_linears(fastest) if bits is None else quantize(network, bits)
    kept, prompt = PrefixCache(Decoder(network)), list(range(40))
    for _ in range(3):
        answer = [
            token
            for step in decode(kept, None, make_rule(), [prompt], sampling=GREEDY, max_new_tokens=24)
            for token in step.emitted
        ]
        before, prompt = len(prompt), [*prompt, *answer, *range(7)]
        whole, nothing = Decoder(network), Draft.empty(1, torch.device("cpu"))
        whole.begin([prompt], GREEDY)
        kept.begin([prompt], GREEDY)
        assert kept.reused >= before
        assert torch.equal(kept.score(nothing).logits(), whole.score(nothing).logits())
        kept.end()
