"""Chains that a small decoder draws by itself, on a CPU with code for it: all its tokens in one call.

Between passes of a small model torch's calls would take longer than the passes. Knows tokens, numbers and addresses;
nothing of drafts or of who judges them.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.engine.linear import Linear
from outrider.core.engine.native.native_pass import Passes
from outrider.core.engine.types import PassLayout
from outrider.core.kernels import native

_TILE = 16  # rows of a matrix


class _Drawing(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "told", "norm", "head", "numbers", "waiting")),
        *((name, c_void_p) for name in ("tokens", "distributions", "logits", "state", "mask", "work")),
        *((name, c_int64) for name in ("entries", "places")),
        *((name, c_int32) for name in ("wait", "behind", "steps", "vocabulary")),
        ("temperature", c_float),
    )


class Chains:
    """Of one network. Its output layer is laid out once more where it isn't in tiles."""

    def __init__(self, passes: Passes, embedding: Tensor, norm: Tensor, head: Linear) -> None:
        self._passes, self._embedding, self._norm = passes, embedding, norm.float().contiguous()
        self._words = head.weight.shape[0] if not isinstance(head, native.Tiled) else head.shape[0]
        self._head = head if isinstance(head, native.Tiled) else _tiled(head)

    def draw(
        self,
        waiting: Tensor,
        behind: int,
        store: Tensor,
        steps: int,
        told: Tensor | None,
        numbers: np.ndarray | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Read the tokens that wait [P], behind so many, into the store of one row; draw the next by the first of the
        numbers, read it, and so on: `steps` tokens [steps], all but the last of them read, and the distributions
        [steps, V] they were drawn from. Without numbers each is the likeliest. `told` [T, D] is added to what is read,
        by position."""
        code = native.library()
        assert code is not None
        width, rows, wait, threads = (
            self._embedding.shape[1],
            self._head.shape[0],
            len(waiting),
            torch.get_num_threads(),
        )
        columns, head = behind + wait + steps, ctypes.addressof(self._head.matrix)
        tokens, floats = torch.empty(steps, dtype=torch.long), torch.empty(wait * width + rows)
        distributions = None if numbers is None else torch.empty(steps, self._words)
        state, mask = torch.empty(width, dtype=torch.bfloat16), torch.empty(wait * columns, dtype=torch.bool)
        by = None if numbers is None else np.ascontiguousarray(numbers, np.float64)
        waiting, told = waiting.contiguous(), None if told is None else told.contiguous()
        space = native.work(max(code.outrider_product_work(head, 1, threads), self._passes.work(wait, columns)))
        where = PassLayout(torch.zeros(1, 1, dtype=torch.long), columns, None, behind)
        x, logits = floats[: wait * width].view(wait, width), floats[wait * width :]
        given, _kept = self._passes.given(x, store, where, 0, self._passes.layers)
        drawing = _Drawing(
            *(native.at(part) for part in (self._embedding, told, self._norm)),
            *(head, None if by is None else by.ctypes.data),
            *(native.at(part) for part in (waiting, tokens, distributions, logits, state, mask)),
            *(space, len(self._embedding), 0 if told is None else len(told)),
            *(wait, behind, steps, self._words, temperature),
        )
        code.outrider_draw(*self._passes.addresses, ctypes.addressof(given), ctypes.addressof(drawing))
        return tokens, distributions


def _tiled(head: Linear) -> native.Tiled:
    """The same in tiles; rows are filled up with such as say nothing."""
    weight = head.weight
    more = -len(weight) % _TILE
    bias = None if head.bias is None else F.pad(head.bias, (0, more))
    return native.Tiled(F.pad(weight.to(torch.bfloat16), (0, 0, 0, more)), None, None, bias)
