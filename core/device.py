"""Traffic between host and device, so that neither waits for the other more often than it must.

On CUDA a tensor made from Python numbers is copied with a wait for the stream; these copies are not. Knows nothing of
drafts or laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(values: Sequence[Any] | Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers, or a tensor on the host, as a tensor on the device; nobody waits."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=4096)
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """The same, remembered: for numbers that come up again in every step."""
    return upload(values, device, torch.long)


def fetch(*tensors: Tensor) -> list[np.ndarray]:
    """Tensors [B, ...] as arrays on the host, in one transfer whatever their number. This is the wait of a step."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    flat = torch.cat([tensor.double().flatten(1) for tensor in tensors], 1).cpu().numpy()
    cuts = np.cumsum([tensor[0].numel() for tensor in tensors])[:-1]
    return [
        part.reshape(tuple(tensor.shape)).astype(torch.empty(0, dtype=tensor.dtype).numpy().dtype)
        for part, tensor in zip(np.split(flat, cuts, axis=1), tensors, strict=True)
    ]
