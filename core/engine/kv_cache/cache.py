"""Keys and values of what a batch has read: ragged rows, a scratch behind each, and the accepted path kept.

A row's committed tokens are its entries in the store and, behind them, the tokens waiting to be read: always at least
the last one, the root. A pass writes those and the draft's nodes into the slots behind the entries; what is kept moves
forward and becomes entries, the rest is written over. Knows nothing of weights, distributions or rules. Where the
lengths are only known on a device, the host works with bounds on them and does not look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.engine.cuda_graphs import GraphPool
from outrider.core.engine.types import PassLayout
from outrider.core.protocol import Prompts, committed

_FEW = 8  # rows that are quicker counted one by one


@dataclass(frozen=True, eq=False)
class Rows:
    """How far each row has been read, and what of it waits. A snapshot of this is all that a rewind needs."""

    entries: Tensor  # [B] tokens whose keys and values are in the store
    pending: Tensor  # [B, P] committed tokens behind them, not read yet; the root is the last of them
    waiting: Tensor  # [B] how many of P, 1 or more
    host: tuple[int, ...]  # entries as the host knows them: exactly, or upper bounds
    left: tuple[int, ...]  # waiting, likewise
    even: bool  # is it known that all rows are equally long and P wait in each?
    bounds: bool = False  # whether the host knows upper bounds alone

    @property
    def committed(self) -> Tensor:
        """[B] tokens."""
        return self.entries + self.waiting


class Cache:
    """The store, and who stands where in it."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape  # layers, heads of keys and values together, width of a head (in 8 bits: of its slot)
        self.dtype, self.device = dtype, device
        self.exact = device.type == "cpu"
        self.store = torch.zeros(0)  # [L, B, 2 K, C, d]
        self.pool: GraphPool | None = None  # who lends stores, where they are to stay in one place

    def begin(self, prompts: Prompts) -> None:
        """Nothing read yet; each prompt waits."""
        longest = max(map(len, prompts))
        self.rows = waiting(prompts, self.device)
        self.scored = -1  # draft nodes in the scratch; -1: not even the root
        self.writer: object = None  # whose scratch it is: the model's own, or a view's
        layers, heads, dim = self._shape
        self._return()
        self.store = self._empty((layers, len(prompts), heads, longest + 64, dim))

    def _empty(self, shape: tuple[int, int, int, int, int]) -> Tensor:
        if self.pool is not None:
            return self.pool.borrow(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _return(self) -> None:
        if self.pool is not None and self.store.dim() == 5:
            self.pool.give_back(self.store)
        self.store = torch.zeros(0)

    def end(self) -> None:
        self._return()
        nothing = torch.zeros(0, dtype=torch.long, device=self.device)
        self.rows = Rows(nothing, nothing[:, None], nothing, (), (), True)

    def chunk(self, start: int, stop: int, rows: slice = slice(None)) -> tuple[Tensor, PassLayout]:
        """Read the prompts, or some rows of them, from `begin` on, at these columns: ids [B, Q] and their places.
        Shorter rows read on into their padding, which nothing looks at and a later pass writes over."""
        self._widen(stop)
        return self.rows.pending[rows, start:stop], self.stretch(start, stop)

    def stretch(self, start: int, stop: int) -> PassLayout:
        """The places of tokens read one after another."""
        positions = torch.arange(start, stop, device=self.device)
        mask = torch.arange(stop, device=self.device) <= positions[:, None]
        return PassLayout(positions[None], stop, mask[None], start)

    # ---- rows that come and go

    def open(self) -> None:
        """No rows yet."""
        layers, heads, dim = self._shape
        nothing = torch.zeros(0, dtype=torch.long, device=self.device)
        self.rows, self.scored, self.writer = Rows(nothing, nothing[:, None], nothing, (), (), False), -1, None
        self.store = torch.zeros(layers, 0, heads, 64, dim, dtype=self.dtype, device=self.device)

    @property
    def bytes(self) -> int:
        """Held now."""
        return self.store.numel() * self.store.element_size()

    @property
    def slot_bytes(self) -> int:
        """Of one token's keys and values."""
        layers, heads, dim = self._shape
        return layers * heads * dim * self.dtype.itemsize

    def arrange(self, order: Sequence[int], width: int) -> None:
        """Row i is from now on what row order[i] was; -1: an empty one, which reads nothing that counts. The store is
        as wide as is wanted, and as what is in it needs."""
        rows = self.rows
        wait = max(rows.pending.shape[1], 1)
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        entries, waiting = (
            F.pad(one, (0, 1), value=fill)[index] for one, fill in ((rows.entries, 0), (rows.waiting, 1))
        )
        pending = F.pad(rows.pending, (0, wait - rows.pending.shape[1], 0, 1))[index]
        host, left = (
            tuple(known[row] if row >= 0 else fill for row in order) for known, fill in ((rows.host, 0), (rows.left, 1))
        )
        self.rows = Rows(entries, pending, waiting, host, left, False, rows.bounds)
        self.scored, self.writer = -1, None
        layers, batch, heads, size, dim = self.store.shape
        width = -(-max(width, max(host, default=0) + wait) // 64) * 64
        if list(order) == list(range(batch)) and width == size:
            return
        kept = self.store.new_zeros(layers, len(order), heads, width, dim)
        for new, old in enumerate(order):
            if old >= 0 and (filled := min(host[new], size)):
                kept[:, new, :, :filled] = self.store[:, old, :, :filled]
        self.store = kept

    def stand(self, row: int, entries: int, root: int) -> None:
        """So many of a row's tokens have been read, and this one waits."""
        rows = self.rows
        read, pending, waits = (one.clone() for one in (rows.entries, rows.pending, rows.waiting))
        read[row], pending[row, 0], waits[row] = entries, root, 1
        host, left = (
            (*known[:row], value, *known[row + 1 :]) for known, value in ((rows.host, entries), (rows.left, 1))
        )
        self.rows = Rows(read, pending, waits, host, left, False, rows.bounds)

    def window(self, sinks: int, recent: int, layers: int, between: Tensor | None = None) -> tuple[Cache, Tensor]:
        """A copy of each row's first and last entries, and of those in between at slots [L, B, K, M], as a cache of its
        own; and how many [B] it leaves out."""
        rows = self.rows
        more = 0 if between is None else between.shape[3]
        kept = sinks + more + recent
        found = Cache((layers, *self._shape[1:]), self.dtype, self.device)
        entries = rows.entries.clamp(max=kept)
        found.rows = replace(rows, entries=entries, host=tuple(min(one, kept) for one in rows.host))
        found.scored, found.writer = -1, None
        place = torch.arange(min(kept, max(rows.host)), device=self.device)
        left_out = rows.entries - entries
        source = place + torch.where(place < sinks + more, 0, left_out[:, None])
        heads, dim = self._shape[1:]
        slots = source[None, :, None].expand(layers, -1, heads, -1)
        if between is not None:
            slots = slots.clone()
            long = (rows.entries >= kept)[None, :, None, None]  # a shorter row is all there
            middle = slice(sinks, sinks + more)
            chosen = between[:layers].repeat(1, 1, 2, 1)
            slots[..., middle] = torch.where(long, chosen, slots[..., middle])
        found.store = self.store[:layers].gather(3, slots[..., None].expand(-1, -1, -1, -1, dim))
        found.store = F.pad(found.store, (0, 0, 0, 64))
        return found, left_out

    def prefilled(self, prompts: Prompts) -> None:
        """All of each prompt but its last token has been read."""
        self.rows = prefilled(prompts, self.device, self.exact)

    def plan(self, draft: Draft, since: int | None, gap: int = 0) -> tuple[Tensor, PassLayout]:
        """What to feed, ids [B, Q], and where: the waiting tokens and the nodes; with `since`, the nodes from there.
        A gap leaves slots alone that somebody else's scratch is in."""
        rows = self.rows
        wait, size = rows.pending.shape[1], draft.size
        skip = 0 if since is None else wait + since
        total = wait + size
        self.reserve(gap + total)
        rows = self.rows
        columns = self._columns(max(rows.host) + gap + total)
        ids = torch.cat([rows.pending, draft.tokens], 1)[:, skip:]
        positions = standing(rows, draft)[:, skip:]
        if rows.even:
            first, start = rows.host[0], rows.host[0] + gap
            if draft.tree.is_chain and total - skip == 1 and not gap:
                return ids, PassLayout(positions, start + total, None, start + skip)
            mask = _behind(first, gap, near(rows, draft)[:, skip:])
            return ids, PassLayout(positions, start + total, mask, start + skip)
        close = near(rows, draft)[:, skip:].expand(len(ids), -1, -1)
        column = torch.arange(columns, device=self.device)
        behind = (column - rows.entries[:, None])[:, None]  # [B, 1, C]
        place = behind - gap
        inside = (place >= 0) & (place < total)
        found = close.gather(2, place.clamp(0, total - 1).expand(-1, close.shape[1], -1))
        slots = rows.entries[:, None] + torch.arange(gap + skip, gap + total, device=self.device)
        return ids, PassLayout(positions, columns, (behind < 0) | (inside & found), None, slots)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> Tensor:
        """Keep the first `count` [B] emitted tokens of each row -> those tokens [B, D + 1], -1 behind them."""
        rows, wait = self.rows, self.rows.pending.shape[1]
        self.rows, tokens, kept = advance(rows, self.scored, draft, verdict, count, self.exact)
        if self.scored > 0 and verdict.path.shape[1] and not (wait == 1 and draft.tree.is_chain):
            self.reserve(wait + max(wait, kept.shape[1]))  # the draft may be deeper than what was scored of it
            move = self._move_some if self.exact else self._move
            move(rows, verdict.path, kept)
        self.scored = -1
        return tokens

    def _move(self, rows: Rows, path: Tensor, kept: Tensor) -> None:
        """Copy the entries of a path's nodes [B, D], where they are kept, behind those there are, in all layers."""
        here = (rows.entries + rows.waiting)[:, None] + torch.arange(kept.shape[1], device=self.device)
        there = (rows.entries + rows.pending.shape[1])[:, None] + path
        row = torch.arange(len(path), device=self.device)[:, None]
        self.store[:, row, :, here] = self.store[:, row, :, torch.where(kept, there, here)]

    def _move_some(self, rows: Rows, path: Tensor, kept: Tensor) -> None:
        """The same by looking: mostly they stand where they should."""
        wait, waiting = rows.pending.shape[1], rows.waiting.tolist()
        moves = [
            (row, rows.host[row] + wait + node, rows.host[row] + waiting[row] + place)
            for row, (nodes, stay) in enumerate(zip(path.tolist(), kept.tolist(), strict=True))
            for place, (node, one) in enumerate(zip(nodes, stay, strict=True))
            if one and wait + node != waiting[row] + place
        ]
        if moves:
            row, source, target = torch.tensor(moves).unbind(1)
            self.store[:, row, :, target] = self.store[:, row, :, source]

    def mark(self) -> Rows:
        return self.rows

    def rewind(self, rows: Rows) -> None:
        """Back to a mark; entries behind it are written over. Marks taken in between are no longer good. Where nothing
        was kept since, what waited stays read, and only the nodes are dropped."""
        self.scored = min(self.scored, 0) if rows.entries is self.rows.entries else -1
        self.rows = rows

    def _columns(self, needed: int) -> int:
        """On a device, in steps: fewer different shapes, and fewer still where each is captured."""
        step = 64 if self.pool is None else 256 if needed <= 2048 else 1024
        return needed if self.exact else min(-(-needed // step) * step, self.store.shape[3])

    def reserve(self, extra: int) -> None:
        """Room for this many slots behind the entries of the longest row."""
        size = self.store.shape[3]
        if max(self.rows.host) + extra <= size:
            return
        if self.rows.bounds:  # they may have drifted: ask the device once, which is rare
            host, left = torch.stack([self.rows.entries, self.rows.waiting]).tolist()
            self.rows = replace(self.rows, host=tuple(host), left=tuple(left), bounds=False)
        self._widen(max(self.rows.host) + extra)

    def _widen(self, needed: int) -> None:
        """Room for this many slots in each row."""
        layers, batch, heads, size, dim = self.store.shape
        if needed <= size:
            return
        wider = self._empty((layers, batch, heads, -(-max(needed, size * 3 // 2) // 64) * 64, dim))
        wider[:, :, :, :size] = self.store
        self._return()
        self.store = wider


def waiting(prompts: Prompts, device: torch.device) -> Rows:
    """Nothing read yet; each prompt waits."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    entries = torch.zeros(len(prompts), dtype=torch.long, device=device)
    even = min(lengths) == longest
    return Rows(entries, ids, torch.tensor(lengths, device=device), (0,) * len(prompts), tuple(lengths), even)


def prefilled(prompts: Prompts, device: torch.device, exact: bool) -> Rows:
    """All of each prompt but its last token has been read."""
    entries = [len(prompt) - 1 for prompt in prompts]
    last = torch.tensor([[prompt[-1]] for prompt in prompts], device=device)
    lengths = torch.tensor(entries, device=device)
    even = exact and min(entries) == max(entries)
    return Rows(lengths, last, torch.ones_like(lengths), tuple(entries), (1,) * len(prompts), even)


def standing(rows: Rows, draft: Draft) -> Tensor:
    """[B, P + N] the position in its sequence of each waiting token and each node."""
    batch, wait = rows.pending.shape
    if rows.even and draft.positions is None:
        return rows.entries[:, None] + draft.tree.behind(wait)[1]
    ahead = torch.arange(wait, device=rows.entries.device).expand(batch, -1)
    nodes = (rows.waiting[:, None] - 1 + draft.offsets).expand(batch, -1)
    return rows.entries[:, None] + torch.cat([ahead, nodes], 1)


def near(rows: Rows, draft: Draft) -> Tensor:
    """[B|1, P + N, P + N] bool: which of the waiting tokens and nodes each of them may look at."""
    wait = rows.pending.shape[1]
    sight = draft.tree.behind(wait)[0]
    if rows.even or not draft.size:
        return sight
    real = torch.arange(wait, device=rows.entries.device) < rows.waiting[:, None]  # [B, P]
    below = sight[:, wait:] & F.pad(real, (0, draft.size), value=True)[:, None]
    return torch.cat([sight[:, :wait].expand(len(below), -1, -1), below], 1)


def _behind(first: int, gap: int, sight: Tensor) -> Tensor:
    """What may be looked at [1, Q, N] behind `first` columns that all may look at, and a gap that none may."""
    if sight.device.type == "cpu":
        table = np.ones((*sight.shape[:2], first + gap + sight.shape[2]), dtype=bool)
        table[..., first : first + gap] = False
        table[..., first + gap :] = sight.numpy()
        return torch.from_numpy(table)
    return F.pad(F.pad(sight, (gap, 0)) if gap else sight, (first, 0), value=True)


def advance(
    rows: Rows, scored: int, draft: Draft, verdict: Verdict, count: Tensor, exact: bool
) -> tuple[Rows, Tensor, Tensor]:
    """The rows when the first `count` [B] emitted tokens are kept, `scored` nodes having been read (-1: not even what
    waited); those tokens [B, D + 1], -1 behind them; and which of the path's nodes [B, D] have become entries, or would
    have, were the last token not to be the next root."""
    if rows.entries.device.type == "cpu" and len(rows.host) <= _FEW:
        return _counted(rows, scored, draft, verdict, count)
    depth, wait = verdict.path.shape[1], rows.pending.shape[1]
    device = rows.entries.device
    tokens = committed(draft, verdict, count)
    place = torch.arange(depth, device=device)
    kept = (verdict.path >= 0) & (verdict.path < scored) & (place < count[:, None])  # a prefix
    known = rows.waiting + kept.sum(1) if scored >= 0 else torch.zeros_like(rows.waiting)
    grown = torch.minimum(known, rows.waiting + count - 1)
    left, entries = rows.waiting + count - grown, rows.entries + grown
    bounds = not exact and (rows.bounds or verdict.outcome is None)
    if exact:
        host, lefts = tuple(entries.tolist()), tuple(left.tolist())
        width, even = max(lefts), len({*host}) == 1 and len({*lefts}) == 1
    else:
        unread = depth + wait if scored < 0 else max(min(draft.size - scored, depth), 0)
        width, even = 1 + unread, False
        if verdict.outcome is None:
            host, lefts = tuple(known + wait + depth for known in rows.host), (width,) * len(rows.host)
        else:
            host, lefts = _lengths(rows, scored, verdict.outcome)
    everything = torch.cat([rows.pending, tokens], 1)
    index = grown[:, None] + torch.arange(width, device=device)
    index = torch.where(index < rows.waiting[:, None], index, index + (wait - rows.waiting)[:, None])
    pending = everything.gather(1, index.clamp(max=everything.shape[1] - 1))
    return Rows(entries, pending, left, host, lefts, even, bounds), tokens, kept


def _lengths(rows: Rows, scored: int, outcome: Outcome) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Entries and waiting of each row behind a verdict, from what the host knows. From bounds come bounds: of the
    waiting tokens as many become entries as may."""
    host, left = list[int](), list[int]()
    for entries, waits, path, count in zip(rows.host, rows.left, outcome.paths, outcome.counts, strict=True):
        kept = next((place for place, node in enumerate(path[:count]) if node >= scored), min(len(path), count))
        grown = min(waits + kept if scored >= 0 else 0, waits + count - 1)
        host.append(entries + grown)
        left.append(rows.pending.shape[1] + count if rows.bounds else waits + count - grown)
    return tuple(host), tuple(left)


def _counted(rows: Rows, scored: int, draft: Draft, verdict: Verdict, count: Tensor) -> tuple[Rows, Tensor, Tensor]:
    """`advance` by counting on the host: for a few rows, calling as many operations takes longer."""
    depth, counts, emitted = verdict.path.shape[1], count.tolist(), verdict.rows(draft)
    waits, waiting, paths = rows.waiting.tolist(), rows.pending.tolist(), verdict.path.tolist()
    entries, pending, kept = list[int](), list[list[int]](), list[int]()
    for row, new in enumerate(counts):
        stops = (place for place, node in enumerate(paths[row][:new]) if not 0 <= node < scored)
        kept.append(next(stops, min(new, depth)))
        everything = waiting[row][: waits[row]] + emitted[row][:new]
        known = waits[row] + kept[row] if scored >= 0 else 0
        grown = min(known, len(everything) - 1)
        entries.append(rows.host[row] + grown)
        pending.append(everything[grown:])
    left = [len(one) for one in pending]
    width, even = max(left), len({*entries}) == 1 and len({*left}) == 1
    padded = torch.tensor([one + [0] * (width - len(one)) for one in pending])
    tokens = torch.tensor([(emitted[row][:new] + [-1] * (depth + 1))[: depth + 1] for row, new in enumerate(counts)])
    places = torch.tensor([[place < one for place in range(depth)] for one in kept], dtype=torch.bool)
    known = tuple(entries), tuple(left)
    return Rows(torch.tensor(entries), padded, torch.tensor(left), *known, even), tokens, places
