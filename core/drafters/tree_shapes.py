"""Tree shapes as plain data: the parent of each node, -1 for the root, parents before children.

Static shapes; the best shape for measured acceptance (Sequoia, arXiv 2402.12374; Medusa, arXiv 2401.10774); the best
nodes of a tree of candidates (EAGLE-2, arXiv 2406.16858; OPT-Tree, arXiv 2406.17276; SpecExec, arXiv 2406.02532).
Independent of tokens, models and rules; costs are measured elsewhere.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import InvalidOption

Shape = tuple[int, ...]
Choices = tuple[tuple[int, ...], ...]  # a node as ranks from the root: (0, 2) is the third child of the first child

_ROUNDING = 1e-6  # probabilities may sum to 1 plus this


def validate(parents: Sequence[int]) -> Shape:
    """The shape as a tuple; raises InvalidOption for the first node that does not follow its parent."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InvalidOption(
                f"node {node} of the tree has parent {parent}; it must be -1 (the root) or an earlier node"
                f"{f', 0 to {node - 1}' if node else ''}: list parents before their children"
            )
    return tuple(parents)


def chain(length: int) -> Shape:
    """A chain: every node has one child."""
    return parallel(1, length)


def parallel(count: int, length: int) -> Shape:
    """Chains side by side, in level order: SpecTr's independent drafts (arXiv 2310.15141)."""
    _at_least(0, length=length)
    _at_least(1, count=count)
    return tuple(max(node - count, -1) for node in range(count * length))


def branching(widths: Sequence[int]) -> Shape:
    """Every node of level i has widths[i] children: (4, 2, 1) has 4 + 8 + 8 nodes."""
    shape: list[int] = []
    level = [-1]
    for width in widths:
        _at_least(1, width=width)
        start = len(shape)
        shape.extend(parent for parent in level for _ in range(width))
        level = list(range(start, len(shape)))
    return tuple(shape)


def comb(length: int, width: int) -> Shape:
    """Levels of `width` siblings; only the first sibling of a level has children."""
    _at_least(0, length=length)
    _at_least(1, width=width)
    return tuple(-1 if level == 0 else (level - 1) * width for level in range(length) for _ in range(width))


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """The level of each node; the root's children are on level 0."""
    levels: list[int] = []
    for parent in parents:
        levels.append(0 if parent < 0 else levels[parent] + 1)
    return tuple(levels)


def ranks(parents: Sequence[int]) -> tuple[int, ...]:
    """The rank of each node among its siblings, from 0."""
    seen: dict[int, int] = {}
    places: list[int] = []
    for parent in parents:
        places.append(seen.get(parent, 0))
        seen[parent] = places[-1] + 1
    return tuple(places)


def from_choices(choices: Iterable[Sequence[int]]) -> tuple[Shape, tuple[int, ...]]:
    """A tree in Medusa's notation -> its shape, level by level, and the rank of the token that each node guesses.

    Ranks may have gaps, as in [(0,), (2,)]; duplicate choices count once.
    """
    places: dict[tuple[int, ...], int] = {(): -1}
    parents: list[int] = []
    guesses: list[int] = []
    for path in sorted({tuple(choice) for choice in choices}, key=lambda path: (len(path), path)):
        if not path or min(path) < 0:
            raise InvalidOption(f"{path} is not a choice; a choice lists ranks from 0 up, such as (0,) or (0, 2)")
        if path[:-1] not in places:
            raise InvalidOption(f"the choice {path} has no parent: add {path[:-1]} to the choices")
        places[path] = len(parents)
        parents.append(places[path[:-1]])
        guesses.append(path[-1])
    return tuple(parents), tuple(guesses)


def node_value(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    """Expected tokens per target pass: 1 (the target's own token) + the sum over nodes of the probability that the node
    is accepted.

    `acceptance[i]` is the probability that node i is the accepted child, given that its parent was accepted.
    """
    validate(parents)
    _one_each("probabilities", parents, acceptance)
    reach: list[float] = []  # probability that the node is on the accepted path
    for parent, probability in zip(parents, acceptance, strict=True):
        reach.append(probability * (reach[parent] if parent >= 0 else 1.0))
    return 1.0 + sum(reach)


def tree_value(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    """Expected tokens per target pass under Sequoia's positional acceptance: `acceptance[j]` is the probability that
    sibling j is the accepted one, whatever its parent; 0 for siblings past the end."""
    by_rank = _probabilities("acceptance", acceptance)
    return node_value(parents, [by_rank[rank] if rank < len(by_rank) else 0.0 for rank in ranks(parents)])


def best_choices(accuracy: Sequence[Sequence[float]], nodes: int) -> Choices:
    """The best tree of `nodes` nodes for independent heads (Medusa's construction): accuracy[d][r] is how often the
    token of rank r is right in the head of level d. Adding the most probable node greedily is optimal, since no node is
    more probable than its parent. Nodes with probability 0 are left out."""
    _at_least(0, nodes=nodes)
    table = [_probabilities(f"accuracy[{level}]", row) for level, row in enumerate(accuracy)]
    chosen: list[tuple[int, ...]] = []
    frontier: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]  # equally probable nodes: shallow ones first
    while frontier and len(chosen) <= nodes:
        negative, level, path = heapq.heappop(frontier)
        chosen.append(path)
        if level < len(table):
            for rank, probability in enumerate(table[level]):
                if probability > 0:
                    heapq.heappush(frontier, (negative * probability, level + 1, (*path, rank)))
    return tuple(sorted(chosen[1:], key=lambda path: (len(path), path)))


@dataclass(frozen=True)
class Choice:
    """A tree and its predicted performance."""

    shape: Shape
    tokens_per_pass: float
    cost: float  # of drafting and verifying the tree, in the unit of the given costs
    speedup: float  # over plain decoding


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best trees of every size and depth; made by `sequoia`."""

    values: NDArray[np.float64]  # [D + 1, N + 1] tokens per target pass with at most d levels and n nodes
    _sizes: NDArray[np.int32]  # [D + 1, R, N + 1] size of sibling r's subtree if m nodes are left for it and later ones

    def value(self, nodes: int, depth: int) -> float:
        self._inside(nodes, depth)
        return float(self.values[depth, nodes])

    def shape(self, nodes: int, depth: int) -> Shape:
        """The tree with that value, level by level; smaller than `nodes` if more nodes gain nothing."""
        self._inside(nodes, depth)
        shape: list[int] = []
        waiting = deque([(-1, depth, nodes)])
        while waiting:
            parent, levels, left = waiting.popleft()
            for rank in range(self._sizes.shape[1] if levels else 0):
                size = int(self._sizes[levels, rank, left])
                if not size:
                    break
                waiting.append((len(shape), levels - 1, size - 1))
                shape.append(parent)
                left -= size
        return tuple(shape)

    def best(self, verify: Callable[[int], float], draft: float = 0.0) -> Choice:
        """The tree with the most tokens per cost: argmax of value(n, d) / (verify(n + 1) + d draft).

        `verify(q)` is the cost of a target pass over q tokens, the root included; `draft` is the cost of drafting one
        level. The result is the empty tree, plain decoding, if no other is faster.
        """
        levels = np.arange(len(self.values))[:, None]
        passes = np.array([verify(size + 1) for size in range(self.values.shape[1])])
        if not (passes > 0).all() or draft < 0:
            raise InvalidOption("costs must be positive: every verify(q) above 0, and draft 0 or more")
        costs = passes + draft * levels
        gains = np.diff(self.values, axis=1, prepend=0.0) > 0  # otherwise the tree is smaller than its column says
        depth, nodes = np.unravel_index(int(np.argmax(np.where(gains, self.values / costs, 0.0))), costs.shape)
        value, cost = float(self.values[depth, nodes]), float(costs[depth, nodes])
        return Choice(self.shape(int(nodes), int(depth)), value, cost, value / cost * float(passes[0]))

    def _inside(self, nodes: int, depth: int) -> None:
        max_depth, max_nodes = (size - 1 for size in self.values.shape)
        if not (0 <= nodes <= max_nodes and 0 <= depth <= max_depth):
            raise InvalidOption(
                f"nodes={nodes}, depth={depth}: this table has trees of up to {max_nodes} nodes and {max_depth} levels"
            )


def sequoia(acceptance: Sequence[float], nodes: int, depth: int) -> Optimum:
    """The trees with the highest `tree_value` for every number of nodes up to `nodes` and of levels up to `depth`, by
    Sequoia's dynamic program.

    The state is (levels left, sibling, nodes left); each maximum is over the sizes of a sibling's subtree, in O(depth ·
    siblings · nodes²) numpy operations. Unlike in the paper, sizes and depths are upper bounds and exclude the root, so
    every entry is a tree and values never decrease.
    """
    _at_least(0, nodes=nodes, depth=depth)
    gain = _probabilities("acceptance", acceptance)[: max(nodes, 1)]
    left, size = np.indices((nodes + 1, nodes + 1))
    fits, remaining = size <= left, np.maximum(left - size, 0)
    values = np.ones((depth + 1, nodes + 1))
    sizes = np.zeros((depth + 1, len(gain), nodes + 1), dtype=np.int32)
    for level in range(1, depth + 1):
        below = np.concatenate([[0.0], values[level - 1, :-1]])  # value of a subtree of at most s nodes, its root's too
        after = np.zeros(nodes + 1)  # value of this and all later siblings, by nodes left
        for rank in reversed(range(len(gain))):
            total = np.where(fits, gain[rank] * below + after[remaining], -np.inf)
            total[:, 0] = 0.0  # stop here
            sizes[level, rank] = total.argmax(axis=1)
            after = total.max(axis=1)
        values[level] += after
    return Optimum(values, sizes)


def by_accuracy(accuracy: Sequence[Sequence[float]], nodes: int, depth: int) -> tuple[int, ...]:
    """The shape with the most accepted tokens for an accuracy [K, R] of the r-th token on level k, whatever its parent:
    the `nodes` paths of the highest products, as Medusa (arXiv 2401.10774) chooses its tree."""
    rates = [sorted(row, reverse=True) for row in accuracy[:depth]]
    shape: list[int] = []
    queue = [(-rates[0][0], -1, 0, 0)] if rates and rates[0] else []  # -product, parent, level, rank
    while queue and len(shape) < nodes:
        value, parent, level, rank = heapq.heappop(queue)
        if rank + 1 < len(rates[level]) and rates[level][rank]:
            heapq.heappush(queue, (value * rates[level][rank + 1] / rates[level][rank], parent, level, rank + 1))
        if level + 1 < len(rates):
            heapq.heappush(queue, (value * rates[level + 1][0], len(shape), level + 1, 0))
        shape.append(parent)
    return tuple(shape)


def rerank(values: Tensor, parents: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The `nodes` best candidates of each row. `values` [B, M] are log-probabilities summed along the path, `parents`
    [B, M] are in topological order. -> their indices [B, m], in that order, and their parents among them [B, m].

    This is the re-ranking of EAGLE-2 and OPT-Tree and, for candidates that were expanded best first, of SpecExec: no
    child is more probable than its parent, so the best nodes form a tree. A value above an ancestor's (rounding, other
    scores) is lowered to it; of equal values the earlier node wins, so parents come before children. Nodes at -inf come
    last, so that the numbers of the others don't depend on them. Does not synchronise with the device.
    """
    count = parents.shape[1]
    above = parents
    for _ in range(max(count - 1, 0).bit_length()):  # pointer doubling
        safe = above.clamp(min=0)
        values = torch.where(above < 0, values, torch.minimum(values, values.gather(1, safe)))
        above = torch.where(above < 0, -1, above.gather(1, safe))
    ranked = values.sort(dim=1, descending=True, stable=True)
    dead = ranked.values[:, :nodes] == -torch.inf
    kept = (ranked.indices[:, :nodes] + dead * count).sort(1).values.remainder_(max(count, 1))
    order = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    places = torch.full_like(parents, -1).scatter_(1, kept, order)
    over = parents.gather(1, kept)
    return kept, torch.where(over < 0, -1, places.gather(1, over.clamp(min=0)))


@dataclass
class AcceptanceCounter:
    """Counts how often each sibling was tried and how often it was accepted, to estimate positional acceptance.

    Siblings are tried in order until one is accepted, and groups may differ in size. The estimate is a sibling's
    acceptance rate when tried times the probability that all earlier ones were rejected (the Kaplan-Meier estimator).
    Sequoia's estimate is the same for groups of one size.
    """

    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, rank: int | None, offered: int) -> None:
        """Count one group of `offered` siblings of an accepted parent; `rank` is the accepted one, None: none was."""
        if rank is not None and not 0 <= rank < offered:
            raise InvalidOption(f"sibling {rank} cannot be accepted out of {offered} offered; ranks count from 0")
        _at_least(0, offered=offered)
        reached = offered if rank is None else rank + 1
        for counts in (self.tried, self.accepted):
            counts.extend([0] * (reached - len(counts)))
        for sibling in range(reached):
            self.tried[sibling] += 1
        if rank is not None:
            self.accepted[rank] += 1

    def add_step(self, parents: Sequence[int], tried: Sequence[bool], path: Sequence[int]) -> None:
        """Count a step of a trace: the nodes' parents, which nodes were tried, and the accepted path."""
        sibling_ranks = ranks(parents)
        for parent, child in zip([-1, *path], [*path, None], strict=True):
            siblings = [node for node, above in enumerate(parents) if above == parent and tried[node]]
            if child is not None:
                self.add(sibling_ranks[child], sibling_ranks[child] + 1)
            elif siblings:
                self.add(None, len(siblings))

    def vector(self) -> tuple[float, ...]:
        """The probability that sibling j is the accepted one, for every sibling that was tried."""
        acceptance: list[float] = []
        all_rejected = 1.0  # probability that every earlier sibling was rejected
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            acceptance.append(all_rejected * accepted / tried)
            all_rejected *= 1 - accepted / tried
        return tuple(acceptance)

    def to_dict(self) -> dict[str, list[int]]:
        return {"tried": list(self.tried), "accepted": list(self.accepted)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Sequence[int]]) -> AcceptanceCounter:
        lists = [part for part in data.values() if isinstance(part, list) and all(type(n) is int for n in part)]
        if set(data) != {"tried", "accepted"} or len(lists) != 2 or len(lists[0]) != len(lists[1]):
            raise InvalidOption("acceptance counts must be 'tried' and 'accepted', integer lists of equal length")
        left: float = float("inf")
        for rank, (tried, accepted) in enumerate(zip(data["tried"], data["accepted"], strict=True)):
            if not (0 <= accepted <= tried <= left and tried > 0):
                raise InvalidOption(
                    f"sibling {rank} was tried {tried} times and accepted {accepted} times; it must be tried at "
                    f"least once, {f'at most {left:.0f} times, ' if rank else ''}and not accepted more often than tried"
                )
            left = tried - accepted
        return cls(list(data["tried"]), list(data["accepted"]))


def _probabilities(name: str, given: Sequence[float]) -> list[float]:
    values = [float(value) for value in given]
    for rank, value in enumerate(values):
        if not 0 <= value <= 1:
            raise InvalidOption(f"{name}[{rank}] is {value}; it must be a probability, from 0 to 1")
    if sum(values) > 1 + _ROUNDING:
        raise InvalidOption(
            f"{name} sums to {sum(values):.4g}; at most one sibling is accepted, so the sum must be at most 1. If "
            "these are probabilities given that earlier siblings were rejected, multiply each by the probability of "
            "that"
        )
    return values


def _one_each(name: str, parents: Sequence[int], given: Sequence[float]) -> None:
    if len(given) != len(parents):
        raise InvalidOption(f"{len(given)} {name} for a tree of {len(parents)} nodes; each node needs one")


def _at_least(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if value < minimum:
            raise InvalidOption(f"{name} is {value}; it must be {minimum} or more")
