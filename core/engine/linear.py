"""Linear layers for inference: weights as they are, or converted once to the fastest layout for this processor.

With oneDNN's layout, products with 16-bit weights run at memory bandwidth for up to 32 rows; plain `F.linear`
rearranges the weights on every call. Independent of what the weights are for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.kernels import native

_FEW = 12  # tokens up to which the compiled product is used; from 16 on torch's is faster


class Linear(Protocol):
    """x [N, in] -> [N, out], for any storage of the weights."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def weight(self) -> Tensor: ...  # [out, in]; a dequantised or rearranged copy if stored in another form
    @property
    def bias(self) -> Tensor | None: ...
    def __call__(self, x: Tensor) -> Tensor: ...


def size(*parts: Tensor | None) -> int:
    """Bytes of the tensors' elements."""
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


@dataclass(frozen=True, eq=False)
class Dense:
    """A plain weight tensor."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    @property
    def weight_bytes(self) -> int:
        return size(self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Selected:
    """An output layer over the tokens `kept` [N] only; the others have logits of -inf."""

    bias = None

    def __init__(self, rows: Linear, kept: Tensor, vocabulary: int) -> None:
        self.rows, self.kept, self.vocabulary = rows, kept, vocabulary
        self.weight_bytes = rows.weight_bytes

    @property
    def weight(self) -> Tensor:
        """[V, D], zero in the rows of other tokens."""
        rows = self.rows.weight
        return rows.new_zeros(self.vocabulary, rows.shape[1]).index_copy_(0, self.kept, rows)

    def spread(self, logits: Tensor) -> Tensor:
        """[N, kept tokens] -> [N, V]."""
        return logits.new_full((len(logits), self.vocabulary), -math.inf).index_copy_(1, self.kept, logits)

    def __call__(self, x: Tensor) -> Tensor:
        return self.spread(self.rows(x))


class Streamed(Dense):
    """32-bit weights; up to `_FEW` tokens are computed by the compiled product, which reads the weights once."""

    def __call__(self, x: Tensor) -> Tensor:
        return native.few(x, self.weight, self.bias) if 0 < x.shape[0] <= _FEW else super().__call__(x)


class Packed:
    """16-bit weights in oneDNN's layout, for CPUs with 16-bit instructions."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self.bias = bias
        self.weight_bytes = size(weight, bias)

    @property
    def weight(self) -> Tensor:
        dense: Tensor = self._packed.to_dense()
        return dense

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._product(x, self._packed, self.bias, "none", [], "")
        return out


class Widened:
    """16-bit weights stored in 32 bits, for CPUs where 16-bit products are a hundred times slower."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._wide, self._dtype, self.bias = weight.float(), weight.dtype, bias
        self._wide_bias = None if bias is None else bias.float()
        self.weight_bytes = size(self._wide, bias)

    @property
    def weight(self) -> Tensor:
        return self._wide.to(self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self._wide, self._wide_bias).to(self._dtype)


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's layout is faster for such weights on this machine."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    try:
        if dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        if dtype == torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # private functions of torch, absent in some versions
        pass
    return False


def fastest(linear: Linear) -> Linear:
    """The same layer in the fastest layout for this machine."""
    if isinstance(linear, Dense) and native.tiles(linear.weight.shape, linear.weight.dtype, linear.weight.device):
        return native.Tiled(linear.weight, None, None, linear.bias)
    if isinstance(linear, Dense) and native.streams(linear.weight.dtype, linear.weight.device):
        return Streamed(linear.weight.contiguous(), None if linear.bias is None else linear.bias.contiguous())
    if isinstance(linear, Dense) and packs(linear.weight.dtype, linear.weight.device):
        return Packed(linear.weight, linear.bias)
    if isinstance(linear, Dense) and linear.weight.device.type == "cpu" and linear.weight.element_size() == 2:
        return Widened(linear.weight, linear.bias)
    return linear
