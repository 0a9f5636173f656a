"""Parts that learn: they compute what the target's own layers compute, the same with a cache as without, and pass
gradients on."""

from __future__ import annotations

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.network import random_network
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import Words, settled, weight_bytes
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import InvalidOption
from outrider.core.kernels import native

PLAIN = Config(vocabulary=23, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=4, intermediate_size=24)
BIASED = Config(
    vocabulary=23, hidden_size=16, layers=2, heads=2, kv_heads=2, head_dim=6, intermediate_size=20, attention_bias=True,
    mlp_bias=True, out_bias=True, qk_norm=True, tied=False, rope_theta=500.0,
)  # fmt: skip


def causal(config: Config, count: int) -> AttentionMask:
    places = torch.arange(count)
    cos, sin = Angles(config)(places[None], count, torch.float64)
    return AttentionMask(cos, sin, (places <= places[:, None])[None])


@pytest.mark.parametrize("graded", [False, True], ids=["drafting", "training"])
@pytest.mark.parametrize("config", [PLAIN, BIASED], ids=["plain", "biased"])
def test_a_copied_layer_computes_what_the_targets_does(config: Config, graded: bool) -> None:
    model = Decoder(random_network(config, 3, dtype=torch.float64))
    tokens = [4, 9, 1, 7, 7, 2]
    hidden = model.begin([[*tokens, 0]], Sampling(), frozenset({"embedding", "layer.0", "layer.1"})).hidden
    with torch.set_grad_enabled(graded):
        for index, tap in enumerate(("embedding", "layer.0")):
            block = Block(config).double()
            block.copy(model.network.layers[index])
            block.double()
            for name, one in block.named_parameters():  # the copies are exact
                assert one.dtype == torch.float64, name
            found = block(hidden[tap], causal(config, len(tokens)))
            torch.testing.assert_close(found, hidden[f"layer.{index}"], atol=1e-5, rtol=1e-5)


def test_with_a_cache_it_computes_the_same() -> None:
    block = Block(PLAIN).double().eval()
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    lengths = (9, 4, 6)
    with torch.no_grad():
        whole = block(x, causal(PLAIN, 9))
        cache = Cache((1, 2 * PLAIN.kv_heads, PLAIN.head_dim), torch.float64, torch.device("cpu"))
        cache.begin([[1] * length for length in lengths])
        angles = Angles(PLAIN)
        for start, stop in ((0, 5), (5, 8)):
            _, places = cache.prompt_chunk(start, stop)
            block(
                x[:, start:stop], AttentionMask(*angles(places.positions, 9, x.dtype), places.mask, cache.store, places)
            )
        cache.set_prefilled([[1] * length for length in lengths])
        _, places = cache.plan(Draft.empty(3), None)
        last = torch.stack([x[row, length - 1] for row, length in enumerate(lengths)])[:, None]
        found = block(last, AttentionMask(*angles(places.positions, 20, x.dtype), places.mask, cache.store, places))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(found[row, 0], whole[row, length - 1], atol=1e-12, rtol=0)


def test_what_comes_before_in_a_context_is_seen() -> None:
    block = Block(PLAIN).double().eval()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    with torch.no_grad():
        whole = block(x, causal(PLAIN, 7))
        cos, sin = Angles(PLAIN)(torch.arange(7)[None], 7, x.dtype)
        assert block.attention_norm is not None
        before = block.attention.read(block.attention_norm(x[:, :4]), AttentionMask(cos[:, :4], sin[:, :4], None))
        mask = torch.cat([torch.ones(3, 4), torch.ones(3, 3).tril()], 1).bool()[None]
        behind = block(x[:, 4:], AttentionMask(cos[:, 4:], sin[:, 4:], mask, context=[before]))
    torch.testing.assert_close(behind, whole[:, 4:], atol=1e-12, rtol=0)


def test_gradients_reach_every_weight() -> None:
    block = Block(BIASED).double()
    block(torch.randn(2, 5, 16, dtype=torch.float64), causal(BIASED, 5)).sum().backward()
    assert all(one.grad is not None and bool(one.grad.abs().sum() > 0) for one in block.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_words_are_the_teachers(tied: bool) -> None:
    config = Config(
        vocabulary=23, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=8, tied=tied
    )
    network = random_network(config, 1)
    x = torch.randn(3, 16)
    every, some = Words(network), Words(network, (7, 2, 20))
    torch.testing.assert_close(every.logits(x), network.logits(x))
    torch.testing.assert_close(some.logits(x), network.logits(x)[:, [7, 2, 20]])
    assert some.local(torch.tensor([2, 3, 20])).tolist() == [1, -1, 2]
    assert not every.state_dict() and set(some.state_dict()) == {"vocabulary"}
    assert every.embedding.data_ptr() == network.embedding.data_ptr()
    with torch.no_grad():  # a checkpoint says which words they are
        some.vocabulary.copy_(torch.tensor([1, 2, 3]))
    torch.testing.assert_close(some.logits(x), network.logits(x)[:, [1, 2, 3]])
    own = Words(network, (7, 2), own=True)
    torch.testing.assert_close(own.logits(x), network.logits(x)[:, [7, 2]])
    assert set(own.state_dict()) == {"vocabulary", "own.weight"}
    for ids in ((1, 1), (23,), (-1,)):
        with pytest.raises(InvalidOption, match="each once"):
            Words(network, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settled_parts_compute_the_same(dtype: torch.dtype) -> None:
    part = torch.nn.Sequential(Matrix(64, 128, bias=True), Norm(128), Matrix(128, 32))
    x = torch.randn(2, 5, 64)
    wanted = part(x)
    ready = settled(part, dtype, torch.device("cpu"))
    each = 1 if native.tiles((128, 64), dtype, torch.device("cpu")) else dtype.itemsize  # and a scale for each output
    assert weight_bytes(ready) == pytest.approx((64 * 128 + 128 + 128 * 32) * each, rel=0.1)
    torch.testing.assert_close(ready(x.to(dtype)).float(), wanted, atol=0.05, rtol=0.05)
