"""Trees that a trained layer grows beside its target, on a CPU with code for it: each in one call.

Between a level's few products torch's calls would take longer than the products themselves. Knows states, tokens and
addresses; nothing of drafts or distributions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_void_p

import torch
from torch import Tensor

from outrider.core.engine.native.native_pass import Passes
from outrider.core.engine.types import PassLayout
from outrider.core.kernels import native

Grown = tuple[list[int], list[int], list[float]]  # tokens, parents (-1: the root), logarithms of their paths' chances


class _Growth(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "embedded_norm", "entered_norm", "norm", "words", "ids")),
        *((name, c_void_p) for name in ("tap_norms", "fuse", "features", "waiting")),
        *((name, c_void_p) for name in ("tokens", "parents", "logs", "states", "x", "logits", "taken", "read")),
        *((name, c_void_p) for name in ("values", "places", "positions", "mask", "work")),
        ("floor", c_double),
        *((name, c_int32) for name in ("taps", "wait", "behind", "depth", "breadth", "threads")),
    )


class Levels:
    """What a layer makes of tokens and of states before them, the two side by side behind a norm each: of the target's
    states at some taps, normed and put together by a matrix; or of its own, normed. `norms` are those of tokens, of
    states and of what comes out."""

    def __init__(
        self,
        passes: Passes,
        embedding: Tensor,
        norms: Sequence[Tensor],
        taps: Sequence[Tensor],
        fuse: native.Tiled,
        words: native.Tiled,
        ids: Tensor | None,
    ) -> None:
        self._passes, self._embedding, self._words, self._fuse = passes, embedding, words, fuse
        self._norms = [norm.float().contiguous() for norm in norms]
        self._taps, self._ids = torch.stack([norm.float() for norm in taps]), None if ids is None else ids.contiguous()
        self._known = _Growth(
            *(part.data_ptr() for part in (embedding, *self._norms)),
            ctypes.addressof(words.matrix),
            None if self._ids is None else self._ids.data_ptr(),
            self._taps.data_ptr(),
            ctypes.addressof(fuse.matrix),
            taps=len(taps),
        )

    def grow(
        self, features: Tensor, waiting: Tensor, behind: int, store: Tensor, depth: int, breadth: int, floor: float
    ) -> Grown:
        """Read the tokens that wait [P], behind so many, with the features before them [P, taps D]; grow `depth` levels
        from the last of them, the `breadth` likeliest tokens behind each node, those of at least `floor`, and levels
        below the likeliest of them. All that was found, in that order; the store needs room for what is read."""
        code, threads = native.library(), torch.get_num_threads()
        assert code is not None
        wait, width, words = len(waiting), self._embedding.shape[1], self._words.shape[0]
        widest, most, columns = max(wait, breadth), breadth + (depth - 1) * breadth**2, behind + wait + depth * breadth
        features, waiting = features.contiguous(), waiting.contiguous()
        floats = torch.empty(widest * width + breadth * max(words, width) + breadth**2)
        halves = torch.empty((1 + depth * breadth + 2 * widest + wait * len(self._taps)) * width, dtype=torch.bfloat16)
        longs = torch.empty(2 * most + breadth**2 + widest, dtype=torch.long)
        logs, mask = torch.empty(most, dtype=torch.double), torch.empty(widest * columns, dtype=torch.bool)
        needed = (
            code.outrider_product_work(ctypes.addressof(self._words.matrix), breadth, threads),
            code.outrider_product_work(ctypes.addressof(self._fuse.matrix), wait, threads),
            self._passes.work(widest, columns),
        )
        space = native.work(max(needed))  # before anyone takes its address
        somewhere = PassLayout(torch.zeros(1, 1, dtype=torch.long), columns, None, behind)
        told, _kept = self._passes.given(floats[: widest * width].view(widest, width), store, somewhere, 0, 1)
        growth = _Growth.from_buffer_copy(self._known)
        growth.features, growth.waiting = features.data_ptr(), waiting.data_ptr()
        growth.work, growth.floor = space, floor
        growth.wait, growth.behind, growth.depth, growth.breadth, growth.threads = wait, behind, depth, breadth, threads
        growth.logs, growth.mask = logs.data_ptr(), mask.data_ptr()
        growth.x, growth.logits, growth.values = _parts(floats, widest * width, breadth * max(words, width))
        growth.states, growth.taken, growth.read = _parts(
            halves, (1 + depth * breadth) * width, wait * len(self._taps) * width
        )
        growth.tokens, growth.parents, growth.places, growth.positions = _parts(longs, most, most, breadth**2)
        count = code.outrider_grow(*self._passes.addresses, ctypes.addressof(told), ctypes.addressof(growth))
        return longs[:count].tolist(), longs[most : most + count].tolist(), logs[:count].tolist()


def _parts(whole: Tensor, *sizes: int) -> list[int]:
    """The addresses of parts of these sizes, and of what is behind them."""
    at, found = whole.data_ptr(), []
    for size in (*sizes, 0):
        found.append(at)
        at += size * whole.element_size()
    return found
