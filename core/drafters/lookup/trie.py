"""Trees of fixed guesses that grow on the host, one per row, and their conversion to a batch's draft.

Shared by the lookup drafters. Independent of where guesses come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.device import upload_all
from outrider.core.draft import Draft, OnHost
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree


class Trie:
    """A tree of guesses; guesses with a common prefix share nodes. A node's weight is the estimated probability of its
    path, or a count; no node weighs more than its parent."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []  # -1: the root
        self.weights: list[float] = []
        self.depths: list[int] = []  # 1 for the root's children
        self.nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, parent: int, token: int) -> int:
        """The node of a token below a parent; a new one has weight 0."""
        node = self.nodes.get((parent, token))
        if node is None:
            node = self.nodes[parent, token] = self.grow(parent, token)
        return node

    def grow(self, parent: int, token: int) -> int:
        """Append a new node, even if the parent has a child with this token."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.weights.append(0.0)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        return len(self.tokens) - 1

    def add(self, path: Iterable[int], weight: float = 1.0) -> None:
        """Add a continuation: `weight` is added to every node on its path."""
        node = -1
        for token in path:
            node = self.at(node, token)
            self.weights[node] += weight

    def best(self, count: int) -> Trie:
        """The tree of the `count` heaviest nodes; of equal weights the earlier node wins."""
        if len(self) <= count:
            return self
        heaviest = sorted(sorted(range(len(self)), key=lambda node: -self.weights[node])[:count])
        best, index = Trie(), {-1: -1}
        for node in heaviest:
            index[node] = best.at(index[self.parents[node]], self.tokens[node])
            best.weights[index[node]] = self.weights[node]
        return best

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes along these tokens from the root, as far as they are in the tree."""
        path: list[int] = []
        for token in tokens:
            node = self.nodes.get((path[-1] if path else -1, token))
            if node is None:
                break
            path.append(node)
        return path


class TrieDrafter(ABC):
    """A drafter that builds tries on the host, so that combined drafters can merge them without building drafts."""

    @abstractmethod
    def tries(self, room: Sequence[int]) -> list[Trie]:
        """Each row's guesses, at most `room` deep; a row with room below 0 is finished."""

    @property
    def hosted(self) -> bool:
        """Whether the tries are the whole draft, as they are unless a subclass overrides `propose`."""
        return type(self).propose is TrieDrafter.propose

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        return to_draft(self.tries(room.tolist()), rng.device)


def to_draft(tries: Sequence[Trie], device: torch.device, probes: Sequence[int] | None = None) -> Draft:
    """A draft of one trie per row, of any sizes and shapes. Weights, at most 1, become the draft's `belief`. The first
    `probes` nodes of each row are scored but never tried. On a GPU the size and the depth are one of few numbers, so
    that few shapes are recorded."""
    size = max(map(len, tries))
    if not size:
        return Draft.empty(len(tries), device)
    depth = max(max(trie.depths, default=0) + size - len(trie) for trie in tries)
    chains = all(trie.parents == [*range(-1, len(trie) - 1)] for trie in tries)
    if device.type != "cpu":
        size = bucket(size)
        depth = size if chains else bucket(max(max(trie.depths, default=0) for trie in tries))
    tokens, shapes, beliefs, live = [], [], [], []
    for trie in tries:
        count, padding = len(trie), size - len(trie)
        tokens.append([*trie.tokens, *[0] * padding])
        # each below the one before it, so that no node gets more children, as far as the depth allows
        straight = chains or device.type == "cpu"
        fillers = (count + place - 1 if straight or place % depth else -1 for place in range(padding))
        shapes.append((*trie.parents, *fillers))
        beliefs.append([*(min(weight, 1.0) for weight in trie.weights), *[0.0] * padding])
        live.append([True] * count + [False] * padding)
    parts = [torch.tensor(tokens), torch.tensor(beliefs, dtype=torch.float64), torch.tensor(live), torch.tensor(shapes)]
    if probes is not None:
        parts.append(torch.arange(size) < torch.tensor(probes)[:, None])
    ids, belief, there, above, *rest = upload_all(parts, device)
    one_shape, chain = len({*shapes}) == 1, tuple(range(-1, size - 1))
    if one_shape and (device.type == "cpu" or shapes[0] == chain):  # other parents are inputs of recordings
        tree = Tree.of(shapes[0], device)
    else:
        width = max(max(Counter(parents).values()) for parents in shapes)
        tree = Tree(above, depth, width)
    host = OnHost.guesses(tokens, [list(parents) for parents in shapes], live, ids)
    draft = Draft.guess(ids, tree, there, belief, host)
    return draft if probes is None else replace(draft, probe=rest[0], belief=None)


def bucket(count: int) -> int:
    """The number of nodes or levels that a recording for `count` of them has: 4, 16, and on as powers of two."""
    return next((few for few in (4, 16) if count <= few), 1 << (count - 1).bit_length())
