"""Weight-only quantization: int8 with a scale per output row, int4 with a scale and an offset per 32 weights.

A pass of one token is bound by the bytes it reads, so few rows use weight-only kernels; for more rows those are slower
than 16-bit products, so the dequantized weights are also kept in 16 bits. On a GPU torchao's kernels are used, if
installed. Activations are not quantized, except by our kernels (`core/kernels/csrc/integers.h` and `vnni.h`). Without a
kernel, weights are dequantized on every call: correct, but slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.engine.linear import Linear, Packed, fastest, packs, size
from outrider.core.engine.network import Network
from outrider.core.engine.quantization import torchao_linear
from outrider.core.errors import unknown
from outrider.core.kernels import gpu, native

_GROUP = 32
_AT_ONCE = 1 << 20  # weights that are quantized at a time
_FEW = {8: 3, 4: 2}  # bits -> rows up to which the weight-only kernel is faster (measured)
_FEW_HEAD = 1  # the same for the output layer
_SHRINKS = (1.0, 0.94, 0.88, 0.82)  # fractions of the range tried for each 4-bit group; the smallest error wins


def _triton(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The kernels in Triton, where they are used."""
    if not gpu.usable(device, dtype):
        return None
    from outrider.core.kernels.gpu import functions  # pragma: CUDA

    return functions  # pragma: CUDA


class Int8:
    """Weights [out, in] in int8 with one scale per output."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.dtype, self.bias = weight.dtype, bias
        self.scales, self.ints = _by_rows(_quantize_rows, weight)
        self.weight_bytes = size(self.ints, self.scales, bias)
        self._kernel = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        self._triton = _triton(weight.device, weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.ints.to(self.dtype) * self.scales[:, None]

    def tiled(self, *, rounds: bool = False) -> native.Tiled:
        return native.Tiled(self.ints, self.scales, None, self.bias, rounds=rounds)

    def __call__(self, x: Tensor) -> Tensor:
        if self._triton is not None and len(x) <= self._triton.MAX_ROWS:
            product: Tensor = self._triton.int8_product(x, self.ints, self.scales, self.bias)
            return product
        if not self._kernel:
            return F.linear(x, self.weight, self.bias)
        out = torch._weight_int8pack_mm(x, self.ints, self.scales)
        return out if self.bias is None else out + self.bias


class Int4:
    """Weights [out, in] in 4 bits; groups of 32 inputs share a scale and an offset: w = (n - 8) scale + offset."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if native.tiles(weight.shape, weight.dtype, weight.device):
            ints, scales, offsets = native.rounded(weight, _SHRINKS)
        else:
            grouped = weight.view(len(weight), -1, math.gcd(weight.shape[1], _GROUP))
            ints, scales, offsets = _by_rows(_quantize_groups, grouped)
        self._store(ints.view(weight.shape), scales, offsets, bias)

    @classmethod
    def of_levels(cls, ints: Tensor, scales: Tensor, offsets: Tensor, bias: Tensor | None) -> Int4:
        """From integers 0 to 15 [out, in], and scales and offsets [out, in / 32], as published checkpoints have."""
        made = cls.__new__(cls)
        made._store(ints, scales, offsets, bias)
        return made

    def _store(self, ints: Tensor, scales: Tensor, offsets: Tensor, bias: Tensor | None) -> None:
        self.dtype, self.scales, self.offsets, self.bias, self.shape = scales.dtype, scales, offsets, bias, ints.shape
        rows, columns = ints.shape
        group = columns // scales.shape[1]
        self.nibbles = ints[:, ::2] | ints[:, 1::2] << 4 if columns % 2 == 0 else ints  # [out, in / 2] uint8
        self.weight_bytes = size(self.nibbles, self.scales, self.offsets, bias)
        self._triton = _triton(ints.device, self.dtype) if group % 2 == 0 else None
        self._packs = self.dtype == torch.bfloat16 and ints.device.type == "cpu" and group == _GROUP and rows % 16 == 0

    @cached_property
    def _packed(self) -> tuple[Tensor, Tensor]:
        """The weights for torch's kernel, made when they are first used: most layers are tiled instead."""
        scales_offsets = torch.stack([self.scales, self.offsets], -1).transpose(0, 1).contiguous()
        return torch._convert_weight_to_int4pack_for_cpu(self.ints.int(), 1), scales_offsets

    @property
    def ints(self) -> Tensor:
        """[out, in] 0 to 15."""
        if self.shape[1] % 2:
            return self.nibbles
        return torch.stack([self.nibbles & 15, self.nibbles >> 4], -1).view(self.shape)

    def tiled(self, *, rounds: bool = False) -> native.Tiled:
        return native.Tiled(self.ints, self.scales, self.offsets, self.bias, rounds=rounds)

    @property
    def weight(self) -> Tensor:
        rows, columns = self.shape
        grouped = self.ints.view(*self.scales.shape, -1).to(self.dtype) - 8
        return torch.addcmul(self.offsets[..., None], grouped, self.scales[..., None]).view(rows, columns)

    def __call__(self, x: Tensor) -> Tensor:
        if self._triton is not None and len(x) <= self._triton.MAX_ROWS:
            product: Tensor = self._triton.int4_product(x, self.nibbles, self.scales, self.offsets, self.bias)
            return product
        if not self._packs:
            return F.linear(x, self.weight, self.bias)
        packed, scales_offsets = self._packed
        out = torch._weight_int4pack_mm_for_cpu(x, packed, _GROUP, scales_offsets)
        return out if self.bias is None else out + self.bias


def _by_rows(quantize: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> list[Tensor]:
    """What `quantize` makes of some rows at a time: intermediate results of all would not fit into a cache."""
    rows = max(1, _AT_ONCE // max(1, weight[:1].numel()))
    return [torch.cat(parts) for parts in zip(*map(quantize, torch.split(weight, rows)), strict=True)]


def _quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [out, in] -> scales [out] in their precision, and integers -127 to 127 as int8."""
    scales = (weight.abs().amax(1).float().clamp(min=1e-12) / 127).to(weight.dtype)
    return scales, (weight.float() / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)


def _quantize_groups(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups [out, G, 32] -> integers 0 to 15 as uint8, scales and offsets [out, G] in the weights' precision."""
    low, high = groups.amin(-1).float(), groups.amax(-1).float()
    best: tuple[Tensor, Tensor, Tensor] | None = None
    best_error = torch.zeros_like(low)
    for shrink in _SHRINKS:
        scale = ((high - low) * shrink / 15).clamp(min=1e-12).to(groups.dtype)
        offset = ((high + low) / 2 + scale.float() / 2).to(groups.dtype)
        ints = ((groups.float() - offset.float()[..., None]) / scale.float()[..., None] + 8).round_().clamp_(0, 15)
        error = (ints - 8).mul_(scale.float()[..., None]).add_(offset.float()[..., None]).sub_(groups).square_().sum(-1)
        if best is None:
            best, best_error = (ints.to(torch.uint8), scale, offset), error
            expected = scale.float().square().mean() * groups.shape[-1] / 12  # of uniformly distributed values
            if error.mean() < 0.1 * expected:
                break  # the weights have 16 evenly spaced levels already, as in a GGUF of type Q4_1
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = (
            torch.where(better[..., None], ints.to(torch.uint8), best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, offset, best[2]),
        )
    assert best is not None
    return best


@dataclass(frozen=True, eq=False)
class SwitchByRows:
    """Two forms of the same weights: `few` is used for up to `max_few` rows, `many` for more."""

    few: Linear
    many: Linear
    max_few: int

    @property
    def weight_bytes(self) -> int:
        return self.few.weight_bytes

    @property
    def weight(self) -> Tensor:
        return self.few.weight

    @property
    def bias(self) -> Tensor | None:
        return self.few.bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x) if len(x) <= self.max_few else self.many(x)


_KINDS: dict[int, type[Int8] | type[Int4]] = {8: Int8, 4: Int4}


def quantize_linear(linear: Linear, bits: int, max_few: int, rounds: bool = False) -> Linear:
    """The layer in 8 or 4 bits; for more than `max_few` rows in 16 bits, where the processor has such products.
    `rounds`: inputs of 8-bit weights may be rounded, as those of 4-bit weights are."""
    if bits == 4 and isinstance(linear, Int4) and native.tiles(linear.shape, linear.dtype, linear.nibbles.device):
        return linear.tiled()
    weight = linear.weight
    if torchao_linear.supports(weight, bits):
        return torchao_linear.TorchaoLinear(weight, linear.bias, bits)
    few = linear if bits == 4 and isinstance(linear, Int4) else _KINDS[bits](weight, linear.bias)
    if native.tiles(weight.shape, weight.dtype, weight.device):
        return few.tiled(rounds=rounds)
    if not packs(weight.dtype, weight.device):
        return few
    return SwitchByRows(few, Packed(few.weight, linear.bias), max_few)


def fastest_for_drafting(linear: Linear) -> Linear:
    """The layer in the fastest layout for a drafter, which may be slightly inexact: 8 bits if the compiled kernels can
    run it, else as `fastest`."""
    weight = linear.weight
    tiled = native.tiles(weight.shape, weight.dtype, weight.device)
    return quantize_linear(linear, 8, 0) if tiled else fastest(linear)


def quantize(network: Network, bits: int, *, dense_bits: int | None = None) -> Network:
    """A copy of the network with its linear layers in 8 or 4 bits; embedding, norms and activations stay. The output
    layer always has 8 bits, which costs about 0.1 ms and avoids most of the quality loss. `dense_bits` is for layers
    that are not quantized yet, where others are (default: `bits`)."""
    if bits not in _KINDS:
        raise unknown("number of bits", bits, map(str, _KINDS))

    def quantized(linear: Linear) -> Linear:
        chosen = bits if dense_bits is None or isinstance(linear, Int4) else dense_bits
        return quantize_linear(linear, chosen, _FEW[chosen], rounds=bits == 4)

    return network.map_linears(quantized, head=partial(quantize_linear, bits=8, max_few=_FEW_HEAD, rounds=bits == 4))
