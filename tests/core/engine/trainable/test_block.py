"""Trainable modules agree with the target's layers, with and without a cache, and gradients reach all weights."""

from __future__ import annotations

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.network import random_network
from outrider.core.engine.trainable import block as block_module
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, for_inference, weight_bytes
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
    positions = torch.arange(count)
    cos, sin = Angles(config)(positions[None], count, torch.float64)
    return AttentionMask(cos, sin, (positions <= positions[:, None])[None])


@pytest.mark.parametrize("graded", [False, True], ids=["drafting", "training"])
@pytest.mark.parametrize("config", [PLAIN, BIASED], ids=["plain", "biased"])
def test_a_copied_layer_agrees_with_the_targets(config: Config, graded: bool) -> None:
    model = Decoder(random_network(config, 3, dtype=torch.float64))
    tokens = [4, 9, 1, 7, 7, 2]
    hidden = model.begin([[*tokens, 0]], Sampling(), frozenset({"embedding", "layer.0", "layer.1"})).hidden
    with torch.set_grad_enabled(graded):
        for index, tap in enumerate(("embedding", "layer.0")):
            block = Block(config).double()
            block.copy(model.network.layers[index])
            block.double()
            for name, parameter in block.named_parameters():
                assert parameter.dtype == torch.float64, name
            states = block(hidden[tap], causal(config, len(tokens)))
            torch.testing.assert_close(states, hidden[f"layer.{index}"], atol=1e-5, rtol=1e-5)


def test_a_block_agrees_with_and_without_a_cache() -> None:
    block = Block(PLAIN).double().eval()
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    lengths = (9, 4, 6)
    with torch.no_grad():
        whole = block(x, causal(PLAIN, 9))
        cache = Cache((1, 2 * PLAIN.kv_heads, PLAIN.head_dim), torch.float64, torch.device("cpu"))
        cache.begin([[1] * length for length in lengths])
        angles = Angles(PLAIN)
        for start, stop in ((0, 5), (5, 8)):
            _, layout = cache.prompt_chunk(start, stop)
            block(
                x[:, start:stop], AttentionMask(*angles(layout.positions, 9, x.dtype), layout.mask, cache.store, layout)
            )
        cache.set_prefilled([[1] * length for length in lengths])
        _, layout = cache.plan(Draft.empty(3), None)
        last = torch.stack([x[row, length - 1] for row, length in enumerate(lengths)])[:, None]
        states = block(last, AttentionMask(*angles(layout.positions, 20, x.dtype), layout.mask, cache.store, layout))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(states[row, 0], whole[row, length - 1], atol=1e-12, rtol=0)


def test_context_keys_and_values_are_attended() -> None:
    block = Block(PLAIN).double().eval()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    with torch.no_grad():
        whole = block(x, causal(PLAIN, 7))
        cos, sin = Angles(PLAIN)(torch.arange(7)[None], 7, x.dtype)
        assert block.attention_norm is not None
        context = block.attention.read(block.attention_norm(x[:, :4]), AttentionMask(cos[:, :4], sin[:, :4], None))
        mask = torch.cat([torch.ones(3, 4), torch.ones(3, 3).tril()], 1).bool()[None]
        states = block(x[:, 4:], AttentionMask(cos[:, 4:], sin[:, 4:], mask, context=[context]))
    torch.testing.assert_close(states, whole[:, 4:], atol=1e-12, rtol=0)


def test_gradients_reach_every_weight() -> None:
    block = Block(BIASED).double()
    block(torch.randn(2, 5, 16, dtype=torch.float64), causal(BIASED, 5)).sum().backward()
    assert all(weight.grad is not None and bool(weight.grad.abs().sum() > 0) for weight in block.parameters())


def test_fused_attention_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Block(BIASED).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    cos, sin = Angles(BIASED)(torch.arange(5)[None], 5, torch.float64)
    found: list[list[torch.Tensor]] = []
    calls: list[int] = []
    kernel = block_module._causal

    def counted(*given: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return kernel(*given)

    monkeypatch.setattr(block_module, "_causal", counted)
    for fused in (False, True):
        monkeypatch.setattr(block_module, "_has_fused", lambda _, fused=fused: fused)
        states = block(x, block_module.causal_mask(5, cos, sin))
        found.append([states, *torch.autograd.grad(states.square().sum(), list(block.parameters()))])
    assert len(calls) == 1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tied", [True, False])
def test_the_shared_embedding_is_the_targets(tied: bool) -> None:
    config = Config(
        vocabulary=23, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=8, tied=tied
    )
    network = random_network(config, 1)
    x = torch.randn(3, 16)
    full, reduced = SharedEmbedding(network), SharedEmbedding(network, (7, 2, 20))
    torch.testing.assert_close(full.logits(x), network.logits(x))
    torch.testing.assert_close(reduced.logits(x), network.logits(x)[:, [7, 2, 20]])
    assert reduced.local(torch.tensor([2, 3, 20])).tolist() == [1, -1, 2]
    assert not full.state_dict() and set(reduced.state_dict()) == {"vocabulary"}
    assert full.embedding.data_ptr() == network.embedding.data_ptr()
    with torch.no_grad():  # as loading a checkpoint does
        reduced.vocabulary.copy_(torch.tensor([1, 2, 3]))
    torch.testing.assert_close(reduced.logits(x), network.logits(x)[:, [1, 2, 3]])
    own = SharedEmbedding(network, (7, 2), own=True)
    torch.testing.assert_close(own.logits(x), network.logits(x)[:, [7, 2]])
    assert set(own.state_dict()) == {"vocabulary", "own.weight"}
    for ids in ((1, 1), (23,), (-1,)):
        with pytest.raises(InvalidOption, match="each once"):
            SharedEmbedding(network, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_converted_for_inference_agree(dtype: torch.dtype) -> None:
    module = torch.nn.Sequential(Matrix(64, 128, bias=True), Norm(128), Matrix(128, 32))
    x = torch.randn(2, 5, 64)
    expected = module(x)
    converted = for_inference(module, dtype, torch.device("cpu"))
    itemsize = 1 if native.tiles((128, 64), dtype, torch.device("cpu")) else dtype.itemsize
    assert weight_bytes(converted) == pytest.approx((64 * 128 + 128 + 128 * 32) * itemsize, rel=0.1)
    torch.testing.assert_close(converted(x.to(dtype)).float(), expected, atol=0.05, rtol=0.05)
