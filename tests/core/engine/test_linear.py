"""Products laid out for one processor or another: all say what plain ones say."""

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
def test_weights_of_16_bits_are_widened_where_nothing_is_quick_with_them(
    bias: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    for name in ("tiles", "streams"):
        monkeypatch.setattr(native, name, lambda *_: False)
    monkeypatch.setattr(linear, "packs", lambda *_: False)
    made = fastest(Dense(weight, bias))
    assert isinstance(made, Widened) and torch.equal(made.weight, weight) and made.bias is bias
    wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()
    assert torch.equal(made(x), wanted) and made(x).dtype == torch.bfloat16
    assert made.weight_bytes == 4 * weight.numel() + (0 if bias is None else 16)
    assert fastest(made) is made


def test_what_packs_says_what_it_says_unpacked() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        if packs(dtype, CPU):
            weight, x = torch.randn(8, 16).to(dtype), torch.randn(3, 16).to(dtype)
            made = Packed(weight)
            assert torch.equal(made.weight, weight) and made.weight_bytes == 2 * weight.numel()
            torch.testing.assert_close(made(x), F.linear(x, weight), rtol=0.05, atol=0.05)
    assert not packs(torch.float32, CPU) and not packs(torch.bfloat16, torch.device("meta"))


def test_a_torch_that_does_not_say_what_it_packs_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Older())
    assert not packs(torch.bfloat16, CPU) and not packs(torch.float16, CPU)


def test_products_alone_are_timed_for_every_network() -> None:
    shape = Config(
        vocabulary=32, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=32, rope_theta=1e4,
        norm_eps=1e-5, context=64,
    )  # fmt: skip
    made = {name: random_network(shape, dtype=dtype) for name, dtype in (("a", torch.float32), ("b", torch.float64))}
    found = matmul_timing.time_products(made, (1, 3), rounds=2)
    assert found.keys() == made.keys() and all(set(one) == {1, 3} for one in found.values())
