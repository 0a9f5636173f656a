"""Training a block through the compiled kernels gives the outputs and gradients of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core.engine.native import training_block
from outrider.core.engine.trainable.block import Angles, Block, causal_mask
from outrider.core.engine.types import Config

needs_kernels = pytest.mark.skipif(training_block.library() is None, reason="no compiler, or no AVX-512 BF16")


def config(**other: object) -> Config:
    sizes = {"hidden_size": 64, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 96}
    return Config(**{"vocabulary": 10, **sizes, **other})  # type: ignore[arg-type]


def gradients(block: Block, cfg: Config, x: Tensor, fast: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The output, and the gradients of the input and of all weights."""
    cos, sin = Angles(cfg)(torch.arange(x.shape[1])[None], x.shape[1], torch.float32)
    leaf = x.clone().requires_grad_()
    block.zero_grad()
    with monkeypatch.context() as patch:
        if not fast:
            patch.setattr(training_block, "library", lambda: None)
        with torch.autocast("cpu", torch.bfloat16):
            assert block.trains_in_kernels(leaf, causal_mask(x.shape[1], cos, sin)) == fast
            out = block(leaf, causal_mask(x.shape[1], cos, sin))
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out.float() * direction).sum().backward()
    grads = [tensor.grad for tensor in (leaf, *block.parameters())]
    assert all(grad is not None for grad in grads)
    return [out.detach().float(), *(grad.clone() for grad in grads if grad is not None)]


@needs_kernels
@pytest.mark.parametrize("other", [{}, {"kv_heads": 4}, {"qk_norm": True}, {"kv_heads": 1, "intermediate_size": 112}])
@pytest.mark.parametrize("count", [1, 17, 40])
def test_outputs_and_gradients_agree_with_torch(
    other: dict[str, object], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    cfg = config(**other)
    block = Block(cfg)
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.dim() == 1 or parameter.shape == (cfg.heads + cfg.kv_heads, cfg.head_dim):
                parameter.add_(0.3 * torch.randn(parameter.shape))  # norms differ from 1
    x = torch.randn(3, count, cfg.hidden_size)
    ours = gradients(block, cfg, x, True, monkeypatch)
    theirs = gradients(block, cfg, x, False, monkeypatch)
    exact = gradients(block.double(), cfg, x.double(), False, monkeypatch)
    for mine, torchs, right in zip(ours, theirs, exact, strict=True):
        error, torch_error = ((grad - right).norm() / right.norm().clamp(min=1e-3) for grad in (mine, torchs))
        assert error < 0.02
        assert error < 1.5 * torch_error + 1e-3, "no less exact than torch in 16 bits"


@needs_kernels
def test_other_passes_go_through_torch() -> None:
    cfg = config()
    block, x = Block(cfg), torch.randn(1, 5, cfg.hidden_size)
    cos, sin = Angles(cfg)(torch.arange(5)[None], 5, torch.float32)
    attn_mask = causal_mask(5, cos, sin)
    assert not block.trains_in_kernels(x, attn_mask), "in 32 bits"
    with torch.autocast("cpu", torch.bfloat16):
        assert block.trains_in_kernels(x, attn_mask)
        attn_mask.causal = False
        assert not block.trains_in_kernels(x, attn_mask), "another mask"
        with torch.no_grad():
            attn_mask.causal = True
            assert not block.trains_in_kernels(x, attn_mask), "nothing is learned"
        assert not Block(config(attention_bias=True)).trains_in_kernels(x, attn_mask), "biases"
