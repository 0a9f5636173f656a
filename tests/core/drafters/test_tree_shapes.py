"""Tree shapes: values against simulated walks, optimal trees against all trees, re-ranking against a search."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.drafters.tree_shapes import (
    AcceptanceCounter,
    Choices,
    best_choices,
    branching,
    by_accuracy,
    chain,
    comb,
    depths,
    from_choices,
    node_value,
    parallel,
    ranks,
    rerank,
    sequoia,
    tree_value,
    validate,
)
from outrider.core.errors import InvalidOption


@st.composite
def shapes(draw: st.DrawFn, most: int = 12) -> tuple[int, ...]:
    return tuple(draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, most))))


@st.composite
def positional(draw: st.DrawFn, most: int = 4) -> list[float]:
    """Probabilities of exclusive events."""
    parts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=most))
    return [part / max(sum(parts) + draw(st.integers(0, 20)), 1) for part in parts]


@cache
def every_forest(nodes: int, depth: int, width: int) -> list[tuple[tuple, ...]]:
    """All ordered forests of exactly so many nodes, as nested tuples of children."""
    if nodes == 0:
        return [()]
    if depth == 0 or width == 0:
        return []
    return [
        (first, *others)
        for size in range(1, nodes + 1)
        for first in every_forest(size - 1, depth - 1, width)
        for others in every_forest(nodes - size, depth, width)
        if len(others) < width
    ]


def to_choices(parents: Sequence[int], guesses: Sequence[int] | None = None) -> Choices:
    """The inverse of `from_choices`. Default for `guesses`: the ranks among siblings."""
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(parents, ranks(parents) if guesses is None else guesses, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return tuple(paths)


def flatten(forest: tuple) -> tuple[int, ...]:
    parents: list[int] = []

    def visit(children: tuple, parent: int) -> None:
        for child in children:
            parents.append(parent)
            visit(child, len(parents) - 1)

    visit(forest, -1)
    return tuple(parents)


def test_static_shapes() -> None:
    assert chain(3) == (-1, 0, 1)
    assert chain(0) == branching(()) == comb(0, 2) == ()
    assert branching((2, 1)) == (-1, -1, 0, 1)
    assert branching((2, 3)) == (-1, -1, 0, 0, 0, 1, 1, 1)
    assert len(branching((4, 2, 1))) == 4 + 8 + 8
    assert parallel(2, 3) == (-1, -1, 0, 1, 2, 3)
    assert comb(3, 2) == (-1, -1, 0, 0, 2, 2)


def test_depths_and_ranks() -> None:
    shape = (-1, 0, -1, 0, 2, 3)
    assert depths(shape) == (0, 1, 0, 1, 1, 2)
    assert ranks(shape) == (0, 0, 1, 1, 0, 0)


def test_the_tree_class_agrees() -> None:
    from outrider.core.tree import Tree

    for shape in (chain(4), branching((3, 2, 1)), comb(3, 3), (-1, 0, -1, 0, 2, 3)):
        tree = Tree.of(validate(shape))
        assert tuple(tree.depths[0].tolist()) == depths(shape)
        assert tuple(tree.ranks[0].tolist()) == ranks(shape)


@settings(deadline=None)
@given(shapes())
def test_choices_round_trip(shape: tuple[int, ...]) -> None:
    choices = to_choices(shape)
    assert len(set(choices)) == len(shape)
    parents, guesses = from_choices(reversed(choices))
    assert to_choices(parents, guesses) == tuple(sorted(choices, key=lambda path: (len(path), path)))
    assert sorted(depths(parents)) == sorted(depths(shape))


def test_choices_can_skip_ranks() -> None:
    parents, guesses = from_choices([(2,), (0,), (2, 5), (0,)])
    assert parents == (-1, -1, 1)
    assert guesses == (0, 2, 5)
    assert to_choices(parents, guesses) == ((0,), (2,), (2, 5))


@settings(deadline=None)
@given(shapes(), positional())
def test_tree_value_by_hand(shape: tuple[int, ...], acceptance: list[float]) -> None:
    vector = [*acceptance, *[0.0] * 12]
    by_hand = 1 + sum(math.prod(vector[rank] for rank in path) for path in to_choices(shape))
    assert tree_value(shape, acceptance) == pytest.approx(by_hand)


def test_tree_value_of_a_chain_is_the_published_one() -> None:
    from outrider.core.cost.theory import expected_tokens

    assert tree_value(chain(6), [0.7]) == pytest.approx(expected_tokens(0.7, 6))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [chain(4), branching((3, 2)), (-1, -1, 0, 0, 2, 1)])
def test_tree_value_is_what_a_simulation_counts(shape: tuple[int, ...]) -> None:
    acceptance = [0.5, 0.2, 0.1]
    children = {path: node for node, path in enumerate(to_choices(shape))}
    rng = np.random.default_rng(0)
    tokens = []
    for _ in range(20_000):
        path: tuple[int, ...] = ()
        while (path := (*path, int(rng.choice(4, p=[*acceptance, 0.2])))) in children:
            pass
        tokens.append(len(path))  # the last is the target's own
    assert tree_value(shape, acceptance) == pytest.approx(np.mean(tokens), abs=5 * np.std(tokens) / math.sqrt(20_000))


@settings(max_examples=40, deadline=None)
@given(positional(3))
def test_sequoia_beats_every_tree(acceptance: list[float]) -> None:
    table = sequoia(acceptance, 6, 4)
    for depth in range(5):
        best = 1.0
        for nodes in range(7):
            values = [tree_value(flatten(forest), acceptance) for forest in every_forest(nodes, depth, 3)]
            best = max([best, *values])
            assert table.value(nodes, depth) == pytest.approx(best, abs=1e-12)


def test_the_brute_force_enumerates_all_trees() -> None:
    catalan = [1, 1, 2, 5, 14, 42, 132]
    assert [len(every_forest(nodes, 9, 9)) for nodes in range(7)] == catalan
    assert len({flatten(forest) for forest in every_forest(6, 9, 9)}) == 132
    assert all(max(depths(flatten(forest))) < 2 for forest in every_forest(6, 2, 9))
    assert all(max(ranks(flatten(forest))) < 2 for forest in every_forest(6, 9, 2))


@settings(max_examples=40, deadline=None)
@given(positional(6), st.integers(0, 40), st.integers(0, 8))
def test_sequoia_returns_the_tree_with_its_value(acceptance: list[float], nodes: int, depth: int) -> None:
    table = sequoia(acceptance, 40, 8)
    shape = validate(table.shape(nodes, depth))
    assert len(shape) <= nodes
    assert max(depths(shape), default=-1) < depth
    assert max(ranks(shape), default=-1) < len(acceptance)
    assert tree_value(shape, acceptance) == pytest.approx(table.value(nodes, depth))
    assert depths(shape) == tuple(sorted(depths(shape)))  # level by level
    assert (np.diff(table.values, axis=0) >= 0).all()
    assert (np.diff(table.values, axis=1) >= 0).all()


def test_sequoia_at_full_size() -> None:
    acceptance = [0.45 * 0.5**rank for rank in range(32)]
    table = sequoia(acceptance, 128, 16)
    shape = table.shape(128, 16)
    assert len(shape) == 128
    assert tree_value(shape, acceptance) == pytest.approx(table.value(128, 16))
    rivals = (chain(16), branching((4, 2, 2, 2, 2)), parallel(8, 16), comb(16, 8))
    assert all(len(rival) <= 128 and tree_value(rival, acceptance) < table.value(128, 16) for rival in rivals)


@settings(max_examples=40, deadline=None)
@given(positional(4), st.floats(0, 0.5), st.floats(0, 0.3))
def test_best_size_is_the_best_ratio(acceptance: list[float], draft: float, slope: float) -> None:
    table = sequoia(acceptance, 20, 5)

    def passes(tokens: int) -> float:
        return 3 + slope * tokens

    choice = table.best(passes, draft)
    ratios = [
        table.value(nodes, depth) / (passes(nodes + 1) + draft * depth) for nodes in range(21) for depth in range(6)
    ]
    assert choice.tokens_per_pass / choice.cost == pytest.approx(max(ratios))
    assert choice.speedup == pytest.approx(max(ratios) * passes(1))
    assert tree_value(choice.shape, acceptance) == pytest.approx(choice.tokens_per_pass)
    assert choice.speedup >= 1 - 1e-12


def test_plain_decoding_wins_if_no_tree_pays() -> None:
    choice = sequoia([0.1], 8, 8).best(float, 1.0)
    assert (choice.shape, choice.tokens_per_pass, choice.speedup) == ((), 1.0, 1.0)


def test_a_cheaper_large_pass_does_not_hide_wasted_nodes() -> None:
    costs = {1: 1.0, 2: 1.0, 3: 0.5}  # two guesses measured faster than one, but a second guess can't be right
    choice = sequoia([0.5], 2, 1).best(lambda q: costs[q])
    assert (choice.shape, choice.cost, choice.speedup) == ((-1,), 1.0, 1.5)


@settings(max_examples=50, deadline=None)
@given(st.lists(positional(3), min_size=1, max_size=3), st.integers(0, 8))
def test_best_choices_beat_every_set(accuracy: list[list[float]], nodes: int) -> None:
    def all_paths(level: int = 0, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        for rank in range(len(accuracy[level]) if level < len(accuracy) else 0):
            yield (*path, rank)
            yield from all_paths(level + 1, (*path, rank))

    def worth(path: tuple[int, ...]) -> float:
        return math.prod(accuracy[level][rank] for level, rank in enumerate(path))

    choices = best_choices(accuracy, nodes)
    likeliest = sorted((worth(path) for path in all_paths()), reverse=True)[:nodes]
    assert sum(map(worth, choices)) == pytest.approx(sum(likeliest))  # no tree of so many nodes can hold more
    parents, _ = from_choices(choices)
    assert len(parents) == sum(value > 0 for value in likeliest)
    chances = [accuracy[len(path) - 1][path[-1]] for path in choices]
    assert node_value(parents, chances) == pytest.approx(1 + sum(likeliest))


@st.composite
def candidates(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities summed along each path, with many ties, and sometimes none at all (-inf)."""
    rows, count = draw(st.integers(1, 3)), draw(st.integers(0, 14))
    parents = [[draw(st.integers(-1, node - 1)) for node in range(count)] for _ in range(rows)]
    values: list[list[float]] = []
    for row in parents:
        sums: list[float] = []
        for parent in row:
            step = draw(st.sampled_from([0.0, -0.5, -1.0, -1.0, -2.0, -math.inf]))
            sums.append(step + (sums[parent] if parent >= 0 else 0.0))
        values.append(sums)
    return torch.tensor(values, dtype=torch.double), torch.tensor(parents, dtype=torch.long)


def best_first(values: list[float], parents: list[int], nodes: int) -> list[int]:
    """SpecExec's search: take the likeliest node whose parent was taken."""
    heap = [(-values[node], node) for node, parent in enumerate(parents) if parent < 0]
    heapq.heapify(heap)
    taken: list[int] = []
    while heap and len(taken) < nodes:
        _, best = heapq.heappop(heap)
        taken.append(best)
        for node, parent in enumerate(parents):
            if parent == best:
                heapq.heappush(heap, (-values[node], node))
    return sorted(taken)


@settings(deadline=None)
@given(candidates(), st.integers(0, 16))
def test_rerank_is_best_first_search(given_: tuple[torch.Tensor, torch.Tensor], nodes: int) -> None:
    values, parents = given_
    kept, shape = rerank(values, parents, nodes)
    for row in range(len(parents)):
        wanted = best_first(values[row].tolist(), parents[row].tolist(), nodes)
        got = kept[row].tolist()
        assert values[row][got].sort().values.tolist() == values[row][wanted].sort().values.tolist()
        assert got == sorted(set(got), key=lambda node: (values[row][node] == -math.inf, node))
        assert [got[over] if over >= 0 else -1 for over in shape[row].tolist()] == parents[row][got].tolist()
        validate(shape[row].tolist())


def test_rerank_row_by_row() -> None:
    values = torch.tensor([[-1.0, -2.0, -1.5, -3.0], [-3.0, -1.0, -4.0, -1.0]])
    parents = torch.tensor([[-1, -1, 0, 1], [-1, -1, 0, 1]])
    kept, shape = rerank(values, parents, 2)
    assert kept.tolist() == [[0, 2], [1, 3]]
    assert shape.tolist() == [[-1, 0], [-1, 0]]


def test_rerank_keeps_parents_of_better_children() -> None:
    values = torch.tensor([[-5.0, -1.0, -0.1, -2.0, -0.2]])  # node 2 and 4 claim more than the nodes they hang from
    kept, shape = rerank(values, torch.tensor([[-1, -1, 0, 1, 3]]), 3)
    assert kept.tolist() == [[1, 3, 4]]
    assert shape.tolist() == [[-1, 0, 1]]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 33])
def test_rerank_bounds_values_along_a_whole_chain(count: int) -> None:
    values = torch.arange(count, dtype=torch.double)[None]  # ever better, but none counts more than the first
    kept, _ = rerank(values, torch.tensor([chain(count)]), count // 2)
    assert kept.tolist() == [list(range(count // 2))]


def test_counter_by_hand() -> None:
    counter = AcceptanceCounter()
    for rank, offered in [(0, 2), (0, 2), (1, 2), (None, 2), (None, 1)]:
        counter.add(rank, offered)
    assert (counter.tried, counter.accepted) == ([5, 2], [2, 1])
    assert counter.vector() == pytest.approx((0.4, 0.6 * 0.5))


def test_counter_estimates_acceptance_from_groups_of_different_sizes() -> None:
    truth, rng, counter = [0.5, 0.2, 0.1], np.random.default_rng(0), AcceptanceCounter()
    for _ in range(30_000):
        offered, right = int(rng.integers(1, 4)), int(rng.choice(4, p=[*truth, 0.2]))
        counter.add(right if right < offered else None, offered)
    assert counter.vector() == pytest.approx(truth, abs=0.015)
    assert counter.accepted[2] / 30_000 < 0.05  # what counting without regard to sizes would have said


def test_counter_reads_a_step() -> None:
    counter = AcceptanceCounter()
    #        root: 0 rejected, 1 accepted, 2 never tried; under 1: 3 rejected; 4 hangs from the rejected 0
    counter.add_step((-1, -1, -1, 1, 0), (True, True, False, True, False), (1,))
    assert (counter.tried, counter.accepted) == ([2, 1], [0, 1])
    counter.add_step((-1, -1), (True, False), ())  # no room to try the second
    assert (counter.tried, counter.accepted) == ([3, 1], [0, 1])
    counter.add_step((-1,), (True,), (0,))  # all accepted: nothing was tried after it
    assert (counter.tried, counter.accepted) == ([4, 1], [1, 1])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_counter_round_trips(groups: list[tuple[int, int]]) -> None:
    counter = AcceptanceCounter()
    for rank, offered in groups:
        counter.add(rank if rank < offered else None, offered)
    assert AcceptanceCounter.from_dict(counter.to_dict()) == counter
    sequoia(counter.vector(), 3, 2)  # it is a vector that shapes can be made from


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: validate((-1, 1)), "node 1 .* parent 1.* 0 to 0"),
        (lambda: validate((0,)), "node 0 .* parent 0"),
        (lambda: validate((-2,)), "-2"),
        (lambda: chain(-1), "length is -1"),
        (lambda: branching((2, 0)), "width is 0"),
        (lambda: from_choices([(0, 1)]), r"no parent: add \(0,\)"),
        (lambda: from_choices([()]), "not a choice"),
        (lambda: from_choices([(-1,)]), "not a choice"),
        (lambda: node_value((-1, 0), (0.5,)), "1 probabilities for a tree of 2 nodes"),
        (lambda: tree_value((-1,), [0.7, 0.7]), "sums to 1.4"),
        (lambda: sequoia([0.5, -0.1], 4, 2), r"acceptance\[1\] is -0.1"),
        (lambda: sequoia([0.5], -1, 2), "nodes is -1"),
        (lambda: sequoia([0.5], 4, 2).value(5, 1), "up to 4 nodes and 2 levels"),
        (lambda: sequoia([0.5], 4, 2).best(lambda q: 0.0), "costs must be positive"),
        (lambda: best_choices([[0.5], [2.0]], 4), r"accuracy\[1\]\[0\] is 2.0"),
        (lambda: AcceptanceCounter().add(2, 2), "sibling 2"),
        (lambda: AcceptanceCounter.from_dict({"tried": [3]}), "'tried' and 'accepted'"),
        (lambda: AcceptanceCounter.from_dict({"tried": [1], "accepted": "x"}), "'tried' and 'accepted'"),
        (lambda: AcceptanceCounter.from_dict({"tried": [3, 2], "accepted": [2, 0]}), "sibling 1 .* at most 1 times"),
        (lambda: AcceptanceCounter.from_dict({"tried": [0], "accepted": [0]}), "at least once"),
    ],
)
def test_errors_say_what_was_given(call: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidOption, match=says):
        call()


def test_the_shape_by_accuracy_has_the_most_accepted_tokens() -> None:
    accuracy = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.0], [0.35, 0.05, 0.02]]

    def worth(shape: tuple[int, ...]) -> float:
        """The expected number of accepted tokens of a shape whose siblings are tried in order."""
        values, levels, ranks = list[float](), list[int](), list[int]()
        for node, parent in enumerate(shape):
            ranks.append(sum(other == parent for other in shape[:node]))
            levels.append(0 if parent < 0 else levels[parent] + 1)
            if levels[node] > 2 or ranks[node] > 2:
                return 0.0
            values.append((1.0 if parent < 0 else values[parent]) * accuracy[levels[node]][ranks[node]])
        return sum(values)

    for nodes in range(1, 6):
        every = product(*(range(-1, node) for node in range(nodes)))
        assert worth(by_accuracy(accuracy, nodes, 3)) == pytest.approx(max(map(worth, every)))
    assert by_accuracy(accuracy, 4, 1) == (-1, -1, -1) and by_accuracy((), 4, 3) == ()
