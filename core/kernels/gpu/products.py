"""Products of few rows with weights that are read once: up and gate with SwiGLU, and weights of 8 or 4 bits that are
dequantised inside. More rows are better served by torch's products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.kernels.gpu import launched_on

MAX_ROWS = 64
_INTERPRETED = bool(triton.knobs.runtime.interpret)


def swiglu(up_gate: Tensor) -> Tensor:
    """[N, 2 M], up beside gate -> up silu(gate) [N, M]."""
    rows, middle = len(up_gate), up_gate.shape[1] // 2
    out = torch.empty(rows, middle, dtype=up_gate.dtype, device=up_gate.device)
    if out.numel():
        with launched_on(out):
            _swiglu[(rows, triton.cdiv(middle, 1024))](up_gate, out, middle, BLOCK=1024, num_warps=4)
    return out


def swiglu_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, D] and weights [2 M, D] of up and gate -> up silu(gate) [N, M], N up to MAX_ROWS."""
    return _product(x, weight, bias, weight, weight, len(weight) // 2, "gated", 1)


def int8_product(x: Tensor, ints: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, D], weights [M, D] int8 with one scale an output -> [N, M], N up to MAX_ROWS."""
    return _product(x, ints, bias, scales, scales, len(ints), "int8", 1)


def int4_product(x: Tensor, nibbles: Tensor, scales: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, D], weights [M, D / 2] uint8 with two numbers each, the first in the low half; each group of inputs has a
    scale and an offset [M, groups]: w = (n - 8) scale + offset -> [N, M], N up to MAX_ROWS."""
    group = x.shape[1] // scales.shape[1]
    return _product(x, nibbles, bias, scales, offsets, len(nibbles), "int4", group)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor, offsets: Tensor, outputs: int, kind: str, group: int
) -> Tensor:
    rows, size = x.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    narrow = x.dtype.itemsize == 2
    height = max(triton.next_power_of_2(rows), 16)
    width = 16 if outputs < 8192 else 32
    depth = 256 if narrow and height == 16 else 128 if narrow else 64
    with launched_on(x):
        _few_rows[(triton.cdiv(outputs, width),)](
            x,
            weight,
            x if bias is None else bias,
            scales,
            offsets,
            out,
            rows,
            size,
            outputs,
            KIND={"gated": 0, "int8": 1, "int4": 2}[kind],
            BIAS=bias is not None,
            GROUP=group,
            HEIGHT=height,
            WIDTH=width,
            DEPTH=min(depth, max(triton.next_power_of_2(size), 32)),
            WIDEN=_INTERPRETED,
            num_warps=4,
            num_stages=3,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(up_gate, out, middle, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < middle
    up = tl.load(up_gate + row * 2 * middle + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(up_gate + row * 2 * middle + middle + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * middle + place, (up * gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _few_rows(  # type: ignore[no-untyped-def]
    x, weight, bias, scales, offsets, out, rows, size, outputs, KIND: tl.constexpr, BIAS: tl.constexpr,
    GROUP: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    real = output < outputs
    row = tl.arange(0, HEIGHT)
    live = row < rows
    given = x + row.to(tl.int64)[:, None] * size
    line = output.to(tl.int64)[None, :]
    sums = tl.zeros((HEIGHT, WIDTH), tl.float32)
    gates = tl.zeros((HEIGHT, WIDTH), tl.float32)
    if KIND == 2:
        half = size // 2
        for first in range(0, half, DEPTH // 2):
            place = first + tl.arange(0, DEPTH // 2)
            inside = place < half
            known = inside[:, None] & real[None, :]
            two = tl.load(weight + line * half + place[:, None], mask=known, other=0)
            at = line * (size // GROUP) + (2 * place // GROUP)[:, None]
            scale = tl.load(scales + at, mask=known, other=0.0).to(tl.float32)
            offset = tl.load(offsets + at, mask=known, other=0.0).to(tl.float32)
            even = ((two & 15).to(tl.float32) - 8) * scale + offset
            odd = ((two >> 4).to(tl.float32) - 8) * scale + offset
            shown = live[:, None] & inside[None, :]
            left = tl.load(given + 2 * place[None, :], mask=shown, other=0.0)
            right = tl.load(given + 2 * place[None, :] + 1, mask=shown, other=0.0)
            if WIDEN:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            sums += tl.dot(left, even.to(left.dtype), input_precision="ieee")
            sums += tl.dot(right, odd.to(right.dtype), input_precision="ieee")
    else:
        for first in range(0, size, DEPTH):
            place = first + tl.arange(0, DEPTH)
            inside = place < size
            known = inside[:, None] & real[None, :]
            left = tl.load(given + place[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            if WIDEN:
                left = left.to(tl.float32)
            right = tl.load(weight + line * size + place[:, None], mask=known, other=0)
            sums += tl.dot(left, right.to(left.dtype), input_precision="ieee")
            if KIND == 0:
                right = tl.load(weight + (line + outputs) * size + place[:, None], mask=known, other=0)
                gates += tl.dot(left, right.to(left.dtype), input_precision="ieee")
    if KIND == 1:
        sums *= tl.load(scales + output, mask=real, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        sums += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[None, :]
    if KIND == 0:
        if BIAS:
            gates += tl.load(bias + outputs + output, mask=real, other=0.0).to(tl.float32)[None, :]
        sums = sums * gates / (1 + tl.exp(-gates))
    into = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(into, sums.to(out.dtype.element_ty), mask=live[:, None] & real[None, :])
