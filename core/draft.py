"""A draft: a tree of guessed tokens a row, with the distribution of each guess that was drawn; and the verdict on one.

A chain is a tree, a window of parallel guesses is a chain, no draft at all is a tree of no nodes. Knows shapes,
token ids and distributions, nothing of who drafted or who judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import Distribution
from outrider.core.tree import Tree


@dataclass(frozen=True)
class Draft:
    """Guessed tokens on a tree. A node was *drawn* from a distribution, or it is a *fixed* guess that nobody drew."""

    tokens: Tensor  # [B, N]
    tree: Tree
    live: Tensor  # [B, N] bool: a row may use fewer nodes than others; below a dead node all are dead
    distributions: Distribution | None = (
        None  # [B, R, S] the distributions that nodes were drawn from; siblings share theirs
    )
    source: Tensor | None = None  # [B, N] which of them, or -1: a fixed guess. Required with distributions
    replacement: bool = False  # were siblings drawn with replacement (each may repeat) or without
    fresh: Tensor | None = None  # [B] bool: this row is by construction a chain drawn whole in this very step,
    #                              whatever came out of the draws (what block verification needs)
    belief: Tensor | None = None  # [B, N] how likely the drafter thought a fixed guess; exact rules ignore it
    probe: Tensor | None = None  # [B, N] bool: scored but never tried; ids from V on are the target's own affair
    positions: Tensor | None = None  # [B, N] tokens behind the root, 1 for the next one; default: depth + 1
    note: tuple[str, ...] | None = None  # for each row, into the trace: who drafted, or why nobody did
    embeddings: Tensor | None = None  # [K, D] what the target reads where a probe's id is V or more: V reads the first
    carry: object = None  # state the target may reuse, such as hidden states at an exit
    mixed: bool = field(default=True)  # may drawn and fixed nodes stand side by side? False spares work

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
        """[B|1, N] tokens behind the root: where the target should think each node stands."""
        return self.tree.depths + 1 if self.positions is None else self.positions

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> Draft:
        none = torch.zeros(rows, 0, dtype=torch.long, device=device)
        return cls(none, Tree.chain(0, device), none.bool())

    @classmethod
    def guess(cls, tokens: Tensor, tree: Tree, live: Tensor, belief: Tensor | None = None) -> Draft:
        """Fixed guesses only."""
        return cls(tokens, tree, live, belief=belief, mixed=False)

    @classmethod
    def drawn(cls, tokens: Tensor, distributions: Distribution, live: Tensor, *, fresh: bool = True) -> Draft:
        """A chain, token i drawn from distributions' row i; `fresh` unless some were kept from an earlier step."""
        rows, length = tokens.shape
        source = torch.arange(length, device=tokens.device).expand(rows, -1)
        whole = torch.full((rows,), fresh, device=tokens.device)
        return cls(tokens, Tree.chain(length, tokens.device), live, distributions, source, fresh=whole, mixed=False)

    def path_tokens(self) -> Tensor:
        """[B, N + 1, D] the uncommitted tokens before what follows the root (row 0) and each node; -1 fills up."""
        nodes = self.tree.paths.expand(self.rows, -1, -1)
        ids = self.tokens[:, None].expand(-1, self.size, -1).gather(2, nodes.clamp(min=0))
        return torch.nn.functional.pad(torch.where(nodes < 0, -1, ids), (0, 0, 1, 0), value=-1)


def choose(drafts: list[Draft], which: Tensor) -> Draft:
    """One draft a row out of several: row b takes drafts[which[b]]. Kinds may differ from row to row."""
    size = max(draft.size for draft in drafts)
    rows = torch.arange(len(which), device=which.device)

    def pick(parts: list[Tensor], fill: float) -> Tensor:
        padded = [torch.nn.functional.pad(part, (0, size - part.shape[1]), value=fill) for part in parts]
        return torch.stack(padded)[which, rows]

    note = None
    if any(draft.note for draft in drafts):
        note = tuple((drafts[one].note or [""] * len(which))[row] for row, one in enumerate(which.tolist()))
    if not size:
        return replace(drafts[0], note=note)
    parents = pick([draft.tree.parents.expand(draft.rows, -1) for draft in drafts], -1)
    live = pick([draft.live for draft in drafts], False)
    # dead nodes hang where they crowd no one: each below the one before
    parents = torch.where(live, parents, torch.arange(-1, size - 1, device=which.device))
    tree = Tree(parents, size, max(max((draft.tree.width for draft in drafts), default=1), 1) + 1)
    chosen = Draft(pick([draft.tokens for draft in drafts], 0), tree, live, note=note)
    if any(draft.replacement != drafts[0].replacement and draft.distributions is not None for draft in drafts):
        raise ValueError("drafts drawn with and without replacement cannot share a batch")
    known = [draft for draft in drafts if draft.distributions is not None]
    if not known:
        return replace(chosen, mixed=False)
    distributions = [draft.distributions.dense().probs for draft in known if draft.distributions is not None]
    starts = np.cumsum([0, *[part.shape[1] for part in distributions]])
    offsets = iter(starts.tolist())
    sources = []
    for draft in drafts:
        if draft.source is None:
            sources.append(torch.full_like(draft.tokens, -1))
        else:
            sources.append(torch.where(draft.source < 0, -1, draft.source + next(offsets)))
    no = torch.zeros(len(which), dtype=torch.bool, device=which.device)
    fresh = torch.stack([no if draft.fresh is None else draft.fresh for draft in drafts])[which, rows]
    return replace(
        chosen,
        distributions=Distribution(
            torch.cat(distributions, 1), None, known[0].distributions.vocabulary if known[0].distributions else 0
        ),
        source=pick(sources, -1),
        replacement=known[0].replacement,
        fresh=fresh,
    )


def beside(drafts: Sequence[Draft]) -> Draft:
    """Drafts of one row each as one draft of several rows; each row's nodes are its first, in their order."""
    size, rows, device = max(draft.size for draft in drafts), len(drafts), drafts[0].tokens.device

    def joined(parts: Sequence[Tensor], fill: float = 0) -> Tensor:
        return torch.cat([torch.nn.functional.pad(part, (0, size - part.shape[1]), value=fill) for part in parts])

    live = joined([draft.live for draft in drafts])
    if all(draft.tree.is_chain for draft in drafts):
        tree = Tree.chain(size, device)
    elif all(draft.tree is drafts[0].tree for draft in drafts):
        tree = drafts[0].tree
    else:  # dead nodes hang where they crowd no one: each below the one before
        parents = joined([draft.tree.parents for draft in drafts], -1)
        parents = torch.where(live, parents, torch.arange(-1, size - 1, device=device))
        tree = Tree(parents, size, max(draft.tree.width for draft in drafts) + 1)
    drawn = [draft for draft in drafts if draft.distributions is not None]
    if any(draft.replacement != drawn[0].replacement for draft in drawn):
        raise ValueError("drafts drawn with and without replacement cannot share a batch")
    whole = Draft(joined([draft.tokens for draft in drafts]), tree, live, mixed=any(draft.mixed for draft in drafts))
    if any(draft.note for draft in drafts):
        whole = replace(whole, note=tuple(draft.note[0] if draft.note else "" for draft in drafts))
    if any(draft.belief is not None for draft in drafts):
        beliefs = [torch.zeros_like(one.tokens) if one.belief is None else one.belief for one in drafts]
        whole = replace(whole, belief=joined([one.double() for one in beliefs]))
    if any(draft.probe is not None for draft in drafts):
        probes = [torch.zeros_like(draft.live) if draft.probe is None else draft.probe for draft in drafts]
        whole = replace(whole, probe=joined(probes))
    if any(draft.positions is not None for draft in drafts):
        whole = replace(whole, positions=joined([draft.offsets.expand(1, -1) for draft in drafts], 1))
    if any(draft.embeddings is not None for draft in drafts):
        whole = replace(whole, embeddings=next(one.embeddings for one in drafts if one.embeddings is not None))
    if not drawn:
        return whole
    fresh = None
    if any(draft.fresh is not None for draft in drafts):
        not_fresh = torch.zeros(1, dtype=torch.bool, device=device)
        fresh = torch.cat([not_fresh if draft.fresh is None else draft.fresh for draft in drafts])
    return replace(
        whole,
        distributions=_laws_beside(drafts),
        source=joined([torch.full_like(one.tokens, -1) if one.source is None else one.source for one in drafts], -1),
        replacement=drawn[0].replacement,
        fresh=fresh,
        mixed=whole.mixed or len(drawn) < rows,
    )


def _laws_beside(drafts: Sequence[Draft]) -> Distribution:
    """Distributions [1, R, S] of each row, as one [B, R, S]; dense where their supports differ in size."""
    found = [draft.distributions for draft in drafts if draft.distributions is not None]
    if len({(distribution.width, distribution.tokens is None) for distribution in found}) > 1:
        found = [distribution.dense() for distribution in found]
    most, first, known = max(distribution.probs.shape[1] for distribution in found), found[0], iter(found)
    probs, tokens = [], []
    for draft in drafts:
        distribution = first if draft.distributions is None else next(known)
        padding = (0, 0, 0, most - distribution.probs.shape[1])
        probs.append(torch.nn.functional.pad(distribution.probs, padding))
        if distribution.tokens is not None:
            tokens.append(torch.nn.functional.pad(distribution.tokens, padding))
    return Distribution(torch.cat(probs), torch.cat(tokens) if tokens else None, first.vocabulary)


@dataclass(frozen=True)
class Verdict:
    """What a rule decided, with the numbers it decided by. D is the draft's depth."""

    path: Tensor  # [B, D] accepted nodes from the root down; -1 fills up
    accepted: Tensor  # [B] how many
    token: Tensor  # [B] what the target adds behind them
    resampled: Tensor  # [B] bool: it replaces a rejected guess (else it is a bonus)
    tried: Tensor  # [B, N] bool
    chance: Tensor  # [B, N] of acceptance, where tried
    p: Tensor  # [B, N] the target's probability of the guess, where tried
    q: Tensor  # [B, N] the drafter's, likewise; 1 for a fixed guess
    total_variation: Tensor | None = (
        None  # [B, D + 1] total variation of each emitted token's distribution from p; None: all 0
    )
    relaxed: Tensor | None = None  # [B, D] which accepted nodes a strict rule would have turned down; None: none
    host: list[list[int]] | None = None  # the emitted tokens as lists: the loop fills them in with its one transfer

    def emitted(self, draft: Draft) -> Tensor:
        """[B, D + 1] the accepted tokens and the target's own; -1 fills up."""
        ids = torch.where(self.path < 0, -1, draft.tokens.gather(1, self.path.clamp(min=0)))
        ids = torch.nn.functional.pad(ids, (0, 1), value=-1)
        return ids.scatter(1, self.accepted[:, None], self.token[:, None])

    def row(self, row: int, draft: Draft) -> Verdict:
        """On one row alone, for its own draft, whose nodes are the first of that row's in the draft judged."""
        one, size, depth = slice(row, row + 1), draft.size, draft.tree.depth
        return Verdict(
            path=self.path[one, :depth],
            accepted=self.accepted[one],
            token=self.token[one],
            resampled=self.resampled[one],
            tried=self.tried[one, :size],
            chance=self.chance[one, :size],
            p=self.p[one, :size],
            q=self.q[one, :size],
            total_variation=None if self.total_variation is None else self.total_variation[one, : depth + 1],
            relaxed=None if self.relaxed is None else self.relaxed[one, :depth],
            host=None if self.host is None else self.host[one],
        )

    def rows(self, draft: Draft) -> list[list[int]]:
        """The emitted tokens of each row, on the host."""
        if self.host is not None:
            return self.host
        tokens, counts = self.emitted(draft).tolist(), (self.accepted + 1).tolist()
        return [row[:count] for row, count in zip(tokens, counts, strict=True)]


def told(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Draft, Verdict, Tensor]:
    """Tokens that nobody drafted, any number for each row, as a chain accepted whole: what a target's `keep` takes."""
    counts = upload([len(row) for row in rows], device)
    size = max(max(map(len, rows)) - 1, 0)
    ids = upload([[*row, *[0] * (size + 1 - len(row))] for row in rows], device, torch.long)
    slots = torch.arange(size, device=device)
    there = slots < counts[:, None] - 1
    none = torch.zeros(len(rows), size, device=device)
    draft = Draft.guess(ids[:, :size], Tree.chain(size, device), there)
    verdict = Verdict(
        path=torch.where(there, slots, -1),
        accepted=(counts - 1).clamp(min=0),
        token=ids.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0],
        resampled=torch.zeros_like(counts, dtype=torch.bool),
        tried=none.bool(),
        chance=none,
        p=none,
        q=none,
        host=[list(row) for row in rows],
    )
    return draft, verdict, counts
