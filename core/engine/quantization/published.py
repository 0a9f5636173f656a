"""Checkpoints that were published with quantized weights, dequantised in 32 bits as they are read: FP8 (one scale, one
per row, or one per block), compressed-tensors, AWQ, GPTQ, and what outrider.core.assets.gguf converts for 4 bits.

Knows names and layouts of tensors; independent of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.architectures import CheckpointError

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in 32 bits of each of eight neighbouring outputs
_BLOCK = (128, 128)  # of FP8 weights, where a config gives none
_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_PARTS = (
    *("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape"),
    *("weight_g_idx", "input_scale", "input_zero_point", "input_scale_ub", "output_scale", "activation_scale"),
    *("k_scale", "v_scale", "q_scale", "weight_scales", "weight_offsets"),
)  # tensors beside the weights; those of activations and caches are not used


def check_method(described: Mapping[str, Any]) -> str | None:
    """How the weights of a config.json are stored, for readers; None if not quantized. Raises CheckpointError for ways
    that are not read here."""
    config = described.get("quantization_config") or described.get("compression_config")
    if config is None:
        return None
    method = config.get("quant_method")
    why = None
    if method == "mxfp4" and described.get("model_type") == "gpt_oss":
        return "MXFP4"
    if method == "awq":
        why = None if config.get("version", "gemm").lower() == "gemm" else f"its layout '{config['version']}'"
        why = why if config.get("bits", config.get("w_bit", 4)) == 4 else f"{config['bits']} bits"
    elif method == "gptq":
        why = None if config.get("bits") in (2, 4, 8) else f"{config.get('bits')} bits"
    elif method == "compressed-tensors":
        form = config.get("format")
        why = None if form in _COMPRESSED else f"its format '{form}'"
        sparse = (config.get("sparsity_config") or {}).get("format", "dense")
        why = why if sparse == "dense" else f"its sparse format '{sparse}'"
        why = "weights that are rotated (transform_config)" if config.get("transform_config") else why
    elif method not in ("fp8", "fbgemm_fp8", "gguf"):
        why = "this way of quantizing"
    if why is not None:
        raise CheckpointError(
            f"the weights are quantized by '{method}' and our decoder does not read {why}; load the model through "
            "transformers, with the package that reads it"
        )
    names = {"fp8": "FP8", "fbgemm_fp8": "FP8", "awq": "AWQ", "gptq": "GPTQ", "gguf": "GGUF"}
    return names.get(str(method), str(method))


def converted(described: Mapping[str, Any]) -> bool:
    """Whether a config.json is of what outrider.core.assets.gguf writes for 4 bits, which only `Dequantized` reads."""
    return (described.get("quantization_config") or {}).get("quant_method") == "gguf"


def readable(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors with plain weights, whichever way a config.json says that they are stored."""
    return tensors if check_method(described) in (None, "MXFP4") else Dequantized(described, tensors)


@dataclass(frozen=True, eq=False)
class _Integers:
    """A weight as integers: (number - zero) scale, with the zero and the scale of each input's group."""

    bits: int
    numbers: Tensor  # [out, in]
    scales: Tensor  # [out, groups] in 32 bits
    zeros: Tensor  # [out, groups]
    groups: Tensor  # [in]

    @property
    def weight(self) -> Tensor:
        return (self.numbers.float() - self.zeros.float()[:, self.groups]) * self.scales[:, self.groups]


class Dequantized(Mapping[str, Tensor]):
    """Tensors under the names that they have without quantization; each weight is computed on access."""

    def __init__(self, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._config: Mapping[str, Any] = described.get("quantization_config") or described["compression_config"]
        self._tensors = tensors
        self._stored: dict[str, str] = {}  # name -> that of the stored weight
        self._zeros: dict[str, Tensor] = {}  # biases of 0, which AutoGPTQ writes for layers that have none: not listed
        for name in tensors:
            layer, _, part = name.rpartition(".")
            if part == "bias" and f"{layer}.qweight" in tensors and not (bias := tensors[name]).any():
                self._zeros[name] = bias
            elif part in ("qweight", "weight_packed", "weight_levels"):
                self._stored[f"{layer}.weight"] = name
            elif part not in _PARTS:
                self._stored[name] = name

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored or name in self._zeros

    def __getitem__(self, name: str) -> Tensor:
        if name in self._zeros:
            return self._zeros[name]
        stored = self._stored[name]
        layer, _, part = stored.rpartition(".")
        if part == "qweight":
            return (self._awq(layer) if self._config["quant_method"] == "awq" else self._gptq(layer)).weight
        if part == "weight_packed":
            return self._packed(layer).weight
        if part == "weight_levels":
            ints, scales, offsets = self._levels(layer)
            grouped = (ints.float() - 8).view(*scales.shape, -1)
            return (grouped * scales[..., None] + offsets[..., None]).view(ints.shape)
        for scale in ("weight_scale", "weight_scale_inv"):
            if part == "weight" and f"{layer}.{scale}" in self._tensors:
                return self._scaled(layer, self._tensors[stored], self._part(layer, scale))
        return self._tensors[stored]

    def _part(self, layer: str, part: str) -> Tensor:
        if f"{layer}.{part}" not in self._tensors:
            raise CheckpointError(f"the checkpoint has no tensor '{layer}.{part}'; a file may be missing")
        return self._tensors[f"{layer}.{part}"]

    def _group(self) -> Mapping[str, Any]:
        """How compressed-tensors says that weights are stored."""
        groups = self._config.get("config_groups") or {}
        weights: Mapping[str, Any] = next((group["weights"] for group in groups.values() if group.get("weights")), {})
        return weights

    def _scaled(self, layer: str, weight: Tensor, scale: Tensor) -> Tensor:
        """Numbers times scales: one for all, one per row, or one per block."""
        numbers, rows, columns = weight.float(), *weight.shape
        if f"{layer}.weight_zero_point" in self._tensors:
            numbers = numbers - _spread(self._part(layer, "weight_zero_point").float(), rows, columns, self._block())
        return numbers * _spread(scale.float(), rows, columns, self._block())

    def _block(self) -> tuple[int, int]:
        group = self._group()
        given = self._config.get("weight_block_size") or group.get("block_structure")
        if given is None and isinstance(size := group.get("group_size"), int) and size > 0:
            return 1, size
        return _BLOCK if given is None else (int(given[0]), int(given[1]))

    def levels(self, name: str) -> tuple[Tensor, Tensor, Tensor] | None:
        """A weight in our form of 4 bits: integers 0 to 15 [out, in], and scales and offsets [out, in / 32] in 32 bits;
        None if it is stored in another number of bits, in smaller groups, or reordered."""
        layer, _, part = self._stored.get(name, "").rpartition(".")
        if part == "weight_levels":
            return self._levels(layer)
        integers = {"qweight": self._awq if self._config["quant_method"] == "awq" else self._gptq}
        read = (integers | {"weight_packed": self._packed}).get(part)
        if read is None or (stored := read(layer)).bits != 4:
            return None
        columns = stored.numbers.shape[1]
        if columns % 32 or not torch.equal(stored.groups, stored.groups[::32].repeat_interleave(32)):
            return None
        scales, zeros = (values[:, stored.groups[::32]] for values in (stored.scales, stored.zeros))
        return stored.numbers.to(torch.uint8), scales, (8 - zeros) * scales

    def _levels(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        """What was converted from GGUF: two neighbouring inputs in a byte, lowest bits first."""
        packed = self._part(layer, "weight_levels")
        ints = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        scales, offsets = (self._part(layer, f"weight_{part}").float() for part in ("scales", "offsets"))
        if not scales.shape == offsets.shape == (len(ints), ints.shape[1] // 32):
            raise CheckpointError(f"the scales of '{layer}' don't fit its weights; convert the GGUF file again")
        return ints, scales, offsets

    def _packed(self, layer: str) -> _Integers:
        """compressed-tensors: integers of a row side by side, shifted to be 0 or more; zero points along rows."""
        bits = int(self._group().get("num_bits") or 4)
        rows, columns = (int(size) for size in self._part(layer, "weight_shape"))
        scales = self._part(layer, "weight_scale").float().view(rows, -1)
        numbers = _unpack(self._part(layer, "weight_packed"), bits)[:, :columns]
        zeros = torch.full_like(scales, 1 << (bits - 1))
        if f"{layer}.weight_zero_point" in self._tensors:
            zeros = _unpack(self._part(layer, "weight_zero_point").T, bits).T[:rows].float()
        return _Integers(bits, numbers, scales, zeros, self._groups(layer, "weight_g_idx", columns, scales.shape[1]))

    def _groups(self, layer: str, part: str, columns: int, count: int) -> Tensor:
        """[in] the group of each input."""
        if f"{layer}.{part}" in self._tensors:
            return self._part(layer, part).long()
        return torch.arange(columns) // -(-columns // count)

    def _awq(self, layer: str) -> _Integers:
        """AWQ (arXiv 2306.00978), the layout "gemm": eight outputs in 32 bits, in its own order."""
        order = torch.tensor(_AWQ_ORDER)
        scales = self._part(layer, "scales").float()  # [groups, out]

        def unpack(packed: Tensor) -> Tensor:
            return _unpack(packed, 4).view(len(packed), -1, 8)[..., order].flatten(1)

        numbers, zeros = (unpack(self._part(layer, part)) for part in ("qweight", "qzeros"))
        groups = self._groups(layer, "g_idx", len(numbers), len(scales))
        return _Integers(4, numbers.T, scales.T, zeros.T, groups)

    def _gptq(self, layer: str) -> _Integers:
        """GPTQ (arXiv 2210.17323): neighbouring inputs in 32 bits. Zero points are stored less 1, but not in the format
        "gptq_v2"."""
        bits, scales = int(self._config["bits"]), self._part(layer, "scales").float()  # [groups, out]
        numbers = _unpack(self._part(layer, "qweight").T, bits)  # [out, in]
        zeros = _unpack(self._part(layer, "qzeros"), bits)[:, : scales.shape[1]]
        if self._config.get("checkpoint_format") != "gptq_v2":
            zeros = (zeros + 1) & ((1 << bits) - 1)
        groups = self._groups(layer, "g_idx", numbers.shape[1], len(scales))
        return _Integers(bits, numbers, scales.T, zeros.T, groups)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """32-bit integers [R, N] -> the numbers in them [R, 32 / bits N], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _spread(values: Tensor, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
    """One value, one per row, or one per block, for each of rows x columns."""
    if values.numel() == 1:
        return values.reshape(1, 1)
    if values.numel() == rows:
        return values.reshape(rows, 1)
    height = 1 if len(values) == rows else block[0]
    if values.dim() != 2 or len(values) != -(-rows // height) or values.shape[1] != -(-columns // block[1]):
        raise CheckpointError(
            f"the scales of a weight of {rows} x {columns} have the shape {tuple(values.shape)}; expected one per "
            f"block of {height} x {block[1]}"
        )
    return values.repeat_interleave(height, 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
