"""Top-k and top-p of whole vocabularies without sorting them: a search for the least value that is kept, two bits of
its binary form at a time.

One program reads a row 18 times: on an H200 one row or sixteen of 128,256 take 0.5 ms, where torch sorts one in 0.07 ms
and sixteen in 0.46 ms. Sampling therefore uses torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.kernels.gpu import launched_on

_BLOCK = 4096


def top_k(logits: Tensor, count: int) -> Tensor:
    """The `count` largest of logits [N, V]; the others become -inf. Of equal ones the first are kept."""
    return _cut(logits, float(count), mass=False)


def top_p(probs: Tensor, share: float) -> Tensor:
    """Of probabilities [N, V] the fewest that hold `share`; the others become 0. Of equal ones the first are kept."""
    return _cut(probs, share, mass=True)


def _cut(values: Tensor, limit: float, mass: bool) -> Tensor:
    values = values.contiguous()
    out = torch.empty_like(values)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(values.shape[1]))
        with launched_on(values):
            _keep_largest[(len(values),)](
                values, out, values.shape[1], limit, 0.0 if mass else -torch.inf, MASS=mass, BLOCK=block, num_warps=8
            )
    return out


@triton.jit
def _ordered(value):  # type: ignore[no-untyped-def]
    """Integers in the order of 32-bit floats."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _keep_largest(values, out, size, limit, rest, MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    values += row * size
    out += row * size
    lanes = tl.arange(0, BLOCK)
    least = -2147483648  # of what is kept: the largest value such that it and all above reach the limit
    step = 1073741824
    for _ in range(16):
        one = tl.zeros((BLOCK,), tl.float32)
        two = tl.zeros((BLOCK,), tl.float32)
        three = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, size, BLOCK):
            inside = start + lanes < size
            value = tl.load(values + start + lanes, mask=inside, other=0.0).to(tl.float32)
            weight = tl.where(inside, value if MASS else 1.0, 0.0)
            key = _ordered(value)
            one += tl.where(key >= least + step, weight, 0.0)
            two += tl.where(key >= least + step + step, weight, 0.0)
            three += tl.where(key >= least + step + step + step, weight, 0.0)
        digit = (tl.sum(one, 0) >= limit).to(tl.int32)
        digit += (tl.sum(two, 0) >= limit).to(tl.int32)
        digit += (tl.sum(three, 0) >= limit).to(tl.int32)
        least += digit * step
        step = step // 4
    above = tl.zeros((BLOCK,), tl.float32)
    equal = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + lanes < size
        value = tl.load(values + start + lanes, mask=inside, other=0.0).to(tl.float32)
        key = _ordered(value)
        above += tl.where(inside & (key > least), value if MASS else 1.0, 0.0)
        equal = tl.maximum(equal, tl.where(inside & (key == least), value if MASS else 1.0, 0.0))
    left = limit - tl.sum(above, 0)  # what those equal to the least have to hold
    each = tl.max(equal, 0)
    before = 0
    for start in range(0, size, BLOCK):
        inside = start + lanes < size
        value = tl.load(values + start + lanes, mask=inside, other=0.0).to(tl.float32)
        key = _ordered(value)
        ties = (inside & (key == least)).to(tl.int32)
        earlier = before + tl.cumsum(ties, 0) - ties
        kept = (key > least) | ((ties > 0) & (earlier.to(tl.float32) * each < left))
        tl.store(out + start + lanes, tl.where(kept, value, rest).to(out.dtype.element_ty), mask=inside)
        before += tl.sum(ties, 0)
