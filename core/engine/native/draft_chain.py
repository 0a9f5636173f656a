"""Draft chains of a small decoder in one call of the compiled kernels (core/kernels/csrc/chain.h).

Drawn token by token through torch, the calls between the passes would take longer than the passes. Independent of
drafts and rules.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.distribution import Distribution
from outrider.core.engine.linear import Linear, Selected
from outrider.core.engine.native.native_pass import NativePass
from outrider.core.engine.types import PassLayout
from outrider.core.kernels import native

_TILE = 16  # output rows of a tile


class _Chain(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "conditioning", "norm", "head", "uniforms", "pending")),
        *((name, c_void_p) for name in ("kept", "tokens", "distributions", "logits", "state", "mask", "workspace")),
        *((name, c_int64) for name in ("embedding_rows", "conditioning_rows")),
        *((name, c_int32) for name in ("pending_count", "entries", "steps", "outputs", "last", "joint")),
        *((name, c_float) for name in ("temperature", "floor")),
    )


class NativeChain:
    """Draws chains from one network. Keeps a tiled copy of the output layer if that is not tiled already."""

    def __init__(self, runner: NativePass, embedding: Tensor, norm: Tensor, head: Linear) -> None:
        self._runner, self._embedding, self._norm = runner, embedding, norm.float().contiguous()
        self.kept = head.kept.contiguous() if isinstance(head, Selected) else None  # ids of the outputs; None: all
        rows = head.rows if isinstance(head, Selected) else head
        self._outputs = rows.shape[0] if isinstance(rows, native.Tiled) else rows.weight.shape[0]
        self._vocabulary = head.vocabulary if isinstance(head, Selected) else self._outputs
        self.head = rows if isinstance(rows, native.Tiled) else tiled(rows)

    def draw(
        self,
        pending: Tensor,
        entries: int,
        store: Tensor,
        steps: int,
        conditioning: Tensor | None,
        uniforms: np.ndarray | None,
        temperature: float,
        threshold: float,
        last: bool,
        joint: bool,
    ) -> tuple[Tensor, Distribution]:
        """Read the pending tokens [P] of a row with `entries` cached tokens, then draw up to `steps` tokens one by one:
        until a distribution whose highest probability at temperature 1 is below the threshold, or with `last` until its
        token. With `joint` that probability is multiplied by those of the tokens before it.

        Token i is drawn with uniforms[i]; without uniforms each token is the most probable one. Returns the tokens [N]
        and their distributions [1, N, S]. Keys and values of the tokens that were read, which are all but the last
        unless a distribution ended the chain before its token, are written to the store. `conditioning` [T, D] is added
        to the embeddings, by position."""
        code = native.library()
        assert code is not None
        size, head_rows, count = self._embedding.shape[1], self.head.shape[0], len(pending)
        columns, head = entries + count + steps, ctypes.addressof(self.head.matrix)
        tokens, floats = torch.empty(steps, dtype=torch.long), torch.empty(count * size + head_rows)
        distributions = None if uniforms is None else torch.empty(steps, self._outputs)
        state, mask = torch.empty(size, dtype=torch.bfloat16), torch.empty(count * columns, dtype=torch.bool)
        numbers = None if uniforms is None else np.ascontiguousarray(uniforms, np.float64)
        pending, conditioning = pending.contiguous(), None if conditioning is None else conditioning.contiguous()
        head_workspace = code.outrider_product_work(head, 1, torch.get_num_threads())
        workspace = native.work(max(head_workspace, self._runner.workspace_size(count, columns)))
        layout = PassLayout(torch.zeros(1, 1, dtype=torch.long), columns, None, entries)
        x, logits = floats[: count * size].view(count, size), floats[count * size :]
        arguments, _references = self._runner.arguments(x, store, layout, 0, self._runner.layers)
        chain = _Chain(
            *(native.at(part) for part in (self._embedding, conditioning, self._norm)),
            *(head, None if numbers is None else numbers.ctypes.data),
            *(native.at(part) for part in (pending, self.kept, tokens, distributions, logits, state, mask)),
            *(workspace, len(self._embedding), 0 if conditioning is None else len(conditioning)),
            *(count, entries, steps, self._outputs, last, joint, temperature, threshold),
        )
        drawn = code.outrider_draw(*self._runner.addresses, ctypes.addressof(arguments), ctypes.addressof(chain))
        tokens = tokens[:drawn]
        if distributions is None:
            return tokens, Distribution.point(tokens[None], self._vocabulary)
        return tokens, self._of_outputs(distributions[None, :drawn])

    def draw_rows(self, logits: Tensor, numbers: Tensor, temperature: float) -> tuple[Tensor, Distribution]:
        """A token [B] from each row of logits [B, V], drawn with one of the uniform numbers [B] as `draw` draws, and
        the distributions [B, S]."""
        places, probs = native.drawn(self._logits_of_outputs(logits), numbers, temperature)
        return places if self.kept is None else self.kept[places], self._of_outputs(probs)

    def confidence(self, logits: Tensor) -> Tensor:
        """The highest probability [B] of each row of logits [B, V], which `draw` compares with its threshold."""
        return native.highest(self._logits_of_outputs(logits))

    def _logits_of_outputs(self, logits: Tensor) -> Tensor:
        return logits if self.kept is None else logits[:, self.kept]

    def _of_outputs(self, probs: Tensor) -> Distribution:
        """Distributions over the outputs [..., S], over tokens."""
        return Distribution(probs, None if self.kept is None else self.kept.expand_as(probs), self._vocabulary)


def tiled(head: Linear) -> native.Tiled:
    """The layer in tiles, padded with zero rows to a whole number of tiles."""
    weight = head.weight
    padding = -len(weight) % _TILE
    bias = None if head.bias is None else F.pad(head.bias, (0, padding))
    return native.Tiled(F.pad(weight.to(torch.bfloat16), (0, 0, 0, padding)), None, None, bias)
