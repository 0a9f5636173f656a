"""Trees of fixed guesses as they are grown on the host, one a row, and what a batch of them is as a draft.

Shared by the drafters that look things up: knows token ids and how likely each guess is thought to be, nothing of
where guesses come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.draft import Draft
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree


class Trie:
    """Guesses that begin alike share nodes. `weight` says how likely a node is thought to be, its ancestors included,
    or how often it was seen; no node weighs more than its parent."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []  # -1: the root
        self.weights: list[float] = []
        self.depths: list[int] = []  # 1 for the root's children
        self.nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, parent: int, token: int) -> int:
        """The node of a token below a parent, made with weight 0 if there is none."""
        node = self.nodes.get((parent, token))
        if node is None:
            node = self.nodes[parent, token] = self.grow(parent, token)
        return node

    def grow(self, parent: int, token: int) -> int:
        """A node of its own, which shares nothing."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.weights.append(0.0)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        return len(self.tokens) - 1

    def add(self, path: Iterable[int], weight: float = 1.0) -> None:
        """One more continuation: its weight is added to every node on its path."""
        node = -1
        for token in path:
            node = self.at(node, token)
            self.weights[node] += weight

    def best(self, count: int) -> Trie:
        """The `count` heaviest nodes, the earlier where equal; they form a tree, as no node outweighs its parent."""
        if len(self) <= count:
            return self
        kept = sorted(sorted(range(len(self)), key=lambda node: -self.weights[node])[:count])
        found, place = Trie(), {-1: -1}
        for node in kept:
            place[node] = found.at(place[self.parents[node]], self.tokens[node])
            found.weights[place[node]] = self.weights[node]
        return found

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that these tokens lead down to, as far as they do."""
        found: list[int] = []
        for token in tokens:
            node = self.nodes.get((found[-1] if found else -1, token))
            if node is None:
                break
            found.append(node)
        return found


class Grower(ABC):
    """A drafter whose guesses grow on the host, where others can have them without a draft made of them."""

    @abstractmethod
    def tries(self, room: Sequence[int]) -> list[Trie]:
        """Each row's guesses, no deeper than there is room for; below 0 the row is finished."""

    @property
    def hosted(self) -> bool:
        """Are these all it proposes? A kind of it may propose otherwise."""
        return type(self).propose is Grower.propose

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        return planted(self.tries(room.tolist()), rng.device)


def planted(tries: Sequence[Trie], device: torch.device) -> Draft:
    """A batch of trees, one a row, of any sizes and shapes; weights up to 1 become beliefs."""
    size = max(map(len, tries))
    if not size:
        return Draft.empty(len(tries), device)
    tokens, shapes, beliefs, live = [], [], [], []
    for trie in tries:
        count, dead = len(trie), size - len(trie)
        tokens.append([*trie.tokens, *[0] * dead])
        shapes.append((*trie.parents, *range(count - 1, size - 1)))  # dead nodes hang each below the one before
        beliefs.append([*(min(weight, 1.0) for weight in trie.weights), *[0.0] * dead])
        live.append([True] * count + [False] * dead)
    if len({*shapes}) == 1:
        tree = Tree.of(shapes[0], device)
    else:
        deepest = max(max(trie.depths, default=0) + size - len(trie) for trie in tries)
        tree = Tree(upload(shapes, device, torch.long), deepest, max(max(Counter(one).values()) for one in shapes))
    belief = upload(beliefs, device, torch.float64)
    return Draft.guess(upload(tokens, device, torch.long), tree, upload(live, device), belief)
