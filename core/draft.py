"""A draft, one tree of guessed tokens per row with the distributions of the drawn ones; and a rule's verdict on it.

A chain is a tree, a window of parallel guesses is a chain, and an empty draft is a tree without nodes. Independent of
drafters and rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.device import fetch, upload
from outrider.core.distribution import Distribution
from outrider.core.tree import Tree


@dataclass(frozen=True)
class OnHost:
    """The nodes [B, N] of a draft as lists, and the tensor of tokens that they belong to."""

    tokens: list[list[int]]
    parents: list[list[int]]
    tried: list[list[bool]]
    fixed: list[list[bool]]  # guesses that a rule may try and that were not drawn
    of: Tensor = field(repr=False)

    @classmethod
    def guesses(cls, tokens: list[list[int]], parents: list[list[int]], tried: list[list[bool]], of: Tensor) -> OnHost:
        """Fixed guesses only."""
        return cls(tokens, parents, tried, tried, of)


@dataclass(frozen=True)
class Draft:
    """Guessed tokens on a tree. Each node was *drawn* from a distribution or is a *fixed* guess."""

    tokens: Tensor  # [B, N]
    tree: Tree
    live: Tensor  # [B, N] bool: a row may use fewer nodes than others; all nodes below a dead node are dead
    distributions: Distribution | None = None  # [B, R, S] that nodes were drawn from; siblings share one
    source: Tensor | None = None  # [B, N] index into distributions; -1: a fixed guess. Required with distributions
    replacement: bool = False  # whether siblings were drawn with replacement, so that they may repeat
    # [B] bool: the row is always a chain drawn in this round, whatever was drawn, as block verification requires
    fresh: Tensor | None = None
    belief: Tensor | None = None  # [B, N] the drafter's estimate that a fixed guess is right; exact rules ignore it
    probe: Tensor | None = None  # [B, N] bool: scored but never tried; ids from V on are known to the target only
    positions: Tensor | None = None  # [B, N] offset from the root, 1 for the next token; default: depth + 1
    note: tuple[str, ...] | None = None  # per row, for the trace: which drafter drafted, or why none did
    embeddings: Tensor | None = None  # [K, D] the target's inputs for probes with the ids V, V + 1, ...
    carry: object = None  # state that the target can continue from, such as hidden states at an exit
    host: OnHost | None = None  # set where the draft was made on the host, to spare a transfer
    mixed: bool = field(default=True)  # whether drawn and fixed nodes can be siblings; False saves work

    @property
    def size(self) -> int:
        return self.tree.size

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @cached_property
    def fixed(self) -> Tensor:
        """[B, N] bool."""
        return torch.ones_like(self.live) if self.source is None else self.source < 0

    @cached_property
    def tried(self) -> Tensor:
        """[B, N] bool: the nodes a rule may try."""
        return self.live if self.probe is None else self.live & ~self.probe

    @cached_property
    def offsets(self) -> Tensor:
        """[B|1, N] offset from the root: each node's position for the target."""
        return self.tree.depths + 1 if self.positions is None else self.positions

    @cached_property
    def on_host(self) -> OnHost:
        """On CUDA a transfer, unless the draft is empty or was made on the host."""
        if self.host is not None and self.host.of is self.tokens:
            return self.host
        if not self.size:
            nothing: list[list[Any]] = [[] for _ in range(self.rows)]
            return OnHost(nothing, nothing, nothing, nothing, self.tokens)
        parents = self.tree.parents.expand(self.rows, -1)
        parts = fetch(self.tokens, parents, self.tried, self.tried & self.fixed)
        tokens, above, tried, fixed = (part.tolist() for part in parts)
        return OnHost(tokens, above, tried, fixed, self.tokens)

    @cached_property
    def host_paths(self) -> list[list[list[int]]]:
        """For each row the uncommitted tokens on the path to the root (none) and to each node, on the host."""
        rows = []
        for tokens, parents in zip(self.on_host.tokens, self.on_host.parents, strict=True):
            paths: list[list[int]] = [[]]
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*paths[parent + 1], token])
            rows.append(paths)
        return rows

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> Draft:
        tokens = torch.zeros(rows, 0, dtype=torch.long, device=device)
        return cls(tokens, Tree.chain(0, device), tokens.bool())

    @classmethod
    def guess(
        cls, tokens: Tensor, tree: Tree, live: Tensor, belief: Tensor | None = None, host: OnHost | None = None
    ) -> Draft:
        """Fixed guesses only."""
        return cls(tokens, tree, live, belief=belief, host=host, mixed=False)

    @classmethod
    def drawn(cls, tokens: Tensor, distributions: Distribution, live: Tensor, *, fresh: bool = True) -> Draft:
        """A chain, token i drawn from distribution i; `fresh` unless some were kept from an earlier round."""
        rows, length = tokens.shape
        source = torch.arange(length, device=tokens.device).expand(rows, -1)
        whole = torch.full((rows,), fresh, device=tokens.device)
        return cls(tokens, Tree.chain(length, tokens.device), live, distributions, source, fresh=whole, mixed=False)

    def path_tokens(self) -> Tensor:
        """[B, N + 1, D] the uncommitted tokens on the path to the root (row 0: none) and to each node; -1 pads."""
        nodes = self.tree.paths.expand(self.rows, -1, -1)
        ids = self.tokens[:, None].expand(-1, self.size, -1).gather(2, nodes.clamp(min=0))
        return torch.nn.functional.pad(torch.where(nodes < 0, -1, ids), (0, 0, 1, 0), value=-1)


def select(drafts: list[Draft], which: Tensor) -> Draft:
    """One of several drafts for each row: row b takes drafts[which[b]]. Kinds may differ from row to row."""
    size = max(draft.size for draft in drafts)
    rows = torch.arange(len(which), device=which.device)

    def pick(parts: list[Tensor], fill: float) -> Tensor:
        padded = [torch.nn.functional.pad(part, (0, size - part.shape[1]), value=fill) for part in parts]
        return torch.stack(padded)[which, rows]

    note = None
    if any(draft.note for draft in drafts):
        note = tuple((drafts[index].note or [""] * len(which))[row] for row, index in enumerate(which.tolist()))
    if not size:
        return replace(drafts[0], note=note)
    parents = pick([draft.tree.parents.expand(draft.rows, -1) for draft in drafts], -1)
    live = pick([draft.live for draft in drafts], False)
    # each dead node is below the node before it, so that no node gets more children
    parents = torch.where(live, parents, torch.arange(-1, size - 1, device=which.device))
    tree = Tree(parents, size, max(max((draft.tree.width for draft in drafts), default=1), 1) + 1)
    chosen = Draft(pick([draft.tokens for draft in drafts], 0), tree, live, note=note)
    if any(draft.replacement != drafts[0].replacement and draft.distributions is not None for draft in drafts):
        raise ValueError("drafts drawn with and without replacement cannot share a batch")
    drawn = [draft for draft in drafts if draft.distributions is not None]
    dense = [draft.distributions.dense() for draft in drafts if draft.distributions is not None]
    if not drawn:
        return replace(chosen, mixed=False)
    starts = np.cumsum([0, *[distribution.probs.shape[1] for distribution in dense]])
    offsets = iter(starts.tolist())
    sources = []
    for draft in drafts:
        if draft.source is None:
            sources.append(torch.full_like(draft.tokens, -1))
        else:
            sources.append(torch.where(draft.source < 0, -1, draft.source + next(offsets)))
    not_fresh = torch.zeros(len(which), dtype=torch.bool, device=which.device)
    fresh = torch.stack([not_fresh if draft.fresh is None else draft.fresh for draft in drafts])[which, rows]
    return replace(
        chosen,
        distributions=Distribution(torch.cat([each.probs for each in dense], 1), None, dense[0].vocabulary),
        source=pick(sources, -1),
        replacement=drawn[0].replacement,
        fresh=fresh,
    )


def stack(drafts: Sequence[Draft]) -> Draft:
    """Drafts of one row each as one draft of several rows; each row's nodes come first, in their order."""
    size, rows, device = max(draft.size for draft in drafts), len(drafts), drafts[0].tokens.device

    def padded(parts: Sequence[Tensor], fill: float = 0) -> Tensor:
        return torch.cat([torch.nn.functional.pad(part, (0, size - part.shape[1]), value=fill) for part in parts])

    live = padded([draft.live for draft in drafts])
    if all(draft.tree.is_chain for draft in drafts):
        tree = Tree.chain(size, device)
    elif all(draft.tree is drafts[0].tree for draft in drafts):
        tree = drafts[0].tree
    else:  # each dead node is below the node before it, as in `select`
        parents = padded([draft.tree.parents for draft in drafts], -1)
        parents = torch.where(live, parents, torch.arange(-1, size - 1, device=device))
        tree = Tree(parents, size, max(draft.tree.width for draft in drafts) + 1)
    drawn = [draft for draft in drafts if draft.distributions is not None]
    if any(draft.replacement != drawn[0].replacement for draft in drawn):
        raise ValueError("drafts drawn with and without replacement cannot share a batch")
    whole = Draft(padded([draft.tokens for draft in drafts]), tree, live, mixed=any(draft.mixed for draft in drafts))
    if any(draft.note for draft in drafts):
        whole = replace(whole, note=tuple(draft.note[0] if draft.note else "" for draft in drafts))
    if any(draft.belief is not None for draft in drafts):
        beliefs = [torch.zeros_like(draft.tokens) if draft.belief is None else draft.belief for draft in drafts]
        whole = replace(whole, belief=padded([belief.double() for belief in beliefs]))
    if any(draft.probe is not None for draft in drafts):
        probes = [torch.zeros_like(draft.live) if draft.probe is None else draft.probe for draft in drafts]
        whole = replace(whole, probe=padded(probes))
    if any(draft.positions is not None for draft in drafts):
        whole = replace(whole, positions=padded([draft.offsets.expand(1, -1) for draft in drafts], 1))
    if any(draft.embeddings is not None for draft in drafts):
        whole = replace(whole, embeddings=next(draft.embeddings for draft in drafts if draft.embeddings is not None))
    if not drawn:
        return whole
    fresh = None
    if any(draft.fresh is not None for draft in drafts):
        not_fresh = torch.zeros(1, dtype=torch.bool, device=device)
        fresh = torch.cat([not_fresh if draft.fresh is None else draft.fresh for draft in drafts])
    return replace(
        whole,
        distributions=_stacked_distributions(drafts),
        source=padded(
            [torch.full_like(each.tokens, -1) if each.source is None else each.source for each in drafts], -1
        ),
        replacement=drawn[0].replacement,
        fresh=fresh,
        mixed=whole.mixed or len(drawn) < rows,
    )


def _stacked_distributions(drafts: Sequence[Draft]) -> Distribution:
    """Distributions [1, R, S] of each row as one [B, R, S]; dense if their supports differ in size."""
    known = [draft.distributions for draft in drafts if draft.distributions is not None]
    if len({(distribution.width, distribution.tokens is None) for distribution in known}) > 1:
        known = [distribution.dense() for distribution in known]
    count, first, remaining = max(distribution.probs.shape[1] for distribution in known), known[0], iter(known)
    probs, tokens = [], []
    for draft in drafts:
        distribution = first if draft.distributions is None else next(remaining)
        padding = (0, 0, 0, count - distribution.probs.shape[1])
        probs.append(torch.nn.functional.pad(distribution.probs, padding))
        if distribution.tokens is not None:
            tokens.append(torch.nn.functional.pad(distribution.tokens, padding))
    return Distribution(torch.cat(probs), torch.cat(tokens) if tokens else None, first.vocabulary)


@dataclass(frozen=True)
class Outcome:
    """The emitted and the committed tokens of a verdict, per row on the host."""

    tokens: list[list[int]]  # emitted, before any cut
    paths: list[list[int]]  # accepted nodes
    counts: list[int]  # number of tokens kept

    @classmethod
    def accepted(cls, rows: Sequence[Sequence[int]]) -> Outcome:
        """The outcome of chains that are accepted and kept completely."""
        return cls([list(row) for row in rows], [list(range(len(row) - 1)) for row in rows], [len(row) for row in rows])

    def row(self, row: int) -> Outcome:
        return Outcome([self.tokens[row]], [self.paths[row]], [self.counts[row]])

    def __add__(self, other: Outcome) -> Outcome:
        """The rows of both."""
        return Outcome(self.tokens + other.tokens, self.paths + other.paths, self.counts + other.counts)


@dataclass(frozen=True)
class Verdict:
    """A rule's decision, with the numbers behind it. D is the draft's depth."""

    path: Tensor  # [B, D] accepted nodes from the root down; -1 pads
    accepted: Tensor  # [B] number of accepted nodes
    token: Tensor  # [B] the target's own token after them
    resampled: Tensor  # [B] bool: it replaces a rejected guess (else it is a bonus)
    tried: Tensor  # [B, N] bool
    chance: Tensor  # [B, N] probability of acceptance, where tried
    p: Tensor  # [B, N] the target's probability of the guess, where tried
    q: Tensor  # [B, N] the drafter's probability of the guess, where tried; 1 for a fixed guess
    total_variation: Tensor | None = None  # [B, D + 1] of each emitted token's distribution from p; None: all 0
    relaxed: Tensor | None = None  # [B, D] accepted nodes that a strict rule would have rejected; None: no node
    outcome: Outcome | None = None  # on the host: set by the loop after its one transfer
    count: Tensor | None = None  # [B] tokens kept of each row, set by the loop

    @classmethod
    def of(cls, parts: Sequence[Tensor], outcome: Outcome | None = None) -> Verdict:
        """From `parts`."""
        path, accepted, token, resampled, tried, chance, p, q = parts
        return cls(path, accepted, token, resampled, tried, chance, p, q, outcome=outcome)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that every verdict has, in the order of the fields."""
        return self.path, self.accepted, self.token, self.resampled, self.tried, self.chance, self.p, self.q

    def known(self, count: Tensor) -> list[list[int]] | None:
        """The tokens kept of each row if the host has them and `count` is the loop's, else None."""
        if self.outcome is None or count is not self.count:
            return None
        return [tokens[:count] for tokens, count in zip(self.outcome.tokens, self.outcome.counts, strict=True)]

    def results(self) -> list[tuple[int, int]]:
        """Each row's number of accepted nodes and the target's own token after them, on the host."""
        if self.outcome is None:
            return list(zip(self.accepted.tolist(), self.token.tolist(), strict=True))
        tokens, paths = self.outcome.tokens, self.outcome.paths
        return [(len(path), emitted[-1] if emitted else -1) for path, emitted in zip(paths, tokens, strict=True)]

    def emitted(self, draft: Draft) -> Tensor:
        """[B, D + 1] the accepted tokens and the target's own; -1 pads."""
        ids = torch.where(self.path < 0, -1, draft.tokens.gather(1, self.path.clamp(min=0)))
        ids = torch.nn.functional.pad(ids, (0, 1), value=-1)
        return ids.scatter(1, self.accepted[:, None], self.token[:, None])

    def row(self, row: int, draft: Draft) -> Verdict:
        """The verdict on one row, for its own draft, whose nodes are the row's first nodes in the batch's draft."""
        only, size, depth = slice(row, row + 1), draft.size, draft.tree.depth
        return Verdict(
            path=self.path[only, :depth],
            accepted=self.accepted[only],
            token=self.token[only],
            resampled=self.resampled[only],
            tried=self.tried[only, :size],
            chance=self.chance[only, :size],
            p=self.p[only, :size],
            q=self.q[only, :size],
            total_variation=None if self.total_variation is None else self.total_variation[only, : depth + 1],
            relaxed=None if self.relaxed is None else self.relaxed[only, :depth],
            outcome=None if self.outcome is None else self.outcome.row(row),
            count=None if self.count is None else self.count[only],
        )

    def kept(self, open_rows: Tensor) -> Tensor:
        """[B] tokens kept of each row: the loop's count, else all emitted tokens of open rows [B] and 0 of others."""
        return torch.where(open_rows.bool(), self.accepted + 1, 0) if self.count is None else self.count

    def rows(self, draft: Draft) -> list[list[int]]:
        """The emitted tokens of each row, on the host."""
        if self.outcome is not None:
            return self.outcome.tokens
        tokens, counts = self.emitted(draft).tolist(), (self.accepted + 1).tolist()
        return [row[:count] for row, count in zip(tokens, counts, strict=True)]


def forced(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Draft, Verdict, Tensor]:
    """Known tokens, any number per row, as a chain that is accepted completely: the arguments of a target's `keep`."""
    counts = upload([len(row) for row in rows], device)
    size = max(max(map(len, rows)) - 1, 0)
    ids = upload([[*row, *[0] * (size + 1 - len(row))] for row in rows], device, torch.long)
    slots = torch.arange(size, device=device)
    live = slots < counts[:, None] - 1
    zeros = torch.zeros(len(rows), size, device=device)
    draft = Draft.guess(ids[:, :size], Tree.chain(size, device), live)
    verdict = Verdict(
        path=torch.where(live, slots, -1),
        accepted=(counts - 1).clamp(min=0),
        token=ids.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0],
        resampled=torch.zeros_like(counts, dtype=torch.bool),
        tried=zeros.bool(),
        chance=zeros,
        p=zeros,
        q=zeros,
        outcome=Outcome.accepted(rows),
    )
    return draft, verdict, counts
