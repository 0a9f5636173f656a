"""Weights in 8 or 4 bits with torchao's GPU kernels; the package is optional.

int8 has a scale per output, int4 a scale and a zero point per 32 weights, in the tile layout of torch's own kernel.
Independent of what the weights are for.
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


def supports(weight: Tensor, bits: int) -> bool:
    """Whether torchao has a kernel for such weights on their device."""
    if weight.device.type != "cuda" or not installed():
        return False
    return bits == 8 or (weight.dtype == torch.bfloat16 and weight.shape[0] % 8 == 0 and weight.shape[1] % 1024 == 0)


class TorchaoLinear:  # pragma: CUDA
    """Weights [out, in] in torchao's format."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        self.dtype, self.bias = weight.dtype, bias
        with torch.device("meta"):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        module = nn.Sequential(linear)  # quantize_ replaces the layers of a module
        config: Any = Int8WeightOnlyConfig()
        if bits == 4:
            config = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
        quantize_(module, config)
        self._linear = module[0]
        quantized: Any = self._linear.weight
        parts = [getattr(quantized, name) for name in quantized.tensor_data_names]
        self.weight_bytes = sum(part.numel() * part.element_size() for part in parts)

    @property
    def weight(self) -> Tensor:
        quantized: Any = self._linear.weight
        weight: Tensor = quantized.dequantize()
        return weight.to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._linear(x)
        return out
