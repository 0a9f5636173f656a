"""Logits to distributions, against plain restatements; the random generator; policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outrider.core.distribution import Distribution, LogitsPipeline, Sampling, residual, to_distribution
from outrider.core.draft import Draft
from outrider.core.drafters.length_policies import Confidence, Window
from outrider.core.errors import InvalidOption
from outrider.core.kernels.topk import argmax
from outrider.core.rng import CounterRNG, Purpose, mix
from outrider.core.tree import Tree


def reference(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """One row, the slow way: sort, cut, renormalise, in the order temperature, top-k, top-p, min-p."""
    if sampling.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    order = np.argsort(-logits, kind="stable")
    keep = np.ones(len(logits), dtype=bool)
    if sampling.top_k:
        keep[order[sampling.top_k :]] = False
    heat = sampling.temperature
    if sampling.entropy_aware:
        distribution = np.where(keep, np.exp(logits - logits.max()), 0)
        heat *= 2.5 * np.exp(-stats.entropy(distribution / distribution.sum()) / 3) + 0.6
    p = np.exp((logits - logits.max()) / heat)
    p = np.where(keep, p, 0) / p[keep].sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    p /= p.sum()
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.6),
    Sampling(top_k=7),
    Sampling(top_p=0.7),
    Sampling(top_p=0.999),
    Sampling(min_p=0.2),
    Sampling(temperature=1.7, top_k=20, top_p=0.8, min_p=0.05),
    Sampling(entropy_aware=True),
    Sampling(temperature=0.8, top_k=9, entropy_aware=True),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("vocabulary", [11, 3000])
def test_laws_are_what_the_options_say(sampling: Sampling, vocabulary: int) -> None:
    logits = np.random.default_rng(0).normal(size=(4, vocabulary)) * 2
    distribution = to_distribution(torch.from_numpy(logits), sampling)
    dense = distribution.dense().probs.numpy()
    for row in range(4):
        np.testing.assert_allclose(dense[row], reference(logits[row], sampling), atol=1e-12)
    tokens = torch.arange(vocabulary).expand(4, -1)
    np.testing.assert_allclose(distribution.at(tokens).numpy(), dense, atol=1e-15)
    assert distribution.at(torch.tensor([[-1, vocabulary]]).expand(4, -1)).sum() == 0
    np.testing.assert_allclose(distribution.entropy().numpy(), [stats.entropy(row) for row in dense], atol=1e-9)


def test_a_flat_law_has_its_nucleus_too() -> None:
    for shape in ((1, 5000), (1, 3, 5000)):  # of a row, and of the nodes of a draft
        probs = to_distribution(torch.zeros(shape), Sampling(top_p=0.5)).dense().probs
        assert ((probs > 0).sum(-1) - 2500).abs().max() <= 2


@pytest.mark.parametrize("count", [3, 8, 40])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=5)])
def test_the_likeliest_tokens_come_best_first(count: int, sampling: Sampling) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 2, 2000)))
    tokens, probs = to_distribution(logits, sampling).top(count)
    order = logits.argsort(-1, descending=True)[..., :count]
    there = min(count, sampling.top_k or count)
    assert torch.equal(tokens[..., :there], order[..., :there])
    assert bool((tokens[..., there:] == -1).all()) and bool((probs.diff(dim=-1) <= 0).all())


@given(st.integers(0, 10_000), st.booleans(), st.booleans())
def test_what_is_left_after_a_rejection(seed: int, sparse_p: bool, sparse_q: bool) -> None:
    """q f + (1 - sum q f) residual = p for the strict f, whatever the two distributions are stored as."""
    random = np.random.default_rng(seed)
    p = to_distribution(torch.from_numpy(random.normal(size=(2, 9)) * 2), Sampling(top_k=4 if sparse_p else 0))
    q = to_distribution(torch.from_numpy(random.normal(size=(2, 9)) * 2), Sampling(top_k=5 if sparse_q else 0))
    left = residual(p, q.on(p)).dense().probs
    both = torch.minimum(p.dense().probs, q.dense().probs)
    torch.testing.assert_close(both + (1 - both.sum(-1, keepdim=True)) * left, p.dense().probs, atol=1e-12, rtol=0)
    same = residual(p, p.probs)
    torch.testing.assert_close(same.probs, p.probs)


def test_striking_out_and_rows() -> None:
    distribution = Distribution(torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.9, 0.0]]]), None, 3)
    struck = distribution.without(torch.tensor([[0, 1]]), torch.tensor([[True, False]]))
    torch.testing.assert_close(struck.probs, torch.tensor([[[0.0, 0.6, 0.4], [0.1, 0.9, 0.0]]]))
    sure = Distribution.point(torch.tensor([2]), 3)
    assert sure.without(torch.tensor([2]), torch.tensor([True])).probs.sum() == 0
    picked = distribution.rows(torch.tensor([[1, 0, 1]]))
    torch.testing.assert_close(picked.probs[0, 0], distribution.probs[0, 1])
    torch.testing.assert_close(
        distribution.at_rows(torch.tensor([[1]]), torch.tensor([[[0, 1]]])), torch.tensor([[[0.1, 0.9]]])
    )


def test_each_token_has_its_probability() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.25]])
    assert torch.equal(Distribution(probs, None, 3).at(torch.arange(3)[None]), probs)
    few = Distribution(probs, torch.tensor([[4, 0, 2]]), 5)
    assert few.at(torch.arange(5)[None]).tolist() == [[0.25, 0, 0.25, 0, 0.5]]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_is_finite(name: str) -> None:
    with pytest.raises(InvalidOption, match=rf"^{name} is inf; it must be finite \(0 is off\)$"):
        Sampling(**{name: float("inf")})


def test_a_token_that_has_just_min_p_of_the_likeliest_stays() -> None:
    law = to_distribution(torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64).log(), Sampling(min_p=0.5))
    torch.testing.assert_close(law.probs, torch.tensor([2 / 3, 1 / 3, 0], dtype=torch.float64))


def test_tokens_that_are_none_have_no_probability() -> None:
    law = Distribution(torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]), None, 2)
    assert law.at_rows(torch.tensor([[1, 0]]), torch.tensor([[[-1, 0], [1, 2]]])).tolist() == [[[0, 0.5], [0.75, 0]]]


def test_penalties_count_prompt_output_and_path() -> None:
    options = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    maker = LogitsPipeline(options, [[0]], 4, torch.device("cpu"))
    maker.commit(torch.tensor([[1, 1, -1]]))
    logits = torch.tensor([[[1.0, 1.0, -1.0, 1.0]]], dtype=torch.float64)
    found = maker.distribution(logits, torch.tensor([[[2, -1]]]))
    # 0: in the prompt; 1: twice in the output; 2: on the path; 3: new
    wanted = torch.tensor([0.5, 0.5 - 0.5 - 0.5, -2.0 - 0.5 - 0.25, 1.0], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(found.probs[0, 0], wanted)


def test_a_row_of_a_pipeline_has_its_own_counts() -> None:
    options = Sampling(repetition_penalty=2.0, presence_penalty=0.5)
    maker = LogitsPipeline(options, [[0], [1, 2]], 4, torch.device("cpu"))
    maker.commit(torch.tensor([[1, 1], [3, -1]]))
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    both = maker.distribution(logits)
    for row in range(2):
        torch.testing.assert_close(maker.row(row).distribution(logits[row : row + 1]).probs, both.probs[row : row + 1])


def test_processors_get_prompt_output_and_path_and_leave_logits_alone() -> None:
    seen: list[list[int]] = []

    def doubled(ids: Tensor, logits: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return logits.mul_(2)

    pipeline = LogitsPipeline(Sampling(processors=(doubled,)), [[0], [3]], 4, torch.device("cpu"))
    pipeline.commit(torch.tensor([[1, 1, -1], [-1, -1, -1]]))
    logits = torch.randn(2, 1, 4, dtype=torch.float64)
    before = logits.clone()
    distribution = pipeline.distribution(logits, torch.tensor([[[2, -1]], [[-1, -1]]]))
    assert seen == [[0, 1, 1, 2], [3]] and torch.equal(logits, before)
    torch.testing.assert_close(distribution.probs, (2 * logits).softmax(-1))
    pipeline.arrange([1, -1, 0])
    pipeline.enter(1, [2])
    seen.clear()
    pipeline.distribution(logits[:1].expand(3, 1, 4))
    pipeline.row(2).distribution(logits[:1])
    assert seen == [[3], [2], [0, 1, 1], [0, 1, 1]]


def test_argmax_takes_the_first_of_equals_in_every_precision() -> None:
    values = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 7.0, 0.0, 0.0]])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert argmax(values.to(dtype)).tolist() == [1, 0]


# ---- random generator


def test_uniforms_are_uniform_and_belong_to_their_row_step_purpose_and_node() -> None:
    rng = CounterRNG.of(5, 3)
    rng.reserve(4096)
    seen: list[Tensor] = []
    for step in range(3):
        rng.at(step)
        seen += [rng.uniform(purpose, torch.arange(4096).expand(3, -1)) for purpose in Purpose]
    values = torch.stack(seen).flatten(0, 1).numpy()  # [streams, 4096]
    assert stats.kstest(values.flatten(), "uniform").pvalue > 1e-3
    assert min(stats.kstest(stream, "uniform").pvalue for stream in values) > 1e-5
    correlation = np.corrcoef(values) - np.eye(len(values))
    assert np.abs(correlation).max() < 5.5 / np.sqrt(4096)
    assert np.abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 5 / np.sqrt(values.size)
    assert values.min() > 0 and values.max() < 1


def test_what_a_number_is_does_not_depend_on_how_many_were_asked_for() -> None:
    one, two = CounterRNG.of([8, 9], 2), CounterRNG.of([9], 1)
    two.reserve(1000)
    node = torch.tensor([[0, 5, 63]])
    assert torch.equal(one.uniform(Purpose.DRAW, node.expand(2, -1))[1:], two.uniform(Purpose.DRAW, node))
    assert not torch.equal(one.fork(1).uniform(Purpose.DRAW, 0), one.uniform(Purpose.DRAW, 0))
    assert mix(1) != mix(2)


def test_a_seed_has_the_same_numbers_in_every_version() -> None:
    rng = CounterRNG.of([7], 1)
    flat = Distribution(torch.full((1, 1000), 1e-3), None, 1000)
    assert [rng.gumbel_argmax(flat, torch.tensor([place])).item() for place in range(4)] == [796, 704, 727, 587]
    rng.at(3)
    bits = (rng.uniform(Purpose.DRAW, torch.arange(4)[None]) * 2**32).long()
    assert bits.tolist() == [[3999250151, 1742356278, 9672281, 2019006263]]


def test_a_row_has_its_numbers_in_any_company() -> None:
    distribution = Distribution(torch.rand(200, 7, generator=torch.Generator().manual_seed(0)), None, 7)
    many, alone = CounterRNG.of(range(200), 200), [CounterRNG.of([seed], 1) for seed in range(200)]
    positions = torch.arange(200)
    raced = many.gumbel_argmax(distribution, positions)
    assert raced.tolist() == [
        one.gumbel_argmax(Distribution(distribution.probs[row : row + 1], None, 7), positions[row : row + 1]).item()
        for row, one in enumerate(alone)
    ]
    for steps in (3, list(range(200))):
        many.at(steps)
        for row, one in enumerate(alone):
            one.at(steps if isinstance(steps, int) else steps[row])
        together = many.uniform(Purpose.ACCEPT, 5)
        assert together.tolist() == [one.uniform(Purpose.ACCEPT, 5).item() for one in alone]


@pytest.mark.parametrize("way", ["sample", "gumbel_argmax"])
def test_draws_have_the_law_they_are_drawn_from(way: str) -> None:
    count = 60_000
    probs = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.0999, 0.0001], dtype=torch.float64)
    distribution = Distribution(probs.expand(1, count, 6), None, 6)
    rng = CounterRNG.of(3, 1)
    rng.reserve(count)
    places = torch.arange(count)[None]
    drawn = (
        rng.sample(distribution, places, Purpose.NEXT) if way == "sample" else rng.gumbel_argmax(distribution, places)
    )
    counts = np.bincount(drawn[0], minlength=6)
    assert counts[1] == 0
    there = probs.numpy() > 0
    assert stats.chisquare(counts[there], probs.numpy()[there] * count).pvalue > 1e-4


def test_a_race_is_the_same_on_a_sparse_law() -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(1, 50, 3000)))
    sparse = to_distribution(logits, Sampling(top_k=40))
    positions = torch.arange(50)[None]
    rng = CounterRNG.of(1, 1)
    assert torch.equal(rng.gumbel_argmax(sparse, positions), rng.gumbel_argmax(sparse.dense(), positions))


# ---- policies


def test_noise_is_finite_where_all_bits_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.core.rng._mix32", lambda value, key: torch.full_like(value, -1))
    law = Distribution(torch.full((1, 1, 4), 0.25), None, 4)
    noise = CounterRNG.of(0, 1).noise(law, torch.zeros(1, 1, dtype=torch.long))
    assert noise.dtype == torch.float32 and noise.isfinite().all() and (noise > 16).all()


def test_lengths_follow_what_was_accepted() -> None:
    window = Window(3, max_length=6)
    window.begin(2, torch.device("cpu"))
    window.learn(torch.tensor([3, 3]), torch.tensor([3, 1]))
    assert window.start().tolist() == [5, 2]
    window.learn(torch.tensor([5, 0]), torch.tensor([5, 0]))
    assert window.start().tolist() == [6, 2]
    distribution = Distribution(torch.tensor([[0.5, 0.5], [0.9, 0.1]]), None, 2)
    assert Confidence(4, threshold=0.6).more(distribution, 0).tolist() == [False, True]
    whole = Confidence(4, threshold=0.8, joint=True)
    whole.begin(2, torch.device("cpu"))
    assert [whole.more(distribution, depth).tolist() for depth in (0, 1, 2, 0)] == [
        [False, True],
        [False, True],
        [False, False],
        [False, True],
    ]


# ---- trees


def test_trees_know_their_shape() -> None:
    tree = Tree.of((-1, -1, 0, 0, 1, 2))
    assert tree is Tree.of((-1, -1, 0, 0, 1, 2))
    assert (tree.depth, tree.width, tree.is_chain) == (3, 2, False)
    assert tree.depths.tolist() == [[0, 0, 1, 1, 1, 2]] and tree.ranks.tolist() == [[0, 1, 0, 1, 0, 0]]
    assert tree.children[0].tolist() == [[0, 1], [2, 3], [4, -1], [5, -1], [-1, -1], [-1, -1], [-1, -1]]
    assert tree.paths[0].tolist()[5] == [0, 2, 5]
    assert Tree.chain(3).is_chain and Tree.chain(0).depth == 0
    dynamic = Tree(tree.parents.expand(2, -1), 5, 3)  # bounds will do
    assert torch.equal(dynamic.ancestors, tree.ancestors.expand(2, -1, -1))
    with pytest.raises(ValueError, match="in order"):
        Tree.of((1, -1))


def test_path_tokens_are_those_on_the_way() -> None:
    draft = Draft.guess(torch.tensor([[7, 8, 9]]), Tree.of((-1, 0, -1)), torch.ones(1, 3, dtype=torch.bool))
    assert draft.path_tokens()[0].tolist() == [[-1, -1], [7, -1], [7, 8], [9, -1]]
