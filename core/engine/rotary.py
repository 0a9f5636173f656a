"""Rotary position angles (RoFormer, arXiv 2104.09864) on a line, with scaling for long contexts, or on a grid.

Independent of weights."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.engine.types import Config
from outrider.core.errors import unknown

SCALINGS = ("linear", "llama3", "yarn", "longrope")


class Factors(threading.local):
    """Which of LongRoPE's factors the passes of a thread use: another thread's text may be on the other side of the
    original context."""

    long = False


def rope_table(
    config: Config, size: int, dtype: torch.dtype, device: torch.device, *, long: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [size, d], the first half of the sines negated: x cos + roll(x, d / 2) sin rotates x. With
    `rotary_dim`, the last pairs of each half have the angle 0; weights are ordered accordingly (`rotary_order`).
    `long`: with LongRoPE's factors for texts beyond the original context."""
    if config.rope_scaling is not None and config.rope_scaling[0] == "grid":
        cos, sin = _grid_table(config, size, device, **config.rope_scaling[1])
    else:
        rotated = config.rotary_dim or config.head_dim
        half = torch.arange(0, rotated, 2, dtype=torch.int64, device=device).float() / rotated
        rates = 1.0 / (config.rope_theta**half)
        factor = 1.0
        if config.rope_scaling is not None:
            rates = _scale(rates, config.rope_theta, *config.rope_scaling, long)
            factor = config.rope_scaling[1].get("attention_factor", 1.0)
        angles = torch.arange(size, device=device).float()[:, None] * rates
        padding = (0, (config.head_dim - rotated) // 2)
        cos, sin = F.pad(angles.cos() * factor, padding, value=1.0), F.pad(angles.sin() * factor, padding)
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


def rotary_order(head_dim: int, rotated: int, interleaved: bool) -> list[int] | None:
    """The order of a head's dimensions by which those to be rotated together, the first `rotated` in halves or
    interleaved, come to be half a head apart; None if they are already. Queries and keys in the same order have the
    same scores."""
    if rotated == head_dim and not interleaved:
        return None
    pairs = list(range(rotated))
    first, second = (pairs[::2], pairs[1::2]) if interleaved else (pairs[: rotated // 2], pairs[rotated // 2 :])
    middle = (rotated + head_dim) // 2
    return [*first, *range(rotated, middle), *second, *range(middle, head_dim)]


def qkv_order(heads: int, kv_heads: int, head_dim: int, pairs: list[int]) -> Tensor:
    """The order of the outputs of queries, keys and values in which the dimensions of each query and key head have the
    order `pairs`."""
    rotated = heads + kv_heads
    starts = torch.arange(rotated)[:, None] * head_dim
    values = torch.arange(rotated * head_dim, (rotated + kv_heads) * head_dim)
    return torch.cat([(starts + torch.tensor(pairs)).flatten(), values])


def _scale(rates: Tensor, theta: float, kind: str, parameters: Mapping[str, Any], long: bool) -> Tensor:
    """Rotary rates for contexts longer than those of the first training."""
    if kind == "linear":
        return rates / float(parameters["factor"])
    if kind == "longrope":
        return rates / torch.tensor(parameters["long_factor" if long else "short_factor"], device=rates.device)
    if kind == "yarn":
        return _yarn(rates, theta, parameters)
    if kind != "llama3":
        raise unknown("kind of rotary scaling", kind, SCALINGS)
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    low, high, original = (float(parameters[name]) for name in names)
    wavelengths = 2 * math.pi / rates
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * rates / float(parameters["factor"]) + blend * rates


def _yarn(rates: Tensor, theta: float, parameters: Mapping[str, Any]) -> Tensor:
    """YaRN (arXiv 2309.00071): pairs with many rotations in the original context keep their rates, those with few are
    slowed by `factor`, and a linear ramp lies between."""
    pairs = len(rates)

    def pair(rotations: float) -> float:
        """The index of the pair that rotates this often in the original context."""
        length = float(parameters["original_max_position_embeddings"]) / (rotations * 2 * math.pi)
        return pairs * math.log(length) / math.log(theta)

    low, high = pair(parameters["beta_fast"]), pair(parameters["beta_slow"])
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, device=rates.device) - low) / max(high - low, 0.001)
    slowed = ramp.clamp(0, 1)
    return rates / float(parameters["factor"]) * slowed + rates * (1 - slowed)
