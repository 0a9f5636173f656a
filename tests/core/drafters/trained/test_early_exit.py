"""Early exits: what a head foresees after the target's first layers is the same in any batch."""

from __future__ import annotations

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.trained.early_exit import Early, KangarooHead
from outrider.core.engine.linear import fastest
from outrider.core.engine.network import random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.kernels import native
from outrider.core.tree import Tree

SHAPE = Config(
    hidden_size=192, intermediate_size=256, layers=4, heads=6, kv_heads=3, head_dim=32, vocabulary=512, context=256
)
PROMPTS = [[(7 * place + row) % SHAPE.vocabulary for place in range(length)] for row, length in ((0, 21), (1, 38))]


@pytest.mark.skipif(native.library() is None, reason="no compiler, or no AVX2")
def test_kangaroos_layer_is_the_same_in_any_batch() -> None:
    target = Decoder(random_network(SHAPE, 3, dtype=torch.bfloat16).map_linears(fastest))
    torch.manual_seed(0)
    learned = KangarooHead(Decoder(random_network(SHAPE, 3)), exit=2)

    def foreseen(rows: list[int]) -> torch.Tensor:
        head = Early(learned.drafts(target))
        prompts = [PROMPTS[row] for row in rows]
        head.self_draftable = target
        head.set_hidden(target.begin(prompts, Sampling(), learned.needs).hidden)
        head.begin(prompts, Sampling())
        logits = [head.score(Draft.empty(len(rows))).logits()]
        for size in (1, 2, 3):
            tokens = torch.tensor([[5, 9, 11], [8, 1, 4]])[rows, :size]
            logits.append(head.score(Draft.guess(tokens, Tree.chain(size), tokens >= 0), size - 1).logits())
        return torch.cat(logits, 1).float()

    both = foreseen([0, 1])
    for row in (0, 1):
        assert torch.equal(foreseen([row])[0], both[row])
