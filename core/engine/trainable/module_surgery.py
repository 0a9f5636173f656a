"""A module beside itself: a copy that shares all weights, some of whose parts are others, so that a class can be read
in ways that its own forward pass does not offer, and the original stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import Incompatible


def twin(module: nn.Module, change: Callable[[str, nn.Module], nn.Module | None], name: str = "") -> Any:
    """`change` is shown every part by its name, outermost first; what it gives stands in that part's place."""
    other = change(name, module)
    if other is not None:
        return other
    made = copy.copy(module)
    parts = {part: twin(one, change, f"{name}.{part}".lstrip(".")) for part, one in module.named_children()}
    made.__dict__["_modules"] = {**module._modules, **parts}
    made.__dict__["_buffers"] = dict(module._buffers)
    return made


def widened(module: nn.Module, by: int) -> Any:
    """The twin of a model whose attention holds a triangle [1, 1, N, N] of what may be seen: with one wider by so many
    columns, for drafts reach beyond the last position that the model has, if only to be cut off there."""
    found: list[str] = []

    def change(name: str, part: nn.Module) -> nn.Module | None:
        mask = part._buffers.get("bias")
        if mask is None or mask.dim() != 4:
            return None
        found.append(name)
        made = copy.copy(part)
        size = mask.shape[-1] + by
        made.__dict__["_buffers"] = dict(part._buffers)
        made._buffers["bias"] = torch.ones(size, size, dtype=mask.dtype, device=mask.device).tril()[None, None]
        return made

    made = twin(module, change)
    if not found:
        raise Incompatible(f"{type(module).__name__} has no attention that holds a triangle; its class has changed")
    return made


class Places(nn.Module):
    """In place of embeddings of positions that go by how much the cache holds: gives each token its own position's.

    `at` holds the positions [B, Q] of the next pass.
    """

    def __init__(self, table: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._table = table
        self.at = torch.zeros(1, 1, dtype=torch.long)

    def forward(self, *given: Any, **named: Any) -> Tensor:
        return self._table(self.at)
