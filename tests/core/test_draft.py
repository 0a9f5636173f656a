"""Drafts stacked or selected row by row: each row stays unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Distribution, Sampling
from outrider.core.draft import Draft, Outcome, forced, select, stack
from outrider.core.drafters.per_row import PerRow
from outrider.core.late_guess import _shortened, extended
from outrider.core.methods import make_drafter, make_rule
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Trace
from outrider.core.tree import Tree

WORDS = 7
NARROW = Distribution(torch.tensor([[[0.5, 0.5], [0.25, 0.75]]]), torch.tensor([[[1, 2], [3, 4]]]), WORDS)
WIDE = Distribution(torch.full((1, 2, WORDS), 1 / WORDS), None, WORDS)


def fixed(*tokens: int, parents: tuple[int, ...] | None = None, **more: Any) -> Draft:
    tree = Tree.chain(len(tokens)) if parents is None else Tree.of(parents)
    made = Draft.guess(torch.tensor([tokens]), tree, torch.ones(1, len(tokens), dtype=torch.bool))
    return replace(made, **more)


def drawn(distribution: Distribution) -> Draft:
    return Draft.drawn(torch.tensor([[1, 4]]), distribution, torch.ones(1, 2, dtype=torch.bool))


def same_row(whole: Draft, row: int, one: Draft) -> None:
    size = one.size
    assert whole.live[row, :size].tolist() == one.live[0].tolist() and not whole.live[row, size:].any()
    assert whole.tokens[row, :size].tolist() == one.tokens[0].tolist()
    parents = whole.tree.parents.expand(whole.rows, -1)[row, :size]
    assert parents.tolist() == one.tree.parents[0].tolist()
    assert whole.fixed[row, :size].tolist() == one.fixed[0].tolist()
    assert whole.tried[row, :size].tolist() == one.tried[0].tolist()
    assert whole.offsets.expand(whole.rows, -1)[row, :size].tolist() == one.offsets[0].tolist()
    if one.distributions is not None:
        assert whole.distributions is not None and whole.source is not None and one.source is not None
        mine = whole.distributions.dense().probs[row][whole.source[row, :size]]
        assert torch.equal(mine, one.distributions.dense().probs[0][one.source[0]])
    if one.belief is not None:
        assert whole.belief is not None and torch.equal(whole.belief[row, :size].double(), one.belief[0].double())


@pytest.mark.parametrize("distribution", [NARROW, WIDE], ids=["narrow", "wide"])
def test_drafts_of_rows_are_stacked(distribution: Distribution) -> None:
    drafts = [
        drawn(distribution),
        fixed(3, 5, 6, belief=torch.tensor([[0.5, 0.25, 0.1]]), note=("who",)),
        drawn(NARROW),
        fixed(2, 2, 6, 1, parents=(-1, -1, 0, 1), probe=torch.tensor([[False, False, True, True]])),
        fixed(1, 8, positions=torch.tensor([[1, 5]]), embeddings=torch.ones(1, 3)),
        Draft.empty(1),
    ]
    whole = stack(drafts)
    for row, one in enumerate(drafts):
        same_row(whole, row, one)
    assert whole.note == ("", "who", "", "", "", "") and whole.mixed
    assert whole.fresh is not None and whole.fresh.tolist() == [True, False, True, False, False, False]
    assert whole.embeddings is not None and whole.embeddings.shape == (1, 3)
    assert not stack([drawn(distribution), drawn(distribution)]).mixed and not stack([fixed(1, 2), fixed(3)]).mixed


def test_drafts_are_selected_row_by_row() -> None:
    drafts = [drawn(WIDE), fixed(3, 5, 6, note=("who",)), drawn(NARROW)]
    rows = [Draft.empty(3)] + [stack([one, one, one]) for one in drafts]
    whole = select(rows, torch.tensor([1, 2, 3]))
    for row, one in enumerate(drafts):
        same_row(whole, row, one)
    assert whole.note == ("", "who", "")
    nobody = select([Draft.empty(2), Draft.empty(2)], torch.tensor([0, 1]))
    assert nobody.size == 0 and nobody.rows == 2


def test_a_selected_guess_that_was_not_drawn_stays_so() -> None:
    mixed, drawn_ = stack([drawn(WIDE), fixed(2, 3)]), stack([drawn(NARROW), drawn(NARROW)])
    chosen = select([drawn_, mixed], torch.tensor([0, 1]))
    assert chosen.source is not None and chosen.source[1].tolist() == [-1, -1]
    assert chosen.fixed[1].all() and not chosen.fixed[0].any()


def test_known_tokens_are_a_chain_as_long_as_the_longest_row() -> None:
    draft, verdict, _ = forced([[5, 6, 7], [8]], torch.device("cpu"))
    assert draft.size == 2 and draft.live.tolist() == [[True, True], [False, False]]
    assert verdict.rows(draft) == [[5, 6, 7], [8]] and draft.tokens.dtype == torch.long


def test_a_verdict_says_what_each_row_kept() -> None:
    _, verdict, _ = forced([[5, 6, 7], [8]], torch.device("cpu"))
    assert verdict.results() == [(2, 7), (0, 8)]
    assert replace(verdict, outcome=Outcome([[5, 6], []], [[0], []], [2, 0])).results() == [(1, 6), (0, -1)]
    assert replace(verdict, count=None).kept(torch.tensor([1, 0])).tolist() == [3, 0]


def test_of_a_chain_with_a_late_guess_that_guess_alone_was_drawn() -> None:
    draft, last = fixed(1, 2, 3), torch.tensor([2])
    late = Draft.drawn(torch.tensor([[4]]), WIDE.rows(torch.tensor([[0]])), torch.ones(1, 1, dtype=torch.bool))
    longer = extended(draft, late, last)
    assert longer.tokens.tolist() == [[1, 2, 4, 0]] and longer.source is not None
    assert longer.source.tolist() == [[-1, -1, 2, -1]]
    short = replace(draft, live=torch.tensor([[True, True, False]]))
    _, accepted, _ = forced([[1, 2, 4, 6]], torch.device("cpu"))
    found = _shortened(replace(accepted, tried=torch.ones(1, 4, dtype=torch.bool)), short, late, last)
    assert (found.accepted.tolist(), found.token.tolist()) == ([2], [4])
    assert found.tried.tolist() == [[True, True, False]] and found.path.tolist() == [[0, 1, -1]]


def test_kinds_of_siblings_are_not_mixed() -> None:
    other = replace(drawn(WIDE), replacement=True)
    for join in (stack, lambda both: select(both, torch.tensor([0]))):
        with pytest.raises(ValueError, match="with and without replacement"):
            join([drawn(WIDE), other])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sampled-tree", {"model": TableTarget(WORDS, blur=0.2)}),
        ("draft-model", {"model": TableTarget(WORDS, blur=0.2), "length": 3}),
        ("jacobi", {"window": 3}),
        ("lookahead", {}),
        ("suffix", {}),
        ("token-recycling", {}),
    ],
)
def test_rows_with_their_own_drafters_give_the_plain_output(name: str, options: dict[str, Any]) -> None:
    target, prompts = TableTarget(WORDS, sharpness=2.0), [[1, 2, 1, 2], [3], [4, 5, 6, 4, 5]]

    def said(drafter: Any) -> list[tuple[int, ...]]:
        steps = decode(
            target,
            drafter,
            make_rule("gumbel-match"),
            prompts,
            sampling=Sampling(temperature=1),
            max_new_tokens=24,
            seed=5,
        )
        trace = Trace(tuple(steps))
        return [trace.tokens(row) for row in range(len(prompts))]

    def make() -> Any:
        return make_drafter(name, **options)

    assert said(PerRow(make)) == said(None) == said(make())


def test_a_choice_among_drafts_without_notes_has_none() -> None:
    drafts = [Draft.guess(torch.tensor([[token]]), Tree.chain(1), torch.tensor([[True]])) for token in (1, 2)]
    assert select(drafts, torch.tensor([1])).note is None
    assert select([replace(drafts[0], note=("a",)), drafts[1]], torch.tensor([0])).note == ("a",)
