"""Quantized weights: their rounding error, agreement of kernels and plain arithmetic, decoders that run on them."""

from __future__ import annotations

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.engine.linear import Dense, Linear, Packed, fastest, packs
from outrider.core.engine.network import random_network
from outrider.core.engine.quantization.quantize import Int4, Int8, SwitchByRows, quantize
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.kernels import native
from outrider.core.tree import Tree

SHAPE = Config(
    vocabulary=64, hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate_size=96, attention_bias=True
)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("kind", "bound"), [(Int8, 0.008), (Int4, 0.09)])
def test_the_rounding_error_is_small(kind: type[Int8] | type[Int4], bound: float) -> None:
    weight = noise(48, 96)
    error = (kind(weight).weight - weight).square().mean().sqrt()
    assert 0 < error < bound


@pytest.mark.parametrize("columns", [31, 40, 64])
def test_any_input_size_can_be_quantized(columns: int) -> None:
    for kind in (Int8, Int4):
        linear = kind(noise(7, columns), noise(7))
        torch.testing.assert_close(linear(noise(3, columns)), noise(3, columns) @ linear.weight.T + noise(7))


def test_weights_of_a_q4_1_gguf_are_represented_exactly() -> None:
    """Q4_1 has 16 evenly spaced levels per 32 weights, as Int4 has."""
    levels = torch.randint(0, 16, (32, 4, 32), generator=torch.Generator().manual_seed(1)).float()
    levels[..., 0], levels[..., 1] = 0, 15
    weight = (levels * noise(32, 4, 1).abs() + noise(32, 4, 1, seed=1)).view(32, 128)
    torch.testing.assert_close(Int4(weight).weight, weight, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [Int8, Int4, Packed])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_kernels_agree_with_the_dequantized_weights(kind: type[Int8] | type[Int4] | type[Packed], rows: int) -> None:
    if kind is Packed and not packs(torch.bfloat16, torch.device("cpu")):
        pytest.skip("this processor has no 16-bit products")
    linear = kind(noise(48, 96, dtype=torch.bfloat16), noise(48, dtype=torch.bfloat16))
    x = noise(rows, 96, dtype=torch.bfloat16, seed=2)
    expected = x.double() @ linear.weight.double().T + noise(48, dtype=torch.bfloat16).double()
    assert (linear(x).double() - expected).abs().max() < 0.02 * expected.abs().max()


def test_few_and_many_rows_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    network = quantize(random_network(SHAPE, dtype=torch.bfloat16), 4)
    linear: Linear = network.layers[0].down
    if not isinstance(linear, SwitchByRows):
        pytest.skip("this processor has no 16-bit products")
    assert isinstance(linear.few, Int4) and isinstance(linear.many, Packed)
    x = noise(8, 96, dtype=torch.bfloat16)
    one_by_one = torch.cat([linear(x[row : row + 1]) for row in range(8)])
    torch.testing.assert_close(linear(x), one_by_one, atol=0.03, rtol=0.03)
    assert linear.weight_bytes < linear.many.weight_bytes / 3


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_quantized_decoder_is_close_to_the_exact_one(bits: int, dtype: torch.dtype) -> None:
    network = random_network(SHAPE, dtype=dtype)
    exact, rounded = Decoder(network), Decoder(quantize(network, bits))
    chain = Draft.guess(torch.tensor([[4, 5, 6]]), Tree.chain(3), torch.ones(1, 3).bool())
    logits = []
    for model in (exact, rounded):
        model.begin([[1, 2, 3]], Sampling())
        logits.append(model.score(chain).logits().double())
    similar = torch.cosine_similarity(logits[0], logits[1], dim=-1)
    assert (similar > {8: 0.98, 4: 0.7}[bits]).all()
    assert rounded.weight_bytes < exact.weight_bytes * {8: 0.55, 4: 0.36}[bits]


def test_fastest_converts_16_bit_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(fastest(Dense(noise(4, 4))), Dense)
    weight = noise(48, 96, dtype=torch.bfloat16)
    if native.library() is not None:
        assert isinstance(fastest(Dense(weight)), native.Tiled)
    monkeypatch.setattr(native, "library", lambda: None)
    if packs(torch.bfloat16, torch.device("cpu")):
        packed = fastest(Dense(weight))
        assert isinstance(packed, Packed) and torch.equal(packed.weight, weight)
