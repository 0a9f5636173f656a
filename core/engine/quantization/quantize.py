"""Weights in 8 or 4 bits: int8 with a scale a row, int4 with a scale and an offset for every 32 weights.

One token a pass is bound by how many bytes are read, so few rows go through torch's weight-only kernels; from a handful
of rows on those are slower than 16-bit products, so more rows go through the same numbers in 16 bits, laid out for
oneDNN. On a GPU they are torchao's, where it is installed. Activations are not rounded. Where a kernel is missing
the numbers are unpacked on every call: right, not fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.engine.linear import Linear, Packed, fastest, packs, size
from outrider.core.engine.network import Network
from outrider.core.engine.quantization import torchao_linear
from outrider.core.errors import unknown
from outrider.core.kernels import native

_GROUP = 32
_FEW = {8: 3, 4: 2}  # rows up to which the weight-only kernel is the faster one, by bits; measured
_FEW_OUTPUTS = 1  # the same for the output layer, whose 16-bit product is the quickest per byte
_SHRINKS = (1.0, 0.94, 0.88, 0.82)  # ranges tried for each group of 4-bit weights, of which the closest is taken


class Int8:
    """[out, in] int8 with one scale for each output."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.dtype, self.bias = weight.dtype, bias
        scales = weight.abs().amax(1).float().clamp(min=1e-12) / 127
        self.scales = scales.to(weight.dtype)
        self.ints = (weight.float() / self.scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.weight_bytes = size(self.ints, self.scales, bias)
        self._kernel = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"

    @property
    def weight(self) -> Tensor:
        return self.ints.to(self.dtype) * self.scales[:, None]

    def tiled(self) -> native.Tiled:
        return native.Tiled(self.ints, self.scales, None, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._kernel:
            return F.linear(x, self.weight, self.bias)
        out = torch._weight_int8pack_mm(x, self.ints, self.scales)
        return out if self.bias is None else out + self.bias


class Int4:
    """[out, in] in 4 bits: groups of 32 inputs share a scale and an offset, w = (n - 8) scale + offset."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.dtype, self.bias, self.shape = weight.dtype, bias, weight.shape
        rows, columns = weight.shape
        group = math.gcd(columns, _GROUP)
        ints, self.scales, self.offsets = _nearest(weight.view(rows, -1, group))
        ints = ints.view(rows, columns)
        self.nibbles = ints[:, ::2] | ints[:, 1::2] << 4 if columns % 2 == 0 else ints  # [out, in / 2] uint8
        self.weight_bytes = size(self.nibbles, self.scales, self.offsets, bias)
        self._packed: Tensor | None = None
        if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and group == _GROUP and rows % 16 == 0:
            self._packed = torch._convert_weight_to_int4pack_for_cpu(ints.int(), 1)
            self._numbers = torch.stack([self.scales, self.offsets], -1).transpose(0, 1).contiguous()

    @property
    def ints(self) -> Tensor:
        """[out, in] 0 to 15."""
        if self.shape[1] % 2:
            return self.nibbles
        return torch.stack([self.nibbles & 15, self.nibbles >> 4], -1).view(self.shape)

    def tiled(self) -> native.Tiled:
        return native.Tiled(self.ints, self.scales, self.offsets, self.bias)

    @property
    def weight(self) -> Tensor:
        rows, columns = self.shape
        grouped = self.ints.view(*self.scales.shape, -1).to(self.dtype) - 8
        return torch.addcmul(self.offsets[..., None], grouped, self.scales[..., None]).view(rows, columns)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        out = torch._weight_int4pack_mm_for_cpu(x, self._packed, _GROUP, self._numbers)
        return out if self.bias is None else out + self.bias


def _nearest(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups [out, G, 32] -> 0..15 as uint8, and scales and offsets [out, G] in the weights' own precision."""
    low, high = groups.amin(-1).float(), groups.amax(-1).float()
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.zeros_like(low)
    for shrink in _SHRINKS:
        scale = ((high - low) * shrink / 15).clamp(min=1e-12).to(groups.dtype)
        offset = ((high + low) / 2 + scale.float() / 2).to(groups.dtype)
        ints = ((groups.float() - offset.float()[..., None]) / scale.float()[..., None] + 8).round_().clamp_(0, 15)
        error = (ints - 8).mul_(scale.float()[..., None]).add_(offset.float()[..., None]).sub_(groups).square_().sum(-1)
        found = ints.to(torch.uint8), scale, offset
        if best is None:
            best, least = found, error
            noise = scale.float().square().mean() * groups.shape[-1] / 12  # of numbers that fall anywhere
            if error.mean() < 0.1 * noise:
                break  # these were 16 levels already, as those of a GGUF of type Q4_1
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = (
            torch.where(better[..., None], found[0], best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, offset, best[2]),
        )
    assert best is not None
    return best


@dataclass(frozen=True, eq=False)
class ByRows:
    """Two forms of the same weights: one for few rows, one for more."""

    few: Linear
    many: Linear
    most: int  # rows that count as few

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
        return self.few(x) if len(x) <= self.most else self.many(x)


_KINDS: dict[int, type[Int8] | type[Int4]] = {8: Int8, 4: Int4}


def rounded(linear: Linear, bits: int, most: int) -> Linear:
    """One matrix product in 8 or 4 bits, and in 16 for more rows than `most` where the processor multiplies those."""
    weight = linear.weight
    if torchao_linear.fits(weight, bits):
        return torchao_linear.Ao(weight, linear.bias, bits)
    few = _KINDS[bits](weight, linear.bias)
    if native.tiles(weight.shape, weight.dtype, weight.device):
        return few.tiled()
    if not packs(weight.dtype, weight.device):
        return few
    return ByRows(few, Packed(few.weight, linear.bias), most)


def leanest(linear: Linear) -> Linear:
    """One matrix product laid out for this machine, in 8 bits where its own code reads those: for what drafts, and may
    be a little off."""
    weight = linear.weight
    return rounded(linear, 8, 0) if native.tiles(weight.shape, weight.dtype, weight.device) else fastest(linear)


def quantised(network: Network, bits: int) -> Network:
    """The same network with its matrix products in 8 or 4 bits. Embedding, norms and activations stay; the output
    layer has 8 bits in either case, which costs a tenth of a millisecond and spares most of the damage."""
    if bits not in _KINDS:
        raise unknown("number of bits", bits, map(str, _KINDS))
    return network.map_linears(
        partial(rounded, bits=bits, most=_FEW[bits]), head=partial(rounded, bits=8, most=_FEW_OUTPUTS)
    )
