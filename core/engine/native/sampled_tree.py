"""Draft trees of a given shape, each in one call of the compiled kernels (core/kernels/csrc/siblings.h, heads.h).

A tree's nodes are drawn without replacement or are the likeliest tokens. Independent of drafters and rules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from outrider.core.kernels import native
from outrider.core.protocol import DrawnTree


class _Family(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("parents", "uniforms", "ids", "tokens", "live", "probs", "distributions")),
        *((name, c_int32) for name in ("nodes", "vocabulary")),
        ("temperature", c_float),
    )


class _Heads(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("state", "condition", "first", "about", "more", "output")),
        *((name, c_void_p) for name in ("sums", "logits", "states", "workspace")),
        *((name, c_int32) for name in ("heads", "steps", "width", "threads")),
    )


@dataclass(frozen=True, eq=False)
class Shape:
    """A tree level by level, the children of one node side by side."""

    parents: Tensor  # [N]
    depth: int
    widest: int  # the most nodes of a level that have children
    inner: int  # nodes with children
    by_parent: Tensor  # [N] the index among the root and the nodes with children of each node's parent
    by_level: Tensor  # [N] each node's level


@lru_cache(maxsize=256)
def shape_of(parents: tuple[int, ...]) -> Shape | None:
    """The shape of a tree whose nodes are in level order; None if siblings are not side by side."""
    if not parents or any(one > other for one, other in pairwise(parents)):
        return None
    levels: list[int] = []
    for parent in parents:
        levels.append(0 if parent < 0 else levels[parent] + 1)
    if sorted(levels) != levels:
        return None
    origins = sorted({*parents})
    index = {parent: number for number, parent in enumerate(origins)}
    per_level = [sum(1 for node in origins[1:] if levels[node] == level) for level in range(levels[-1] + 1)]
    return Shape(
        torch.tensor(parents),
        levels[-1] + 1,
        max(*per_level, 1),
        len(origins) - 1,
        torch.tensor([index[parent] for parent in parents]),
        torch.tensor(levels),
    )


class Family:
    """The arguments of a tree: its shape, and room for its nodes and distributions. `numbers`: uniforms [N] to draw
    with; None: take the likeliest tokens."""

    def __init__(
        self,
        shape: Shape,
        origins: int,
        outputs: int,
        numbers: np.ndarray | None,
        temperature: float,
        ids: Tensor | None,
    ) -> None:
        size = len(shape.parents)
        self._numbers = None if numbers is None else np.ascontiguousarray(numbers, np.float64)
        self.tokens, self.live = torch.empty(size, dtype=torch.long), torch.empty(size, dtype=torch.bool)
        self.probs, self.distributions, self.ids = torch.empty(size), torch.empty(origins, outputs), ids
        self._shape = shape
        self.structure = _Family(
            shape.parents.data_ptr(),
            None if self._numbers is None else self._numbers.ctypes.data,
            native.at(ids),
            *(part.data_ptr() for part in (self.tokens, self.live, self.probs, self.distributions)),
            *(size, outputs, temperature),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.structure)

    def drawn(self, source: Tensor) -> DrawnTree:
        return DrawnTree(self.tokens, self.live, self.probs, self.distributions, source, self.ids)


class NativeHeads:
    """Draws trees of heads that read the target's last state, as Medusa's: head k's state is x + SiLU(W_k x + V_k c_k),
    then x + SiLU(W x) for each of its further steps. `first` holds all W_k, `about` all V_k (None: heads read no
    conditions), `more` the further steps by head, and row i of `output` predicts the token ids[i] (None: i)."""

    def __init__(
        self,
        width: int,
        first: native.Tiled,
        about: native.Tiled | None,
        more: Sequence[Sequence[native.Tiled]],
        output: native.Tiled,
        outputs: int,
        ids: Tensor | None,
    ) -> None:
        self._references = first, about, more, output
        self._width, self._heads, self._outputs = width, len(more), outputs
        self._ids = None if ids is None else ids.contiguous()
        self._steps = len(more[0])
        flat = [step.matrix for steps in more for step in steps]
        self._more = (native.Matrix * max(len(flat), 1))(*flat)
        self._output, self._about = output, about
        matrices = (first, output) if about is None else (first, about, output)
        code, threads = native.library(), torch.get_num_threads()
        assert code is not None
        self._threads = threads
        tokens = self._heads
        self._work = max(
            code.outrider_product_work(ctypes.addressof(matrix.matrix), tokens, max(threads, 64)) for matrix in matrices
        )
        self._template = _Heads(
            first=ctypes.addressof(first.matrix),
            about=None if about is None else ctypes.addressof(about.matrix),
            more=ctypes.addressof(self._more),
            output=ctypes.addressof(output.matrix),
            steps=self._steps,
            width=width,
        )

    def draw(self, state: Tensor, shape: Shape, numbers: np.ndarray | None, temperature: float) -> DrawnTree | None:
        """The tree of a row from its state [W (1 + K)], the conditions behind it; None if it is deeper than there are
        heads."""
        code, heads, width = native.library(), shape.depth, self._width
        assert code is not None
        if heads > self._heads:
            return None
        state = state.contiguous()
        family = Family(shape, heads, self._outputs, numbers, temperature, self._ids)
        rows = self._heads * width
        floats = torch.empty(rows + width + heads * self._output.shape[0])
        states = torch.empty(heads * width, dtype=torch.bfloat16)
        call = _Heads.from_buffer_copy(self._template)
        call.state = state.data_ptr()
        call.condition = None if self._about is None else state.data_ptr() + width * state.element_size()
        call.sums, call.logits = floats.data_ptr(), floats.data_ptr() + (rows + width) * floats.element_size()
        call.states, call.workspace = states.data_ptr(), native.work(self._work)
        call.heads, call.threads = heads, min(torch.get_num_threads(), 64)
        code.outrider_draw_heads(ctypes.addressof(call), family.address)
        return family.drawn(shape.by_level)
