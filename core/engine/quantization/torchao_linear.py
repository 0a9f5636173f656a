"""Weights in 8 or 4 bits through torchao, whose kernels read them as they are on a GPU; the package is optional.

int8 has a scale for each output, int4 a scale and a zero point for every 32 weights, in the tiles of the kernel that
torch itself brings along. Knows shapes, nothing of what the weights are for.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

GROUP = 32


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def fits(weight: Tensor, bits: int) -> bool:
    """Is there a kernel for such weights here?"""
    if weight.device.type != "cuda" or not installed():
        return False
    return bits == 8 or (weight.dtype == torch.bfloat16 and weight.shape[0] % 8 == 0 and weight.shape[1] % 1024 == 0)


class Ao:  # pragma: CUDA
    """[out, in] as torchao keeps it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        self.dtype, self.bias = weight.dtype, bias
        with torch.device("meta"):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        holder = nn.Sequential(linear)
        config: Any = Int8WeightOnlyConfig()
        if bits == 4:
            config = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
        quantize_(holder, config)
        self._linear = holder[0]
        kept: Any = self._linear.weight
        parts = [getattr(kept, name) for name in kept.tensor_data_names]
        self.weight_bytes = sum(part.numel() * part.element_size() for part in parts)

    @property
    def weight(self) -> Tensor:
        kept: Any = self._linear.weight
        found: Tensor = kept.dequantize()
        return found.to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = self._linear(x)
        return found
