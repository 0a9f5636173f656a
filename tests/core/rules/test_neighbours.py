"""Rules for tokens with near-twins: what each costs, against what its paper's procedure would emit."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from outrider.core.distribution import Distribution, LogitsPipeline, Sampling, residual
from outrider.core.draft import Draft
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules import neighbours
from outrider.core.rules.codebook import Annealed
from outrider.core.rules.neighbours import AdditiveBeta, CoarseGroups, Tolerance, TopKMembership
from outrider.core.rules.relaxed import Lenience
from outrider.core.tree import Tree

P = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0]], dtype=torch.float64)
TOP = torch.zeros(1, 1, dtype=torch.long)  # the depth below the root
Q = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2]], dtype=torch.float64)


@pytest.mark.parametrize("tau", [1, 2, 3])
@pytest.mark.parametrize("guess", [0, 2])
def test_tolerance_emits_what_tau_draws_would(tau: int, guess: int) -> None:
    p = P[0]
    drawn = torch.zeros_like(p)  # every outcome of tau draws: the guess if it is among them, else the first
    for draws in itertools.product(range(5), repeat=tau):
        drawn[guess if guess in draws else draws[0]] += p[list(draws)].prod()
    q = torch.zeros_like(P)
    q[0, guess] = 1
    chance = Tolerance(tau=tau).accept(Distribution(P, None, 5), P, q, TOP)[0]
    rest = (p - q[0] * chance).clamp(min=0)
    emitted = q[0] * chance + (1 - (q[0] * chance).sum()) * rest / rest.sum()
    torch.testing.assert_close(emitted, drawn, rtol=0, atol=1e-12)
    total_variation = 1 - p[guess] - (1 - p[guess]) ** tau
    assert abs((emitted - p).clamp(min=0).sum() - total_variation) < 1e-12


def test_nothing_excluded_is_accepted() -> None:
    for rule in (Tolerance(), AdditiveBeta(beta=0.4), TopKMembership(k=5), CoarseGroups(embeddings=torch.ones(5, 2))):
        chance = rule.accept(Distribution(P, None, 5), P, Q, TOP)[0]
        assert chance[4] == 0 and chance[:4].min() > 0


def test_groups_of_twins_are_judged_together() -> None:
    embeddings = torch.tensor([[1.0, 0], [1, 0.01], [0, 1], [0.01, 1], [-1, -1]])
    chance = CoarseGroups(embeddings=embeddings, similarity=0.9).accept(Distribution(P, None, 5), P, Q, TOP)[0]
    torch.testing.assert_close(chance, torch.tensor([1, 1, 0.6, 0.6, 0], dtype=torch.float64))
    alone = CoarseGroups(embeddings=embeddings, similarity=1.1)
    assert alone.lossless
    torch.testing.assert_close(alone.accept(Distribution(P, None, 5), P, Q, TOP), (P / Q).clamp(max=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_large_vocabularies_are_sparse_tables(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    size = 300
    embeddings = torch.randn(size, 6)
    embeddings[::5] = 0  # tokens that are no codes
    left, q = torch.rand(2, 4, size, dtype=dtype).div(size / 2)
    made = partial(CoarseGroups, embeddings=embeddings, similarity=0.7)
    whole = made().accept(Distribution(left, None, size), left, q, TOP)
    monkeypatch.setattr(neighbours, "_DENSE", 8)
    monkeypatch.setattr(neighbours, "_COMPARED", 4000)
    rule = made()
    torch.testing.assert_close(rule.accept(Distribution(left, None, size), left, q, TOP), whole)
    ((near, groups),) = rule._tables.values()
    assert near.is_sparse and (groups[::5] == 1).all() and groups.max() > 1
    monkeypatch.setattr(neighbours, "_MOST", 1000)
    with pytest.raises(InvalidOption, match="give a larger similarity"):
        made().accept(Distribution(left, None, size), left, q, TOP)
    with pytest.raises(InvalidOption, match="similarity is 0; it must be above 0"):
        CoarseGroups(embeddings=embeddings, similarity=0)


@pytest.mark.slow
def test_groups_of_16384_codes_take_little_memory() -> None:
    """A grid of seven axes, whose codes are similar to those one step away."""
    unit = torch.nn.functional.normalize(torch.cartesian_prod(*[torch.arange(4) - 1.5] * 7), dim=1)
    rule, p = CoarseGroups(embeddings=unit, similarity=0.95), torch.rand(2, 4**7)
    chance = rule.accept(Distribution(p, None, 4**7), p, p.flip(1), TOP)
    ((near, groups),) = rule._tables.values()
    assert int(groups.sum()) == near._nnz() < 60 * 4**7
    some = torch.arange(0, 4**7, 1021)
    assert torch.equal(groups[some], (unit[some] @ unit.T >= 0.95).sum(1).float())
    assert chance.shape == p.shape and chance.min() > 0 and chance.max() <= 1


def test_a_rejection_by_top_k_draws_from_the_top_k_and_ends_strictly() -> None:
    """The guess is outside of the top k: what follows is never another such token, nor an end token above its share."""
    rows = 3000
    logits, rule = P.clamp(min=1e-300).log().expand(rows, 2, 5), TopKMembership(k=2)
    for end, wanted in (((), [4 / 7, 3 / 7, 0, 0, 0]), ((3,), [0.9 * 4 / 7, 0.9 * 3 / 7, 0, 0.1, 0])):
        live = torch.ones(rows, 1, dtype=torch.bool)
        draft = Draft.guess(torch.full((rows, 1), 2), Tree.chain(1), live)
        pipeline = LogitsPipeline(Sampling(end=end), [[0]] * rows, 5, P.device)
        verdict = rule(
            draft, Scores(draft, pipeline, torch.ones(rows, dtype=torch.long), logits), CounterRNG.of(0, rows)
        )
        assert not verdict.accepted.any()
        shares = torch.bincount(verdict.token, minlength=5) / rows
        torch.testing.assert_close(shares, torch.tensor(wanted), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "rule",
    [AdditiveBeta(), Lenience(), Tolerance(), Annealed(weight=2.0, length=0)],
    ids=lambda rule: type(rule).__name__,
)
def test_rules_never_stricter_than_exact_have_its_residual(rule: Any) -> None:
    """COOL-SD's first proposition: norm((p - q f)+) is norm((p - q)+), from which the papers of these rules draw."""
    law = Distribution(P, None, 5)
    ours = residual(law, Q, rule.accept(law, P, Q, TOP)).probs
    torch.testing.assert_close(ours, residual(law, Q).probs, rtol=0, atol=1e-12)


def test_options_out_of_range() -> None:
    for make in (lambda: Tolerance(tau=0), lambda: AdditiveBeta(beta=-0.1), lambda: TopKMembership(k=-1)):
        with pytest.raises(InvalidOption, match="exact"):
            make()
    with pytest.raises(InvalidOption, match="embeddings of 3"):
        CoarseGroups(embeddings=torch.eye(3)).accept(Distribution(P, None, 5), P, Q, TOP)
