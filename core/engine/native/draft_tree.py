"""Draft trees of a trained head with one layer, each in one call of the compiled kernels (core/kernels/csrc/levels.h):
grown where they are most probable, or in a given shape.

Grown level by level through torch, the calls between the products would take longer than the products. Independent of
drafts and distributions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_void_p

import numpy as np
import torch
from torch import Tensor

from outrider.core.engine.native.native_pass import NativePass
from outrider.core.engine.native.sampled_tree import Family, Shape
from outrider.core.engine.types import PassLayout
from outrider.core.kernels import native
from outrider.core.protocol import DrawnTree

Grown = tuple[list[int], list[int], list[float]]  # tokens, parents (-1: the root), log probabilities of their paths


class _Growth(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "token_norm", "state_norm", "norm", "head", "head_ids")),
        *((name, c_void_p) for name in ("tap_norms", "fuse", "features", "pending")),
        *(
            (name, c_void_p)
            for name in ("tokens", "parents", "log_probs", "states", "x", "logits", "tap_states", "read")
        ),
        *((name, c_void_p) for name in ("top_values", "top_tokens", "positions", "mask", "workspace")),
        ("floor", c_double),
        *(
            (name, c_int32)
            for name in ("taps", "pending_count", "entries", "depth", "breadth", "threads", "vocabulary")
        ),
    )


class NativeTree:
    """Grows trees with a one-layer draft head.

    The layer reads a token's embedding and the state before it, each normed, side by side. For pending tokens that
    state is `fuse` of the target's normed states at the taps; for drafted tokens it is the layer's own output. `norms`:
    of tokens, of states, and before the output layer `head`, whose row i predicts the token head_ids[i] (None: i); rows
    from `outputs` on are padding."""

    def __init__(
        self,
        runner: NativePass,
        embedding: Tensor,
        norms: Sequence[Tensor],
        taps: Sequence[Tensor],
        fuse: native.Tiled,
        head: native.Tiled,
        head_ids: Tensor | None,
        outputs: int,
    ) -> None:
        self._outputs = outputs
        self._runner, self._embedding, self._head, self._fuse = runner, embedding, head, fuse
        self._norms = [norm.float().contiguous() for norm in norms]
        self._tap_norms = torch.stack([norm.float() for norm in taps])
        self._head_ids = None if head_ids is None else head_ids.contiguous()
        self._template = _Growth(
            *(part.data_ptr() for part in (embedding, *self._norms)),
            ctypes.addressof(head.matrix),
            native.at(self._head_ids),
            self._tap_norms.data_ptr(),
            ctypes.addressof(fuse.matrix),
            taps=len(taps),
            vocabulary=outputs,
        )

    def grow(
        self, features: Tensor, pending: Tensor, entries: int, store: Tensor, depth: int, breadth: int, floor: float
    ) -> Grown:
        """Read the pending tokens [P] of a row with `entries` cached tokens, with the target's states before them
        [P, taps D]; then grow a tree of `depth` levels below the last of them.

        Each expanded node gets its `breadth` most probable tokens, except those whose path has a log probability below
        `floor`; of each level the `breadth` most probable nodes are expanded. Returns all nodes, level by level. The
        store needs room for P + depth * breadth more tokens."""
        code = native.library()
        assert code is not None
        max_nodes = breadth + (depth - 1) * breadth**2
        longs, log_probs = torch.empty(2 * max_nodes, dtype=torch.long), torch.empty(max_nodes, dtype=torch.double)
        growth, arguments, _references = self._prepared(features, pending, entries, store, breadth, depth * breadth)
        growth.depth, growth.breadth, growth.floor = depth, breadth, floor
        growth.tokens, growth.parents = _split(longs, max_nodes)
        growth.log_probs = log_probs.data_ptr()
        nodes = code.outrider_grow(*self._runner.addresses, ctypes.addressof(arguments), ctypes.addressof(growth))
        return longs[:nodes].tolist(), longs[max_nodes : max_nodes + nodes].tolist(), log_probs[:nodes].tolist()

    def draw(
        self,
        features: Tensor,
        pending: Tensor,
        entries: int,
        store: Tensor,
        shape: Shape,
        numbers: np.ndarray | None,
        temperature: float,
    ) -> DrawnTree:
        """The same for a tree of a given shape: each node drawn with its uniform number [N], or without numbers the
        r-th likeliest token. The store needs room for P + shape.inner more tokens."""
        code = native.library()
        assert code is not None
        family = Family(shape, 1 + shape.inner, self._outputs, numbers, temperature, self._head_ids)
        growth, arguments, _references = self._prepared(features, pending, entries, store, shape.widest, shape.inner)
        growth.tokens, growth.parents = family.structure.tokens, family.structure.parents
        code.outrider_draw_tree(
            *self._runner.addresses, ctypes.addressof(arguments), ctypes.addressof(growth), family.address
        )
        return family.drawn(shape.by_parent)

    def _prepared(
        self, features: Tensor, pending: Tensor, entries: int, store: Tensor, breadth: int, reads: int
    ) -> tuple[_Growth, ctypes.Structure, object]:
        """The arguments for trees of which `reads` nodes are read, at most `breadth` of a level; and the references
        that must be kept meanwhile."""
        code, threads = native.library(), torch.get_num_threads()
        assert code is not None
        count, size, head_rows, taps = len(pending), self._embedding.shape[1], self._head.shape[0], len(self._tap_norms)
        widest, columns = max(count, breadth), entries + count + reads
        features, pending = features.contiguous(), pending.contiguous()
        floats = torch.empty(widest * size + breadth * max(head_rows, size) + breadth**2)
        halves = torch.empty((1 + reads + 2 * widest + count * taps) * size, dtype=torch.bfloat16)
        longs = torch.empty(breadth**2 + widest, dtype=torch.long)
        mask = torch.empty(widest * columns, dtype=torch.bool)
        workspace_sizes = (
            code.outrider_product_work(ctypes.addressof(self._head.matrix), breadth, threads),
            code.outrider_product_work(ctypes.addressof(self._fuse.matrix), count, threads),
            self._runner.workspace_size(widest, columns),
        )
        workspace = native.work(max(workspace_sizes))  # before `arguments`, which stores the address
        layout = PassLayout(torch.zeros(1, 1, dtype=torch.long), columns, None, entries)
        x = floats[: widest * size].view(widest, size)
        arguments, references = self._runner.arguments(x, store, layout, 0, 1)
        growth = _Growth.from_buffer_copy(self._template)
        growth.features, growth.pending = features.data_ptr(), pending.data_ptr()
        growth.pending_count, growth.entries, growth.threads = count, entries, threads
        growth.mask, growth.workspace = mask.data_ptr(), workspace
        growth.x, growth.logits, growth.top_values = _split(floats, widest * size, breadth * max(head_rows, size))
        growth.states, growth.tap_states, growth.read = _split(halves, (1 + reads) * size, count * taps * size)
        growth.top_tokens, growth.positions = _split(longs, breadth**2)
        return growth, arguments, (references, features, pending, floats, halves, longs, mask)


def _split(buffer: Tensor, *sizes: int) -> list[int]:
    """The addresses of consecutive parts of a buffer, `sizes` elements each, and of the remainder."""
    address, addresses = buffer.data_ptr(), []
    for size in (*sizes, 0):
        addresses.append(address)
        address += size * buffer.element_size()
    return addresses
