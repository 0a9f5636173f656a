"""Frozen layers of the target with learned low-rank corrections (LoRA, arXiv 2106.09685); only the corrections are
trained and shipped.

Independent of what the matrices are for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.engine.linear import Dense, size
from outrider.core.engine.quantization.quantize import fastest_for_drafting
from outrider.core.engine.trainable.block import Block, Matrix
from outrider.core.errors import InvalidOption


class Corrected(Matrix):
    """A frozen matrix of the target plus a learned low-rank correction."""

    base: Tensor

    def __init__(self, matrix: Matrix, rank: int) -> None:
        nn.Module.__init__(self)
        rows, columns = matrix.weight.shape
        self.register_buffer("base", matrix.weight.detach().clone(), persistent=False)
        self.register_buffer("bias", None if matrix.bias is None else matrix.bias.detach().clone(), persistent=False)
        self.down = nn.Parameter(torch.randn(rank, columns) / math.sqrt(columns))
        self.up = nn.Parameter(torch.zeros(rows, rank))
        self.fast = None

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.base + self.up @ self.down

    @property
    def weight_bytes(self) -> int:
        return size(self.base, self.bias) if self.fast is None else self.fast.weight_bytes

    def forward(self, x: Tensor) -> Tensor:
        if self.fast is not None:
            return super().forward(x)
        return F.linear(x, self.base, self.bias) + F.linear(F.linear(x, self.down), self.up)

    def optimize(self) -> None:
        """Merge the correction into one matrix with the fastest layout for this machine, for drafting."""
        self.fast = fastest_for_drafting(Dense(self.weight.detach(), None if self.bias is None else self.bias.detach()))
        self.base = self.base.new_empty(0)


def correct(block: Block, rank: int) -> None:
    """Freeze a block's matrices and give them learned corrections."""
    for part, name in ((block.attention, "qkv"), (block.attention, "out"), (block.mlp, "up_gate"), (block.mlp, "down")):
        setattr(part, name, Corrected(getattr(part, name), rank))


def adapted(block: Block, lora: int, *, known: int, changed: bool = False) -> None:
    """Apply `correct` with rank `lora` (0: not at all) to a block that was copied from one of the target's layers. Of
    its input columns, those before the `known` last ones, which the target's layer lacks, start at 0. `changed`:
    whether the block has another configuration than the layer."""
    if not lora:
        return
    if lora < 0:
        raise InvalidOption(f"lora is {lora}; it must be 0 (whole layers) or more")
    if changed:
        raise InvalidOption(f"lora={lora} corrects the target's own layers, so their configuration can't be changed")
    with torch.no_grad():
        inputs = block.attention.qkv.weight
        inputs[:, : inputs.shape[1] - known].zero_()
    correct(block, lora)
