"""Levels of a tree that a trained layer grows beside its target, on a CPU with code for it: each in one call.

Between a level's few products torch's calls would take longer than the products themselves. Knows states, tokens and
addresses; nothing of drafts or laws.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p

import torch
from torch import Tensor

from outrider.core.engine import native
from outrider.core.engine.network import Places

Likeliest = tuple[list[list[int]], list[list[float]]]  # tokens behind each node, best first, and their logarithms


class _Level(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "embedded_norm", "entered_norm", "norm", "words")),
        *((name, c_void_p) for name in ("states", "tokens", "above", "x", "read", "logits", "work")),
        *((name, c_void_p) for name in ("values", "places", "levels")),
        *((name, c_int32) for name in ("first", "count", "best", "threads")),
    )


class Levels:
    """What a layer makes of tokens and of their parents' normed states, the two side by side behind a norm each, and
    the likeliest tokens behind each. State 0 is the root's."""

    def __init__(
        self, passes: native.Passes, embedding: Tensor, norms: Sequence[Tensor], words: native.Tiled, ids: Tensor | None
    ) -> None:
        self._passes, self._embedding, self._words = passes, embedding, words
        self._norms = [norm.float().contiguous() for norm in norms]  # of tokens, of states, of what comes out
        self._ids: list[int] | None = None if ids is None else ids.tolist()
        self._states = torch.empty(1, embedding.shape[1], dtype=torch.bfloat16)

    def begin(self, root: Tensor, best: int) -> Likeliest:
        """From a root's state [D]: what is likeliest behind it."""
        self._states[0] = root
        return self._said(0, 1, best, _Level(), None)

    def grow(
        self, tokens: Sequence[int], above: Sequence[int], first: int, best: int, store: Tensor, places: Places
    ) -> Likeliest:
        """Nodes of these tokens below these states become the states from `first` on: what is likeliest behind each."""
        count, width = len(tokens), self._embedding.shape[1]
        if first + count > len(self._states):
            wider = self._states.new_empty(2 * (first + count), width)
            wider[:first] = self._states[:first]
            self._states = wider
        x, read = torch.empty(count, width), torch.empty(count, 2 * width, dtype=torch.bfloat16)
        whom, parents = torch.tensor(tokens), torch.tensor(above)
        given, kept = self._passes.given(x, store, places, 0, 1, read)
        level = _Level(tokens=whom.data_ptr(), above=parents.data_ptr(), x=x.data_ptr(), read=read.data_ptr())
        found = self._said(first, count, best, level, ctypes.addressof(given))
        del kept
        return found

    def _said(self, first: int, count: int, best: int, level: _Level, given: int | None) -> Likeliest:
        code, threads, best = native.library(), torch.get_num_threads(), min(best, self._words.shape[0])
        assert code is not None
        logits, levels = torch.empty(count, self._words.shape[0]), torch.empty(count)
        values, places = torch.empty(count, best), torch.empty(count, best, dtype=torch.long)
        words = ctypes.addressof(self._words.matrix)
        level.embedding, level.states = self._embedding.data_ptr(), self._states.data_ptr()
        level.embedded_norm, level.entered_norm, level.norm = (norm.data_ptr() for norm in self._norms)
        level.words, level.logits, level.levels = words, logits.data_ptr(), levels.data_ptr()
        level.values, level.places = values.data_ptr(), places.data_ptr()
        level.first, level.count, level.best, level.threads = first, count, best, threads
        level.work = native.work(code.outrider_product_work(words, count, threads))
        code.outrider_level(*self._passes.addresses, given, ctypes.addressof(level))
        tokens = places.tolist()
        if self._ids is not None:
            tokens = [[self._ids[place] for place in row] for row in tokens]
        return tokens, (values - levels[:, None]).tolist()
