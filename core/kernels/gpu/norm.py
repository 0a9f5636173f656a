"""RMSNorm of the residual stream, with the addition of a sublayer's output before it, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.core.kernels.gpu import launched_on


def add_norm_(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """x [N, D] += delta [N, D], and the RMSNorm of the sum, times `weight` [D], into `out` [N, D]; returns x."""
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    if rows:
        with launched_on(x):
            _add_norm[(rows,)](
                x,
                x if delta is None else delta,
                weight,
                out,
                size,
                eps,
                ADDS=delta is not None,
                BLOCK=block,
                num_warps=min(max(block // 512, 1), 16),
            )
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(x, delta, weight, out, size, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + start + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + start + place, value.to(x.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
    value = value * scale * tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + place, value.to(out.dtype.element_ty), mask=inside)
