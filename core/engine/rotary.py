"""Rotary positions (RoFormer, arXiv 2104.09864): the angles by which queries and keys are turned, along a line, which
may be stretched for long contexts, or on a grid. Knows a decoder's shape; nothing of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.core.engine.types import Config
from outrider.core.errors import unknown


def rope_table(config: Config, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines [size, d], and sines [size, d] whose first half is negative: x cos + roll(x, d / 2) sin is the turn."""
    if config.rope_scaling is not None and config.rope_scaling[0] == "grid":
        cos, sin = on_a_grid(config, size, device, **config.rope_scaling[1])
    else:
        half = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float() / config.head_dim
        rates = 1.0 / (config.rope_theta**half)
        if config.rope_scaling is not None:
            rates = scaled(rates, *config.rope_scaling)
        angles = torch.arange(size, device=device).float()[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos] * 2, 1).to(dtype), torch.cat([-sin, sin], 1).to(dtype)


def on_a_grid(
    config: Config, size: int, device: torch.device, *, columns: float, first: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [size, d / 2] of places in raster order: half of the pairs turn by the row, half by the column.
    The first places are no part of the grid and have neither, so that queries and keys there are 0, as the picture
    models have it whose condition stands there (LlamaGen, arXiv 2406.06525)."""
    quarter = torch.arange(0, config.head_dim // 2, 2, device=device).float() / (config.head_dim // 2)
    rates = 1.0 / (config.rope_theta**quarter)
    place = torch.arange(size, device=device) - int(first)
    row, column = (one.float()[:, None] * rates for one in (place // int(columns), place % int(columns)))
    angles, inside = torch.cat([row, column], 1), (place >= 0)[:, None]
    return angles.cos() * inside, angles.sin() * inside


def scaled(rates: Tensor, kind: str, numbers: Mapping[str, float]) -> Tensor:
    """Rotary rates stretched for contexts longer than the ones first trained on."""
    if kind == "linear":
        return rates / numbers["factor"]
    if kind != "llama3":
        raise unknown("kind of rotary scaling", kind, ("linear", "llama3"))
    low, high, old = (
        numbers[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    waves = 2 * math.pi / rates
    blend = ((old / waves - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * rates / numbers["factor"] + blend * rates
