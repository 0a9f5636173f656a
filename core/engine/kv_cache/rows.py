"""The lengths and pending tokens of a batch's rows, and how a round changes them.

The host follows the lengths without synchronising with a GPU, exactly or as upper bounds. Independent of keys and
values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.engine.kv_cache.page_tables import located
from outrider.core.protocol import Prompts, committed

_FEW = 8  # up to this many rows, bookkeeping on the host is faster than with tensors


@dataclass(frozen=True, eq=False)
class Rows:
    """Lengths and pending tokens of all rows. A rewind needs no more than an earlier value of this."""

    entries: Tensor  # [B] tokens whose keys and values are in the store
    pending: Tensor  # [B, P] committed tokens after the entries that have not been read; the last one is the root
    pending_count: Tensor  # [B] how many of the P are real, 1 or more
    host: tuple[int, ...]  # entries as the host knows them
    host_pending: tuple[int, ...]  # pending_count as the host knows it
    uniform: bool  # known to have equal entries and P pending tokens in all rows
    bounds: bool = False  # whether the two host fields are upper bounds instead of exact
    table: Tensor | None = None  # [B, N] the page of the store that has a row's next PAGE slots; None: row i has it all

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """What a recording reads, of which `device_rows` makes rows again."""
        return self.entries, self.pending, self.pending_count, self.table

    def located(self, row: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """The indices of slots in the second and the fourth dimension of the store."""
        return located(self.table, row, slot)

    @property
    def committed(self) -> Tensor:
        """[B] committed tokens of each row."""
        return self.entries + self.pending_count


def device_rows(inputs: Sequence[Tensor | None]) -> Rows:
    """Rows of which only the device knows the lengths, as in a recording, from their `inputs`."""
    entries, pending, pending_count, table = inputs
    assert entries is not None and pending is not None and pending_count is not None
    unknown = (0,) * len(entries)
    return Rows(entries, pending, pending_count, unknown, unknown, False, table=table)


def unread_rows(prompts: Prompts, device: torch.device) -> Rows:
    """Rows with nothing read and the whole prompts pending."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    entries = torch.zeros(len(prompts), dtype=torch.long, device=device)
    uniform = min(lengths) == longest
    return Rows(entries, ids, torch.tensor(lengths, device=device), (0,) * len(prompts), tuple(lengths), uniform)


def prefilled_rows(prompts: Prompts, device: torch.device, exact: bool) -> Rows:
    """Rows with all of each prompt read but its last token, which is pending."""
    entries = [len(prompt) - 1 for prompt in prompts]
    last = torch.tensor([[prompt[-1]] for prompt in prompts], device=device)
    lengths = torch.tensor(entries, device=device)
    even = exact and min(entries) == max(entries)
    return Rows(lengths, last, torch.ones_like(lengths), tuple(entries), (1,) * len(prompts), even)


def sequence_positions(rows: Rows, draft: Draft) -> Tensor:
    """[B, P + N] the position of each pending token and each node in its sequence."""
    batch, wait = rows.pending.shape
    if rows.uniform and draft.positions is None:
        return rows.entries[:, None] + draft.tree.mask_after(wait)[1]
    pending = torch.arange(wait, device=rows.entries.device).expand(batch, -1)
    nodes = (rows.pending_count[:, None] - 1 + draft.offsets).expand(batch, -1)
    return rows.entries[:, None] + torch.cat([pending, nodes], 1)


def scratch_mask(rows: Rows, draft: Draft) -> Tensor:
    """[B|1, P + N, P + N] bool: the attention mask among pending tokens and nodes."""
    wait = rows.pending.shape[1]
    mask = draft.tree.mask_after(wait)[0]
    if rows.uniform or not draft.size:
        return mask
    real = torch.arange(wait, device=rows.entries.device) < rows.pending_count[:, None]  # [B, P]
    nodes = mask[:, wait:] & F.pad(real, (0, draft.size), value=True)[:, None]
    return torch.cat([mask[:, :wait].expand(len(nodes), -1, -1), nodes], 1)


def live_tokens(rows: Rows, draft: Draft) -> Tensor | None:
    """[B, P + N] bool: the pending tokens and nodes that are real, on the host; None: all are."""
    wait, live = rows.pending.shape[1], draft.live
    if live.device.type != "cpu" or (bool(live.all()) and min(rows.host_pending) == wait):
        return None
    real = torch.arange(wait) < rows.pending_count[:, None]
    return torch.cat([real, live.expand(len(real), -1)], 1)


def full_mask(first: int, gap: int, scratch: Tensor) -> Tensor:
    """The mask [1, Q, N] of the scratch, preceded by `first` visible columns and `gap` masked ones."""
    if scratch.device.type == "cpu":
        mask = np.ones((*scratch.shape[:2], first + gap + scratch.shape[2]), dtype=bool)
        mask[..., first : first + gap] = False
        mask[..., first + gap :] = scratch.numpy()
        return torch.from_numpy(mask)
    return F.pad(F.pad(scratch, (gap, 0)) if gap else scratch, (first, 0), value=True)


def advance(
    rows: Rows, scored: int, draft: Draft, verdict: Verdict, count: Tensor, exact: bool
) -> tuple[Rows, Tensor, Tensor]:
    """The rows after committing the first `count` [B] emitted tokens, if `scored` nodes were read (-1: not even the
    pending tokens). Also returns those tokens [B, D + 1], padded with -1, and which nodes of the path [B, D] were both
    committed and read; they become entries, except that the last committed token stays pending as the next root."""
    if rows.entries.device.type == "cpu" and len(rows.host) <= _FEW:
        return _advance_on_host(rows, scored, draft, verdict, count)
    depth, wait = verdict.path.shape[1], rows.pending.shape[1]
    device = rows.entries.device
    tokens = committed(draft, verdict, count)
    place = torch.arange(depth, device=device)
    kept = (verdict.path >= 0) & (verdict.path < scored) & (place < count[:, None])  # a prefix
    read = rows.pending_count + kept.sum(1) if scored >= 0 else torch.zeros_like(rows.pending_count)
    grown = torch.minimum(read, rows.pending_count + count - 1)
    left, entries = rows.pending_count + count - grown, rows.entries + grown
    bounds = not exact and (rows.bounds or verdict.outcome is None)
    if exact:
        host, host_pending = tuple(entries.tolist()), tuple(left.tolist())
        width, uniform = max(host_pending), len({*host}) == 1 and len({*host_pending}) == 1
    else:
        unread = depth + wait if scored < 0 else max(min(draft.size - scored, depth), 0)
        width, uniform = 1 + unread, False
        if verdict.outcome is None:
            host, host_pending = tuple(bound + wait + depth for bound in rows.host), (width,) * len(rows.host)
        else:
            host, host_pending = host_lengths(rows, scored, verdict.outcome)
    all_tokens = torch.cat([rows.pending, tokens], 1)
    index = grown[:, None] + torch.arange(width, device=device)
    index = torch.where(index < rows.pending_count[:, None], index, index + (wait - rows.pending_count)[:, None])
    pending = all_tokens.gather(1, index.clamp(max=all_tokens.shape[1] - 1))
    return Rows(entries, pending, left, host, host_pending, uniform, bounds, rows.table), tokens, kept


def host_lengths(rows: Rows, scored: int, outcome: Outcome) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The new entries and pending tokens of each row, computed on the host; upper bounds if the old ones were."""
    host, host_pending = list[int](), list[int]()
    for entries, pending, path, count in zip(rows.host, rows.host_pending, outcome.paths, outcome.counts, strict=True):
        kept = next((place for place, node in enumerate(path[:count]) if node >= scored), min(len(path), count))
        grown = min(pending + kept if scored >= 0 else 0, pending + count - 1)
        host.append(entries + grown)
        host_pending.append(rows.pending.shape[1] + count if rows.bounds else pending + count - grown)
    return tuple(host), tuple(host_pending)


def _advance_on_host(
    rows: Rows, scored: int, draft: Draft, verdict: Verdict, count: Tensor
) -> tuple[Rows, Tensor, Tensor]:
    """`advance` in plain Python, faster for a few rows on a CPU."""
    depth, counts, emitted = verdict.path.shape[1], count.tolist(), verdict.rows(draft)
    pending_counts, waiting, paths = rows.pending_count.tolist(), rows.pending.tolist(), verdict.path.tolist()
    entries, pending, kept = list[int](), list[list[int]](), list[int]()
    for row, new in enumerate(counts):
        stops = (place for place, node in enumerate(paths[row][:new]) if not 0 <= node < scored)
        kept.append(next(stops, min(new, depth)))
        all_tokens = waiting[row][: pending_counts[row]] + emitted[row][:new]
        read = pending_counts[row] + kept[row] if scored >= 0 else 0
        grown = min(read, len(all_tokens) - 1)
        entries.append(rows.host[row] + grown)
        pending.append(all_tokens[grown:])
    left = [len(tokens) for tokens in pending]
    width, uniform = max(left), len({*entries}) == 1 and len({*left}) == 1
    padded = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in pending])
    tokens = torch.tensor([(emitted[row][:new] + [-1] * (depth + 1))[: depth + 1] for row, new in enumerate(counts)])
    flags = torch.tensor([[place < length for place in range(depth)] for length in kept], dtype=torch.bool)
    host = tuple(entries), tuple(left)
    after = Rows(torch.tensor(entries), padded, torch.tensor(left), *host, uniform, table=rows.table)
    return after, tokens, flags
