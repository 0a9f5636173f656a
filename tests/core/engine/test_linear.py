"""Weight layouts for different processors agree with plain products; the timing of products covers every network."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from outrider.core.engine import linear, matmul_timing
from outrider.core.engine.linear import Dense, Packed, Widened, fastest, packs
from outrider.core.engine.network import random_network
from outrider.core.engine.types import Config
from outrider.core.kernels import native

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [None, torch.arange(8).bfloat16()])
def test_16_bit_weights_are_stored_in_32_bits_without_fast_16_bit_products(
    bias: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    for name in ("tiles", "streams"):
        monkeypatch.setattr(native, name, lambda *_: False)
    monkeypatch.setattr(linear, "packs", lambda *_: False)
    wide = fastest(Dense(weight, bias))
    assert isinstance(wide, Widened) and torch.equal(wide.weight, weight) and wide.bias is bias
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()
    assert torch.equal(wide(x), expected) and wide(x).dtype == torch.bfloat16
    assert wide.weight_bytes == 4 * weight.numel() + (0 if bias is None else 16)
    assert fastest(wide) is wide


def test_packed_weights_agree_with_plain_ones() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        if packs(dtype, CPU):
            weight, x = torch.randn(8, 16).to(dtype), torch.randn(3, 16).to(dtype)
            packed = Packed(weight)
            assert torch.equal(packed.weight, weight) and packed.weight_bytes == 2 * weight.numel()
            torch.testing.assert_close(packed(x), F.linear(x, weight), rtol=0.05, atol=0.05)
    assert not packs(torch.float32, CPU) and not packs(torch.bfloat16, torch.device("meta"))


def test_nothing_is_packed_if_torch_lacks_the_private_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherVersion:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    monkeypatch.setattr(torch.ops, "mkldnn", OtherVersion())
    assert not packs(torch.bfloat16, CPU) and not packs(torch.float16, CPU)


def test_products_are_timed_for_every_network() -> None:
    shape = Config(
        vocabulary=32, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=32, rope_theta=1e4,
        norm_eps=1e-5, context=64,
    )  # fmt: skip
    networks = {
        name: random_network(shape, dtype=dtype) for name, dtype in (("a", torch.float32), ("b", torch.float64))
    }
    seconds = matmul_timing.time_products(networks, (1, 3), rounds=2)
    assert seconds.keys() == networks.keys() and all(set(times) == {1, 3} for times in seconds.values())
