"""Modified copies of torch modules that share all weights with the original, to change a forward pass without touching
the model itself. Independent of what the modules compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import Incompatible


def copy_with(module: nn.Module, change: Callable[[str, nn.Module], nn.Module | None], name: str = "") -> Any:
    """A copy with some submodules replaced. `change` gets each submodule and its name, outermost first, and returns its
    replacement, or None to keep it and go on to its children."""
    replacement = change(name, module)
    if replacement is not None:
        return replacement
    copied = copy.copy(module)
    children = {key: copy_with(child, change, f"{name}.{key}".lstrip(".")) for key, child in module.named_children()}
    copied.__dict__["_modules"] = {**module._modules, **children}
    copied.__dict__["_buffers"] = dict(module._buffers)
    return copied


def extend_causal_mask(module: nn.Module, by: int) -> Any:
    """A copy of a model whose attention stores a causal mask [1, 1, N, N] in the buffer "bias", with the mask `by`
    columns larger: drafts may reach beyond the model's last position before they are cut."""
    changed: list[str] = []

    def change(name: str, part: nn.Module) -> nn.Module | None:
        mask = part._buffers.get("bias")
        if mask is None or mask.dim() != 4:
            return None
        changed.append(name)
        copied = copy.copy(part)
        size = mask.shape[-1] + by
        copied.__dict__["_buffers"] = dict(part._buffers)
        copied._buffers["bias"] = torch.ones(size, size, dtype=mask.dtype, device=mask.device).tril()[None, None]
        return copied

    copied = copy_with(module, change)
    if not changed:
        raise Incompatible(
            f"{type(module).__name__} has no attention with a causal mask buffer; its class in transformers has changed"
        )
    return copied


class ExplicitPositions(nn.Module):
    """Replaces position embeddings that infer positions from the cache length. Set `positions` [B, Q] before a pass."""

    def __init__(self, table: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._table = table
        self.positions = torch.zeros(1, 1, dtype=torch.long)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._table(self.positions)
