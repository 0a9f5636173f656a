"""Blocks that learn through code of our own learn what they learn through torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core.engine.native import training_block
from outrider.core.engine.trainable.block import Angles, Block, each_before
from outrider.core.engine.types import Config

here = pytest.mark.skipif(
    training_block.library() is None, reason="no compiler, or no AVX-512 BF16, for code of our own"
)


def config(**other: object) -> Config:
    sizes = {"hidden_size": 64, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 96}
    return Config(**{"vocabulary": 10, **sizes, **other})  # type: ignore[arg-type]


def gradients(block: Block, form: Config, x: Tensor, fast: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What comes out, and the gradients of what went in and of all weights."""
    cos, sin = Angles(form)(torch.arange(x.shape[1])[None], x.shape[1], torch.float32)
    into = x.clone().requires_grad_()
    block.zero_grad()
    with monkeypatch.context() as patch:
        if not fast:
            patch.setattr(training_block, "library", lambda: None)
        with torch.autocast("cpu", torch.bfloat16):
            assert block.trains_in_kernels(into, each_before(x.shape[1], cos, sin)) == fast
            out = block(into, each_before(x.shape[1], cos, sin))
        wanted = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out.float() * wanted).sum().backward()
    found = [one.grad for one in (into, *block.parameters())]
    assert all(one is not None for one in found)
    return [out.detach().float(), *(one.clone() for one in found if one is not None)]


@here
@pytest.mark.parametrize("other", [{}, {"kv_heads": 4}, {"qk_norm": True}, {"kv_heads": 1, "intermediate_size": 112}])
@pytest.mark.parametrize("count", [1, 17, 40])
def test_the_same_is_learned(other: dict[str, object], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    form = config(**other)
    block = Block(form)
    with torch.no_grad():
        for one in block.parameters():
            if one.dim() == 1 or one.shape == (form.heads + form.kv_heads, form.head_dim):
                one.add_(0.3 * torch.randn(one.shape))  # norms that matter
    x = torch.randn(3, count, form.hidden_size)
    ours = gradients(block, form, x, True, monkeypatch)
    theirs = gradients(block, form, x, False, monkeypatch)
    exact = gradients(block.double(), form, x.double(), False, monkeypatch)
    for mine, other_, right in zip(ours, theirs, exact, strict=True):
        mistake, usual = ((one - right).norm() / right.norm().clamp(min=1e-3) for one in (mine, other_))
        assert mistake < 0.02
        assert mistake < 1.5 * usual + 1e-3, "no further from the truth than torch in 16 bits"


@here
def test_what_is_not_such_a_pass_goes_through_torch() -> None:
    form = config()
    block, x = Block(form), torch.randn(1, 5, form.hidden_size)
    cos, sin = Angles(form)(torch.arange(5)[None], 5, torch.float32)
    attn_mask = each_before(5, cos, sin)
    assert not block.trains_in_kernels(x, attn_mask), "in 32 bits"
    with torch.autocast("cpu", torch.bfloat16):
        assert block.trains_in_kernels(x, attn_mask)
        attn_mask.causal = False
        assert not block.trains_in_kernels(x, attn_mask), "another mask"
        with torch.no_grad():
            attn_mask.causal = True
            assert not block.trains_in_kernels(x, attn_mask), "nothing is learned"
        assert not Block(config(attention_bias=True)).trains_in_kernels(x, attn_mask), "biases"
