"""Rotary position angles (RoFormer, arXiv 2104.09864) on a line, with scaling for long contexts, or on a grid.

Knows a decoder's configuration; nothing of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.core.engine.types import Config
from outrider.core.errors import unknown


def rope_table(config: Config, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [size, d], the first half of the sines negated: x cos + roll(x, d / 2) sin rotates x."""
    if config.rope_scaling is not None and config.rope_scaling[0] == "grid":
        cos, sin = _grid_table(config, size, device, **config.rope_scaling[1])
    else:
        half = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float() / config.head_dim
        rates = 1.0 / (config.rope_theta**half)
        if config.rope_scaling is not None:
            rates = _scale(rates, *config.rope_scaling)
        angles = torch.arange(size, device=device).float()[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos] * 2, 1).to(dtype), torch.cat([-sin, sin], 1).to(dtype)


def _grid_table(
    config: Config, size: int, device: torch.device, *, columns: float, first: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [size, d / 2] of a grid in raster order: half of the pairs rotate by the row, half by the
    column. The `first` positions, which hold the condition, have zeros for both, which makes their queries and keys 0,
    as in LlamaGen (arXiv 2406.06525)."""
    quarter = torch.arange(0, config.head_dim // 2, 2, device=device).float() / (config.head_dim // 2)
    rates = 1.0 / (config.rope_theta**quarter)
    cell = torch.arange(size, device=device) - int(first)
    rows, cols = cell // int(columns), cell % int(columns)
    angles = torch.cat([rows.float()[:, None] * rates, cols.float()[:, None] * rates], 1)
    inside = (cell >= 0)[:, None]
    return angles.cos() * inside, angles.sin() * inside


def _scale(rates: Tensor, kind: str, parameters: Mapping[str, float]) -> Tensor:
    """Rotary rates for contexts longer than those of the first training, by linear or Llama 3 scaling."""
    if kind == "linear":
        return rates / parameters["factor"]
    if kind != "llama3":
        raise unknown("kind of rotary scaling", kind, ("linear", "llama3"))
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    low, high, original = (parameters[name] for name in names)
    wavelengths = 2 * math.pi / rates
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * rates / parameters["factor"] + blend * rates
