"""Tree shapes as plain data: for each node the index of its parent, -1 for the root, parents before children.

Static shapes, the best shape for measured acceptance (Sequoia, arXiv 2402.12374; Medusa, arXiv 2401.10774), and
choosing the best nodes of a grown tree (EAGLE-2, arXiv 2406.16858; OPT-Tree, arXiv 2406.17276; SpecExec, arXiv
2406.02532). Knows nothing of tokens, models or rules; costs are numbers that somebody else measured.
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
Choices = tuple[tuple[int, ...], ...]  # a node as the ranks on its way down: (0, 2) is the best token's third best

_ROUNDING = 1e-6  # by how much probabilities may exceed 1


def validate(parents: Sequence[int]) -> Shape:
    """The shape itself if it is one; an error that names the first node that is out of place if not."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InvalidOption(
                f"node {node} of the tree has parent {parent}; it must be -1 (the root) or an earlier node"
                f"{f', 0 to {node - 1}' if node else ''}: list parents before their children"
            )
    return tuple(parents)


def chain(length: int) -> Shape:
    """One guess after the other."""
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
    """Each level has `width` siblings, of which only the first goes on."""
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
    """The place of each node among its siblings."""
    seen: dict[int, int] = {}
    places: list[int] = []
    for parent in parents:
        places.append(seen.get(parent, 0))
        seen[parent] = places[-1] + 1
    return tuple(places)


def from_choices(choices: Iterable[Sequence[int]]) -> tuple[Shape, tuple[int, ...]]:
    """Medusa's way to write a tree -> its shape, level by level, and which rank each node guesses.

    Ranks may leave gaps, as in [(0,), (2,)], which is why they are returned beside the shape; repeats count once.
    """
    places: dict[tuple[int, ...], int] = {(): -1}
    parents: list[int] = []
    guesses: list[int] = []
    for path in sorted({tuple(choice) for choice in choices}, key=lambda path: (len(path), path)):
        if not path or min(path) < 0:
            raise InvalidOption(f"{path} is not a choice; a choice lists ranks from 0 up, such as (0,) or (0, 2)")
        if path[:-1] not in places:
            raise InvalidOption(f"the choice {path} hangs in the air: {path[:-1]} must be among the choices too")
        places[path] = len(parents)
        parents.append(places[path[:-1]])
        guesses.append(path[-1])
    return tuple(parents), tuple(guesses)


def to_choices(parents: Sequence[int], guesses: Sequence[int] | None = None) -> Choices:
    """The inverse: ranks from the root down to each node, node by node. Left out, guesses are places among siblings."""
    validate(parents)
    own = ranks(parents) if guesses is None else guesses
    _one_each("ranks", parents, own)
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(parents, own, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return tuple(paths)


def node_value(parents: Sequence[int], chances: Sequence[float]) -> float:
    """Expected tokens of one target call, its own token included: 1 + the sum over nodes of the chance to get there.

    `chances[i]` is the probability that node i is the accepted child, given that its parent was accepted.
    """
    validate(parents)
    _one_each("chances", parents, chances)
    reach: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        reach.append(chance * (reach[parent] if parent >= 0 else 1.0))
    return 1.0 + sum(reach)


def tree_value(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    """The same where the chance depends on nothing but the place among siblings, Sequoia's positional acceptance:
    `acceptance[j]` is the probability that sibling j is the accepted one. Past its end it is 0."""
    known = _probabilities("acceptance", acceptance)
    return node_value(parents, [known[rank] if rank < len(known) else 0.0 for rank in ranks(parents)])


def best_choices(accuracy: Sequence[Sequence[float]], nodes: int) -> Choices:
    """The best tree of `nodes` nodes for heads that err independently: accuracy[d][r] is how often the head of level d
    has the right token at rank r (Medusa's construction). Taking the likeliest node next to the tree each time is
    optimal, as no node is likelier than its parent. Nodes that are never right are left out."""
    _at_least(0, nodes=nodes)
    table = [_probabilities(f"accuracy[{level}]", row) for level, row in enumerate(accuracy)]
    chosen: list[tuple[int, ...]] = []
    frontier: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]  # shallow ones first where equal
    while frontier and len(chosen) <= nodes:
        negative, level, path = heapq.heappop(frontier)
        chosen.append(path)
        if level < len(table):
            for rank, chance in enumerate(table[level]):
                if chance > 0:
                    heapq.heappush(frontier, (negative * chance, level + 1, (*path, rank)))
    return tuple(sorted(chosen[1:], key=lambda path: (len(path), path)))


@dataclass(frozen=True)
class Choice:
    """A tree and what it is predicted to do."""

    shape: Shape
    tokens_per_pass: float
    cost: float  # of drafting and verifying it, in the unit the costs were given in
    speedup: float  # over plain decoding


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best trees of every size and depth, as found by `sequoia`."""

    values: NDArray[np.float64]  # [D + 1, N + 1] most tokens per call with at most d levels and at most n nodes
    _sizes: NDArray[np.int32]  # [D + 1, R, N + 1] nodes to give sibling r when m are left for it and those after it

    def value(self, nodes: int, depth: int) -> float:
        self._inside(nodes, depth)
        return float(self.values[depth, nodes])

    def shape(self, nodes: int, depth: int) -> Shape:
        """The tree that reaches that value, level by level; smaller than allowed where more would gain nothing."""
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
        """The size and depth with the most tokens for their cost: argmax of value(n, d) / (t(n + 1) + d draft).

        `verify(q)` is what a target pass over q tokens costs (the root is one of them), `draft` what drafting one level
        does. The empty tree, plain decoding, takes part: it wins where nothing pays.
        """
        levels = np.arange(len(self.values))[:, None]
        passes = np.array([verify(size + 1) for size in range(self.values.shape[1])])
        if not (passes > 0).all() or draft < 0:
            raise InvalidOption("costs must be positive: every verify(q) above 0, and draft 0 or more")
        costs = passes + draft * levels
        gains = np.diff(self.values, axis=1, prepend=0.0) > 0  # a size that adds nothing isn't really that size
        depth, nodes = np.unravel_index(int(np.argmax(np.where(gains, self.values / costs, 0.0))), costs.shape)
        value, cost = float(self.values[depth, nodes]), float(costs[depth, nodes])
        return Choice(self.shape(int(nodes), int(depth)), value, cost, value / cost * float(passes[0]))

    def _inside(self, nodes: int, depth: int) -> None:
        most_depth, most_nodes = (size - 1 for size in self.values.shape)
        if not (0 <= nodes <= most_nodes and 0 <= depth <= most_depth):
            raise InvalidOption(
                f"nodes={nodes}, depth={depth}: this table goes up to {most_nodes} nodes and {most_depth} levels"
            )


def sequoia(acceptance: Sequence[float], nodes: int, depth: int) -> Optimum:
    """The trees with the most expected tokens under positional acceptance (see `tree_value`), for every number of nodes
    up to `nodes` and of levels up to `depth`, by Sequoia's dynamic program.

    Its state is (levels left, sibling, nodes left), and one maximum is taken over all sizes of a sibling's subtree at
    once: O(depth · siblings · nodes²) numpy work. Unlike the paper's, sizes and depths are upper bounds and leave the
    root out, so every entry is a tree and the value never falls.
    """
    _at_least(0, nodes=nodes, depth=depth)
    gain = _probabilities("acceptance", acceptance)[: max(nodes, 1)]
    left, size = np.indices((nodes + 1, nodes + 1))
    fits, rest = size <= left, np.maximum(left - size, 0)
    values = np.ones((depth + 1, nodes + 1))
    sizes = np.zeros((depth + 1, len(gain), nodes + 1), dtype=np.int32)
    for level in range(1, depth + 1):
        below = np.concatenate([[0.0], values[level - 1, :-1]])  # of a subtree of at most s nodes; it counts itself
        after = np.zeros(nodes + 1)  # of this sibling and all later ones, by nodes left
        for rank in reversed(range(len(gain))):
            total = np.where(fits, gain[rank] * below + after[rest], -np.inf)
            total[:, 0] = 0.0  # stop here
            sizes[level, rank] = total.argmax(axis=1)
            after = total.max(axis=1)
        values[level] += after
    return Optimum(values, sizes)


def rerank(values: Tensor, parents: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Of candidates with log-probabilities summed along their path, values [B, M] and parents [B, M] (topological),
    keep the `nodes` best of each row -> their indices [B, m], in topological order, and their parents among the kept.

    It is EAGLE-2's re-ranking, OPT-Tree's choice and, on candidates that were expanded best first, SpecExec's: as no
    child is likelier than its parent, the likeliest nodes form a tree. Where values say otherwise (rounding, other
    scores) a node counts no more than its ancestors; where equal, the earlier node wins, so parents come before
    children. Nodes at -inf come last. Nothing waits for the device.
    """
    count = parents.shape[1]
    above = parents
    for _ in range(max(count - 1, 0).bit_length()):  # each round looks twice as far up
        safe = above.clamp(min=0)
        values = torch.where(above < 0, values, torch.minimum(values, values.gather(1, safe)))
        above = torch.where(above < 0, -1, above.gather(1, safe))
    kept = values.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(1).values
    order = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    places = torch.full_like(parents, -1).scatter_(1, kept, order)
    over = parents.gather(1, kept)
    return kept, torch.where(over < 0, -1, places.gather(1, over.clamp(min=0)))


@dataclass
class AcceptanceCounter:
    """Measures positional acceptance: how often each sibling was tried, and how often it was the accepted one.

    Siblings are tried in order until one is accepted, so groups may differ in size: the vector is the chance of each
    sibling once tried, times that of all before it having failed (as Kaplan and Meier estimate survival). Sequoia
    measures with one fixed number of siblings instead, where both are the same.
    """

    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, rank: int | None, offered: int) -> None:
        """One group of siblings whose parent was accepted: which one was accepted, if any, out of how many offered."""
        if rank is not None and not 0 <= rank < offered:
            raise InvalidOption(f"sibling {rank} cannot be accepted out of {offered} offered; ranks count from 0")
        _at_least(0, offered=offered)
        reached = offered if rank is None else rank + 1
        for counts in (self.tried, self.accepted):
            counts.extend([0] * (reached - len(counts)))
        for place in range(reached):
            self.tried[place] += 1
        if rank is not None:
            self.accepted[rank] += 1

    def add_step(self, parents: Sequence[int], tried: Sequence[bool], path: Sequence[int]) -> None:
        """A step of a trace: its nodes, which were tried, and the accepted ones from the root down."""
        places = ranks(parents)
        for parent, child in zip([-1, *path], [*path, None], strict=True):
            group = [node for node, above in enumerate(parents) if above == parent and tried[node]]
            if child is not None:
                self.add(places[child], places[child] + 1)
            elif group:
                self.add(None, len(group))

    def vector(self) -> tuple[float, ...]:
        """The probability that sibling j is the accepted one, for as many siblings as were ever tried."""
        chances: list[float] = []
        failed = 1.0
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            chances.append(failed * accepted / tried)
            failed *= 1 - accepted / tried
        return tuple(chances)

    def to_dict(self) -> dict[str, list[int]]:
        return {"tried": list(self.tried), "accepted": list(self.accepted)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Sequence[int]]) -> AcceptanceCounter:
        lists = [part for part in data.values() if isinstance(part, list) and all(type(n) is int for n in part)]
        if set(data) != {"tried", "accepted"} or len(lists) != 2 or len(lists[0]) != len(lists[1]):
            raise InvalidOption("acceptance counts are 'tried' and 'accepted': lists of whole numbers, equally long")
        left: float = float("inf")
        for place, (tried, accepted) in enumerate(zip(data["tried"], data["accepted"], strict=True)):
            if not (0 <= accepted <= tried <= left and tried > 0):
                raise InvalidOption(
                    f"sibling {place} was tried {tried} times and accepted {accepted} times; it must be tried at "
                    f"least once, {f'at most {left:.0f} times, ' if place else ''}and accepted no oftener than tried"
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
            f"{name} sums to {sum(values):.4g}, but at most one sibling is accepted, so 1 is the most; if these are "
            "chances given that earlier siblings failed, multiply each by the chance that they did"
        )
    return values


def _one_each(name: str, parents: Sequence[int], given: Sequence[float]) -> None:
    if len(given) != len(parents):
        raise InvalidOption(f"{len(given)} {name} for a tree of {len(parents)} nodes; each node needs one")


def _at_least(least: int, **given: int) -> None:
    for name, value in given.items():
        if value < least:
            raise InvalidOption(f"{name} is {value}; it must be {least} or more")
