"""The growth of a draft by a model, and the model's update by a verdict, in one CUDA graph each.

A recording reads the rows' lengths on the device. Where attention does too it holds for every length, else for those
within a bucket of cache columns, and a recording that repeats is made for the larger buckets too. What it gives is lent
until the model's next growth or update. Independent of how a draft grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.engine.cuda_graphs import GraphPool, Inputs
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.rows import Rows, advance, device_rows, host_lengths
from outrider.core.tree import Tree

Key = tuple[object, ...]
Growth = Callable[[Inputs], Draft]


@dataclass(frozen=True, eq=False)
class _Grown:
    """A draft in a recording's memory, and how many of its nodes the model has read."""

    draft: Draft
    scored: int


def grown(
    pool: GraphPool,
    cache: Cache,
    key: Key,
    scratch: int,
    given: Inputs,
    grow: Growth,
    *,
    state: Inputs = (),
    take: Callable[[Inputs], None] = lambda state: None,
    owner: object = None,
    references: Any = None,
    lengths: bool = False,
) -> Draft:
    """`grow(given)` from a recording. It reads at most `scratch` draft nodes into the cache. `state`: further tensors
    of the model, of which `take` makes it read the recording's copies. `lengths`: its attention reads them itself."""
    rows = cache.rows
    wait = rows.pending.shape[1]
    cache.reserve(wait + scratch)
    store, columns = cache.store, cache.columns(max(cache.rows.host) + wait + scratch, lengths)
    rows = cache.rows

    def work(columns: int, inputs: Inputs) -> tuple[Any, ...]:
        own, handed = inputs[4 : 4 + len(state)], inputs[4 + len(state) :]
        with cache.on_device(device_rows(inputs[:4]), columns):
            take(own)
            draft, scored = grow(handed), cache.scored
        take(state)
        return _Grown(draft, scored), *_tensors(draft)

    inputs = (*rows.inputs, *state, *given)

    def at(columns: int) -> tuple[Key, Inputs, Callable[[Inputs], Any]]:
        return (store.data_ptr(), *store.shape, columns, "growth", *key), inputs, partial(work, columns)

    made: _Grown = pool.lend(*at(columns), references, ahead=lambda: map(at, cache.larger(columns))).out[0]
    cache.scored, cache.scratch_owner = made.scored, owner
    tree = made.draft.tree
    return replace(made.draft, tree=tree if tree.static else Tree(tree.parents, tree.depth, tree.width))


def followed(
    pool: GraphPool,
    cache: Cache,
    draft: Draft,
    verdict: Verdict,
    count: Tensor,
    *,
    more: Inputs = (),
    work: Callable[[Rows, Rows, Tensor, Inputs], tuple[Tensor, ...]] = lambda before, after, path, more: (),
    empty: bool = False,
) -> tuple[Tensor, ...] | None:
    """`Cache.keep` from a recording, and what `work` makes of the rows before and after, the accepted path and `more`;
    None where the host does not know the outcome, and for an empty draft unless `empty` says that it is common."""
    before, scored = cache.rows, cache.scored
    if verdict.outcome is None or not (draft.size or empty) or cache.device.type == "cpu" or scored < 0:
        return None
    wait, depth = before.pending.shape[1], verdict.path.shape[1]
    cache.reserve(wait + max(wait, depth))
    store, before, moves, size = cache.store, cache.rows, cache.moves(draft, depth), draft.size

    def recorded(inputs: Inputs) -> tuple[Tensor, ...]:
        tokens, path, accepted, token, kept_count = [each for each in inputs[4:9] if each is not None]
        rows, drafted = device_rows(inputs[:4]), Draft.guess(tokens, Tree.chain(size), draft.live[:0])
        decided = replace(verdict, path=path, accepted=accepted, token=token, outcome=None)
        after, _, kept = advance(rows, scored, drafted, decided, kept_count, False)  # only the draft's size is read
        if moves:
            cache.move(rows, path, kept)
        return after.entries, after.pending, after.pending_count, *work(rows, after, path, inputs[9:])

    inputs = (*before.inputs, draft.tokens, verdict.path, verdict.accepted)
    key = (store.data_ptr(), *store.shape, "update", scored, moves)
    # with nothing kept no slot moves: a move may be made once only
    lent = pool.lend(key, (*inputs, verdict.token, count, *more), recorded, still=len(inputs) + 1)
    entries, pending, left, *rest = lent.out
    host, host_pending = host_lengths(before, scored, verdict.outcome)
    cache.rows = Rows(entries, pending, left, host, host_pending, False, before.bounds, before.table)
    cache.scored = -1
    return tuple(rest)


def _tensors(draft: Draft) -> list[Tensor]:
    """All tensors of a draft that a recording computes."""
    distributions = draft.distributions
    parts: Sequence[Tensor | None] = (
        draft.tokens,
        draft.live,
        None if draft.tree.static else draft.tree.parents,
        draft.belief,
        None if distributions is None else distributions.probs,
        None if distributions is None else distributions.tokens,
        draft.source,
        draft.fresh,
        draft.positions,
    )
    return [part for part in parts if part is not None]
