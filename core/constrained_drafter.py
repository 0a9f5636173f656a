"""Any drafter under a constraint: guesses that it forbids are dropped, and tokens that it forces are added as guesses.

Fixed guesses alone are dropped: to drop a drawn token for its value would change the distribution of the output, and
the target's mask rejects it anyway. Forced tokens are fixed guesses, which any exact rule may try. Draft models need no
help for their own tokens: the sampling that they draw with has the constraint. Uses drafters through the protocol only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.core.constraint import Constraint, PathMasks, Walker, unsatisfied
from outrider.core.device import upload
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, OnHost, Verdict
from outrider.core.protocol import (
    BatchedDrafter,
    CrowdAwareDrafter,
    Drafter,
    OverlappedDrafter,
    Plain,
    Prefill,
    Prompts,
    Scores,
    StandaloneDrafter,
    readings_of,
)
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree

_MOST_AFTER_GUESSES = 16  # forced tokens added a row after the drafter's own guesses, which may be wrong


def constrained(drafter: Drafter, sampling: Sampling) -> Drafter:
    """The drafter itself without a constraint, else the drafter under it. Plain decoding stays plain."""
    if sampling.constraint is None:
        return drafter
    kind = OverlappedConstrained if isinstance(drafter, OverlappedDrafter) else ConstrainedDrafter
    return kind(drafter, sampling.constraint)


class ConstrainedDrafter:
    """A drafter under a constraint. Raises Unsatisfied where a row's output can't be continued within it."""

    def __init__(self, drafter: Drafter, constraint: Constraint) -> None:
        self.inner, self.constraint = drafter, constraint
        self.vocabulary, self.needs, self.readings = drafter.vocabulary, drafter.needs, readings_of(drafter)
        self._plain, self._keeps = isinstance(drafter, Plain), isinstance(drafter, StandaloneDrafter)
        self._masks = PathMasks.of(constraint, [])
        self._own = Draft.empty(0)

    @property
    def bytes_read(self) -> int:
        return self.inner.bytes_read

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._masks = PathMasks.of(self.constraint, prompts)
        self.inner.begin(prefill, prompts, sampling)

    # ---- continuous batching (outrider.core.protocol.BatchedDrafter)

    def supports_batching(self) -> bool:
        return isinstance(self.inner, BatchedDrafter) and self.inner.supports_batching()

    def open(self, sampling: Sampling) -> None:
        self._masks = PathMasks.of(self.constraint, [])
        self._batched.open(sampling)

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._masks = self._masks.arranged(order)
        self._batched.arrange(order, width)

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        self._masks = self._masks.entered(row, prompt)
        self._batched.enter(row, prefill, prompt)

    def leave(self, row: int) -> None:
        self._batched.leave(row)

    @property
    def _batched(self) -> BatchedDrafter:
        assert isinstance(self.inner, BatchedDrafter)
        return self.inner

    def set_crowd(self, rows: int) -> None:
        if isinstance(self.inner, CrowdAwareDrafter):
            self.inner.set_crowd(rows)

    # ----

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = room.tolist()
        for row, (walker, output) in enumerate(zip(self._masks.walkers, self._masks.outputs, strict=True)):
            if left[row] >= 0 and not walker.reach(output):
                raise walker.error or unsatisfied(f"row {row}", output)
        self._own = self.inner.propose(room, rng)
        # a chain drawn in this round stays one, whatever was drawn: a rule may verify it as a block
        as_it_is = self._plain or self._own.fresh is not None or self._own.carry is not None
        return self._own if as_it_is else self._shaped(self._own, left)

    def _shaped(self, draft: Draft, room: list[int]) -> Draft:
        """The draft without fixed guesses that the constraint forbids and with the tokens that it forces."""
        host, rows = draft.on_host, range(draft.rows)
        trees = [
            _Row(walker, output, host, row, left)
            for row, walker, output, left in zip(rows, self._masks.walkers, self._masks.outputs, room, strict=True)
        ]
        if draft.embeddings is None:  # else ids past the vocabulary have inputs of their own
            for tree in trees:
                tree.extend()
        dropped = [set[int]() if self._keeps else tree.dropped for tree in trees]
        if any(dropped):
            kept = [[node not in gone for node in range(draft.size)] for gone in dropped]
            tried = [[a and b for a, b in zip(*pair, strict=True)] for pair in zip(host.tried, kept, strict=True)]
            host = replace(host, tried=tried)
            draft = replace(draft, live=draft.live & upload(kept, draft.live.device), host=host)
        more = max((len(tree.added) for tree in trees), default=0)
        return _grown(draft, host, trees, more) if more else draft

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        emitted = verdict.rows(draft)
        counts = [len(row) for row in emitted] if verdict.outcome is None else verdict.outcome.counts
        self._masks = self._masks.committed([row[:count] for row, count in zip(emitted, counts, strict=True)])
        self.inner.observe(draft, scores, verdict, rng)

    def end(self) -> None:
        self.inner.end()


class OverlappedConstrained(ConstrainedDrafter):
    """The same for drafters that draft ahead."""

    def draft_ahead(self, draft: Draft) -> None:
        assert isinstance(self.inner, OverlappedDrafter)
        self.inner.draft_ahead(self._own)


class _Row:
    """One row's tree: which of its nodes the constraint forbids, and the nodes to add."""

    def __init__(self, walker: Walker, output: list[int], host: OnHost, row: int, room: int) -> None:
        self._walker, self._output, self._room = walker, output, room
        self.dropped: set[int] = set()  # fixed guesses that are forbidden, and all below them
        self.added: list[tuple[int, int]] = []  # (parent, token); nodes are numbered on from the draft's
        self._size = len(host.tokens[row])
        self._paths: dict[int, list[int]] = {-1: []}  # of the nodes that may be reached
        inner = set[int]()  # those with children
        if room < 0:
            return
        self._parents = host.parents[row]
        for node in self._depth_first():
            parent = self._parents[node]
            path = [*self._paths[parent], host.tokens[row][node]] if parent in self._paths else None
            if path is not None and host.tried[row][node] and walker.reach(output, path):
                self._paths[node] = path
                inner.add(parent)
            elif parent in self.dropped or host.fixed[row][node]:
                self.dropped.add(node)
        self._leaves = [node for node in sorted(self._paths) if node not in inner]

    def _depth_first(self) -> list[int]:
        """The nodes in an order of short ways for the walker."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self._parents):
            children.setdefault(parent, []).append(node)
        order, stack = [], [-1]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += reversed(children.get(node, []))
        return order[1:]

    def extend(self) -> None:
        """Add the tokens that are forced after the root or the guesses that end a path."""
        if self._room < 0:
            return
        for leaf in self._leaves:
            path = self._paths[leaf]
            most = self._room - len(path)
            if leaf >= 0:  # a token forced after the root is certain, one after a guess is as likely as the guess
                most = min(most, _MOST_AFTER_GUESSES - len(self.added))
            if most <= 0 or not self._walker.reach(self._output, path):
                continue
            parent = leaf
            for token in self._walker.cursor.forced()[:most]:
                self.added.append((parent, token))
                parent = self._size + len(self.added) - 1


def _grown(draft: Draft, host: OnHost, rows: Sequence[_Row], more: int) -> Draft:
    """The draft with the nodes added to each row; its own nodes keep their numbers."""
    device, size = draft.tokens.device, draft.size
    if device.type != "cpu":  # few sizes, so that few shapes are captured
        more = (1 << (size + more - 1).bit_length()) - size
    tokens, parents, depth, width = [], [], 0, 1
    for own, row in zip(host.parents, rows, strict=True):
        count = len(row.added)
        tokens.append([*(token for _, token in row.added), *[0] * (more - count)])
        # each padding node is below the node before it, so that no node gets more children
        above = [*own, *(parent for parent, _ in row.added), *range(size + count - 1, size + more - 1)]
        parents.append(above)
        depths = list[int]()
        for parent in above:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        depth, width = max(depth, *depths), max(width, *Counter(above).values())
    if len(parents) == 1:
        tree = Tree.of(tuple(parents[0]), device)
    else:
        tree = Tree(upload(parents, device, torch.long), depth, width)
    ids = torch.cat([draft.tokens, upload(tokens, device, torch.long)], 1)

    def padded(part: Tensor | None, value: float) -> Tensor | None:
        return None if part is None else torch.nn.functional.pad(part, (0, more), value=value)

    positions = None
    if draft.positions is not None:
        after = (tree.depths + 1)[:, size:].expand(draft.rows, -1)
        positions = torch.cat([draft.positions.expand(draft.rows, -1), after], 1)
    there = [[place < len(row.added) for place in range(more)] for row in rows]

    def joined(own: Sequence[list[Any]], new: Sequence[list[Any]]) -> list[list[Any]]:
        return [[*before, *after] for before, after in zip(own, new, strict=True)]

    on_host = OnHost(joined(host.tokens, tokens), parents, joined(host.tried, there), joined(host.fixed, there), ids)
    return replace(
        draft,
        tokens=ids,
        tree=tree,
        live=torch.cat([draft.live, upload(there, device)], 1),
        source=padded(draft.source, -1),
        belief=padded(draft.belief, 1.0),
        probe=padded(draft.probe, False),
        positions=positions,
        host=on_host,
        mixed=draft.mixed or draft.distributions is not None,
    )
