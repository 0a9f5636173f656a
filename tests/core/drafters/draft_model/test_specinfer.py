"""SpecInfer's merged trees, and SpecExec's best-first ones."""

from __future__ import annotations

import heapq
import math

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.specexec import SpecExec
from outrider.core.drafters.draft_model.specinfer import SpecInfer
from outrider.core.errors import Incompatible
from outrider.core.protocol import Drafter, Prefill, Rule
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact, SampleMatch, Token
from outrider.core.testing.conformance import Case, enumerate_output, target_distribution, total_variation
from outrider.core.testing.table_target import TableTarget
from outrider.core.tree import Tree


def table(blur: float, vocabulary: int = 3) -> TableTarget:
    return TableTarget(vocabulary, seed=1, sharpness=0.7, blur=blur)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Exact(), Token(), SampleMatch()], ids=["exact", "token", "sample-match"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_p=0.8)])
def test_several_models_in_one_tree_keep_the_distribution(rule: Rule, sampling: Sampling) -> None:
    """Each model has its own distribution, so siblings were drawn from different ones."""

    def merged() -> Drafter:
        return SpecInfer(table(0.4), other_models=[table(0.8)], samples=1, depth=2)

    prompts = [(0, 1), (2, 1, 0, 1)]
    case = Case(target=lambda: table(0), drafter=merged, rule=rule, prompts=prompts, sampling=sampling, limits=(3, 2))
    for row, distribution in enumerate(enumerate_output(case)):
        assert (
            total_variation(distribution, target_distribution(table(0), prompts[row], sampling, case.limits[row]))
            < 1e-12
        )


def test_samples_share_a_node_where_they_agree() -> None:
    drafter = SpecInfer(table(0.4), samples=4, depth=3)
    drafter.begin(Prefill(), [[0, 1]] * 20, Sampling())
    rng = CounterRNG.of(3, 20)
    draft = drafter.propose(torch.full((20,), 9), rng)
    parents, tokens = draft.tree.parents.tolist(), draft.tokens.tolist()
    merged = 0
    for above, ids in zip(parents, tokens, strict=True):
        first: dict[tuple[int, int], int] = {}
        for node, pair in enumerate(zip(above, ids, strict=True)):
            merged += pair in first
            first.setdefault(pair, node)
        assert all(parent < 0 or first[above[parent], ids[parent]] == parent for parent in above)
    assert merged, "with three tokens some samples must agree"
    assert draft.replacement and draft.size == 12


def test_models_of_one_tree_have_one_vocabulary() -> None:
    with pytest.raises(Incompatible, match=r"\[3, 4\]"):
        SpecInfer(table(0.1), other_models=[table(0.1, 4)])


def best_nodes(model: TableTarget, prompt: list[int], count: int, width: int) -> dict[tuple[int, ...], float]:
    """The likeliest paths, found one by one with a model pass each."""
    found: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while frontier and len(found) <= count:
        value, path = heapq.heappop(frontier)
        found[path] = -value
        model.begin([prompt], Sampling())
        ids = torch.tensor([path], dtype=torch.long).view(1, -1)
        chain = Draft.guess(ids, Tree.chain(len(path)), torch.ones_like(ids, dtype=torch.bool))
        tokens, probs = model.score(chain).distribution(torch.tensor([len(path)])).top(width)
        for token, prob in zip(tokens[0].tolist(), probs[0].tolist(), strict=True):
            heapq.heappush(frontier, (value - math.log(prob), (*path, token)))
    del found[()]
    return found


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_best_first_finds_the_most_probable_tree(batch: int) -> None:
    prompts = [[0, 1], [3], [4, 2, 1]]
    model = TableTarget(5, seed=7, sharpness=2.0)
    drafter = SpecExec(model, nodes=20, batch=batch, width=3, passes=100)
    drafter.begin(Prefill(), prompts, Sampling())
    draft = drafter.propose(torch.tensor([50, 50, 50]), CounterRNG.of(0, 3))
    assert draft.size == 20 and draft.belief is not None
    for row, prompt in enumerate(prompts):
        paths: list[tuple[int, ...]] = []
        for parent, token in zip(draft.tree.parents[row].tolist(), draft.tokens[row].tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        wanted = best_nodes(TableTarget(5, seed=7, sharpness=2.0), prompt, 20, 3)
        assert set(paths) == set(wanted)
        for path, belief in zip(paths, draft.belief[row].tolist(), strict=True):
            assert belief == pytest.approx(math.exp(wanted[path]), rel=1e-9)


@pytest.mark.slow
def test_a_thousand_nodes_in_one_pass() -> None:
    """The model is the target, so one target pass emits as many tokens as the tree is deep."""
    model = TableTarget(50, seed=2, sharpness=6.0)
    drafter = SpecExec(model, nodes=1024, batch=256, width=8, passes=6)
    target = TableTarget(50, seed=2, sharpness=6.0)
    steps = list(decode(target, drafter, Exact(), [[1, 2, 3]], sampling=Sampling(temperature=0), max_new_tokens=40))
    assert max(len(step.drafted) for step in steps) == 1024
    plain = list(decode(target, None, Exact(), [[1, 2, 3]], sampling=Sampling(temperature=0), max_new_tokens=40))
    assert [t for step in steps for t in step.emitted] == [t for step in plain for t in step.emitted]
    assert len(steps) < 12


def test_room_bounds_the_depth() -> None:
    drafter = SpecExec(TableTarget(5, seed=7), nodes=30, batch=4, width=3, passes=50)
    drafter.begin(Prefill(), [[1], [2]], Sampling())
    draft = drafter.propose(torch.tensor([2, -1]), CounterRNG.of(0, 2))
    assert int((draft.tree.depths[0] + 1)[draft.live[0]].max()) == 2
    assert not draft.live[1].any()
