"""What the rows of a continuous batch have read, so that prompts with the same beginning are read from there on.

Keys, values and the hidden states that a drafter needs come from a row in use, or from blocks kept of rows that have
left: a tree keyed by tokens, in which texts share the blocks of a common beginning and the least recently used blocks
are dropped, as in RadixAttention (arXiv 2312.07104). Contiguous rows copy them; rows of pages share whole pages.
Independent of weights and of what a token means."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.engine.kv_cache.cache import Cache

_LEAST = 8  # shorter beginnings are read, not copied

Hidden = Mapping[str, Tensor]  # tap -> [1, n, D]


@dataclass(eq=False)
class _Block:
    """Some tokens after those of the parent."""

    tokens: tuple[int, ...]
    parent: _Block | None
    slots: Any  # as the cache keeps them
    hidden: Hidden
    bytes: int
    children: dict[tuple[int, ...], _Block] = field(default_factory=dict)


@dataclass(eq=False)
class _Row:
    """A row in use."""

    prompt: np.ndarray
    count: int  # prompt tokens read
    hidden: Hidden | None = None  # of the prompt; None: not yet read, or not held

    def shared(self, prompt: np.ndarray) -> int:
        """How many of the prompt's first tokens it has read."""
        size = min(self.count, len(prompt))
        different = np.flatnonzero(self.prompt[:size] != prompt[:size])
        return int(different[0]) if len(different) else size


def _bytes(hidden: Hidden | None) -> int:
    return sum(states.nbytes for states in (hidden or {}).values())


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Prefixes:
    """The rows in use and the blocks kept, of one cache. Blocks and hidden states have at most `limit` bytes; None:
    nothing is shared. `answers`: what followed a prompt is kept too, since it has the same numbers as in one."""

    def __init__(self, cache: Cache, *, answers: bool = True) -> None:
        self._cache, self._answers = cache, answers
        self.limit: int | None = None
        self._blocks: OrderedDict[_Block, None] = OrderedDict()  # least recently used first, children before parents
        cache.reclaim = self._drop_oldest
        self.open(frozenset())

    def open(self, needs: frozenset[str]) -> None:
        """Start without rows and blocks. Only what has the hidden states of `needs` is copied."""
        while self._drop_oldest():
            pass
        self._needs = needs
        self._reused = 0
        self._rows: dict[int, _Row] = {}
        self._first: dict[tuple[int, ...], _Block] = {}
        self._block_bytes = 0

    @property
    def reused(self) -> int:
        """The number of tokens that were copied."""
        return self._reused

    @property
    def bytes(self) -> int:
        """Bytes of the blocks, and of the hidden states held for rows in use."""
        return self._block_bytes + sum(_bytes(row.hidden) for row in self._rows.values())

    def restrict(self, limit: int | None) -> None:
        """Set the limit, and drop what exceeds it."""
        self.limit = limit
        if limit is None:
            self.open(self._needs)
        self._fit()

    # ---- rows

    def enter(self, row: int, prompt: Sequence[int]) -> tuple[int, dict[str, Tensor]]:
        """Start a row with this prompt: copy to it what is known of all but the last token -> the number of tokens
        copied, and their hidden states."""
        if self.limit is None:
            return 0, {}
        ids = np.asarray(prompt)
        wanted, source, count = ids[:-1], -1, 0
        for other, known in self._rows.items():
            ready = known.count if not self._needs or known.hidden is not None else 0
            if other != row and ready and (shared := known.shared(wanted)) > count:
                source, count = other, shared
        path, kept = self._find(tuple(wanted.tolist()))
        cache, hidden = self._cache, dict[str, Tensor]()
        if max(count, kept) < _LEAST:
            count = 0
        elif count >= kept:
            cache.copy(row, source, count)
            states = self._rows[source].hidden or {}
            hidden = {tap: states[tap][:, :count] for tap in self._needs}
        else:
            count = kept
            cache.fill(row, [block.slots for block in path], count)
            hidden = {tap: torch.cat([block.hidden[tap] for block in path], 1)[:, :count] for tap in self._needs}
            self._touch(path[-1])
        self._rows[row] = _Row(ids, count)
        self._reused += count
        return count, hidden

    def read(self, row: int, count: int) -> None:
        """A row has read this many tokens of its prompt."""
        if row in self._rows:
            self._rows[row].count = count

    def finish(self, row: int, hidden: Hidden) -> None:
        """A row has read its prompt, with these hidden states."""
        if row in self._rows:
            self._rows[row].hidden = hidden
            self._fit()

    def arrange(self, order: Sequence[int]) -> None:
        """Row i is the former row order[i]."""
        self._rows = {new: self._rows[old] for new, old in enumerate(order) if old in self._rows}

    def leave(self, row: int) -> None:
        self._rows.pop(row, None)

    # ---- blocks

    def retain(self, row: int, tokens: Sequence[int]) -> None:
        """Keep what a row has read of these tokens, its prompt and what followed; with hidden states only of the
        prompt, since those of later tokens are not held."""
        known = self._rows.get(row)
        if known is None or not self.limit:
            return
        count = min(self._entries(row, len(tokens)), len(tokens))
        if not self._answers:
            count = min(count, len(known.prompt) - 1)
        hidden = {} if not self._needs else known.hidden or {}
        if self._needs:
            count = min([count, *(hidden[tap].shape[1] if tap in hidden else 0 for tap in self._needs)])
        each = self._cache.slot_bytes + sum(states.nbytes // max(states.shape[1], 1) for states in hidden.values())
        count = min(count, self.limit // each)
        if count < _LEAST:
            return
        block: _Block | None = None
        size = self._cache.block
        for start in range(0, count, size):
            stop = min(start + size, count)
            block = self._keep(block, row, tuple(tokens[start:stop]), start, hidden)
        assert block is not None
        self._touch(block)
        self._fit()

    def _entries(self, row: int, committed: int) -> int:
        """How many tokens of a row are surely in the store; the host may know only upper bounds."""
        rows = self._cache.rows
        return min(rows.host[row], committed - rows.pending.shape[1]) if rows.bounds else rows.host[row]

    def _keep(self, parent: _Block | None, row: int, tokens: tuple[int, ...], start: int, hidden: Hidden) -> _Block:
        """The block of these tokens, copied from a row's slots from `start` on unless it is there."""
        children = self._first if parent is None else parent.children
        if (known := children.get(tokens)) is not None:
            return known
        for shorter in [key for key in children if len(key) < len(tokens) and tokens[: len(key)] == key]:
            self._drop(children[shorter])
        stop = start + len(tokens)
        slots, size = self._cache.keep_slots(row, start, stop)
        states = {tap: hidden[tap][:, start:stop].clone() for tap in self._needs}
        block = children[tokens] = _Block(tokens, parent, slots, states, size + _bytes(states))
        self._blocks[block] = None
        self._block_bytes += block.bytes
        return block

    def _find(self, tokens: tuple[int, ...]) -> tuple[list[_Block], int]:
        """The blocks with the longest beginning of these tokens, and its length, which may end within the last one."""
        path, children, count, size = list[_Block](), self._first, 0, self._cache.block
        while (block := children.get(tokens[count : count + size])) is not None:
            path.append(block)
            children, count = block.children, count + len(block.tokens)
        rest = tokens[count : count + size]
        last = max(children.values(), key=lambda block: _common(block.tokens, rest), default=None)
        if last is not None and (more := _common(last.tokens, rest)):
            path.append(last)
            count += more
        return path, count

    def _touch(self, block: _Block | None) -> None:
        """The block and those before it were used."""
        while block is not None:
            self._blocks.move_to_end(block)
            block = block.parent

    def _drop(self, block: _Block) -> None:
        """Drop a block without children."""
        del (self._first if block.parent is None else block.parent.children)[block.tokens]
        del self._blocks[block]
        self._block_bytes -= block.bytes
        self._cache.drop(block.slots)

    def _drop_oldest(self) -> bool:
        """Drop the least recently used block; False if there is none."""
        if self._blocks:
            self._drop(next(iter(self._blocks)))
            return True
        return False

    def _fit(self) -> None:
        """Drop blocks, then hidden states of rows, until they fit."""
        while self._blocks and self.bytes > (self.limit or 0):
            self._drop_oldest()
        for row in self._rows.values():
            if self._needs and self.bytes > (self.limit or 0):
                row.hidden = None
