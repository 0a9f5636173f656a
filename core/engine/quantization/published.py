"""Checkpoints that were published with quantized weights, dequantised in 32 bits as they are read: FP8 (one scale, one
per row, or one per block), compressed-tensors, AWQ and GPTQ.

Knows names and layouts of tensors; independent of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    *("k_scale", "v_scale", "q_scale"),
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
    elif method not in ("fp8", "fbgemm_fp8"):
        why = "this way of quantizing"
    if why is not None:
        raise CheckpointError(
            f"the weights are quantized by '{method}' and our decoder does not read {why}; load the model through "
            "transformers, with the package that reads it"
        )
    return {"fp8": "FP8", "fbgemm_fp8": "FP8", "awq": "AWQ", "gptq": "GPTQ"}.get(str(method), str(method))


def readable(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors with plain weights, whichever way a config.json says that they are stored."""
    return tensors if check_method(described) in (None, "MXFP4") else _Dequantized(described, tensors)


class _Dequantized(Mapping[str, Tensor]):
    """Tensors under the names that they have without quantization; each weight is computed on access."""

    def __init__(self, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._config: Mapping[str, Any] = described.get("quantization_config") or described["compression_config"]
        self._tensors = tensors
        self._stored: dict[str, str] = {}  # name -> that of the stored weight
        for name in tensors:
            layer, _, part = name.rpartition(".")
            if part in ("qweight", "weight_packed"):
                self._stored[f"{layer}.weight"] = name
            elif part not in _PARTS:
                self._stored[name] = name

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored[name]
        layer, _, part = stored.rpartition(".")
        if part == "qweight":
            return self._awq(layer) if self._config["quant_method"] == "awq" else self._gptq(layer)
        if part == "weight_packed":
            return self._packed(layer)
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

    def _packed(self, layer: str) -> Tensor:
        """compressed-tensors: integers of a row side by side, shifted to be 0 or more; zero points along rows."""
        bits = int(self._group().get("num_bits") or 4)
        rows, columns = (int(size) for size in self._part(layer, "weight_shape"))
        half, scale = 1 << (bits - 1), self._part(layer, "weight_scale").float()
        numbers = _unpack(self._part(layer, "weight_packed"), bits)[:, :columns].float() - half
        if f"{layer}.weight_g_idx" in self._tensors:
            groups = self._part(layer, "weight_g_idx").long()
        else:
            groups = torch.arange(columns) // -(-columns // scale.shape[1])
        if f"{layer}.weight_zero_point" in self._tensors:
            zeros = _unpack(self._part(layer, "weight_zero_point").T, bits).T[:rows].float() - half
            numbers = numbers - zeros[:, groups]
        return numbers * scale[:, groups]

    def _awq(self, layer: str) -> Tensor:
        """AWQ (arXiv 2306.00978), the layout "gemm": eight outputs in 32 bits, in its own order."""
        order = torch.tensor(_AWQ_ORDER)
        scales = self._part(layer, "scales").float()  # [groups, out]

        def unpack(packed: Tensor) -> Tensor:
            return _unpack(packed, 4).view(len(packed), -1, 8)[..., order].flatten(1)

        numbers, zeros = (unpack(self._part(layer, part)).float() for part in ("qweight", "qzeros"))
        size = len(numbers) // len(scales)
        weight = (numbers - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)
        return weight.T.contiguous()

    def _gptq(self, layer: str) -> Tensor:
        """GPTQ (arXiv 2210.17323): neighbouring inputs in 32 bits. Zero points are stored less 1, but not in the format
        "gptq_v2"."""
        bits, scales = int(self._config["bits"]), self._part(layer, "scales").float()  # [groups, out]
        numbers = _unpack(self._part(layer, "qweight").T, bits).T.float()  # [in, out]
        zeros = _unpack(self._part(layer, "qzeros"), bits)[:, : scales.shape[1]]
        if self._config.get("checkpoint_format") != "gptq_v2":
            zeros = (zeros + 1) & ((1 << bits) - 1)
        if f"{layer}.g_idx" in self._tensors:
            groups = self._part(layer, "g_idx").long()
        else:
            groups = torch.arange(len(numbers)) // -(-len(numbers) // len(scales))
        return ((numbers - zeros.float()[groups]) * scales[groups]).T.contiguous()


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
