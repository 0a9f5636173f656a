"""Ensembles: which guesses are kept, and how estimates are corrected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.combined.ensemble import Ensemble
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.drafters.parallel_decoding.lookahead import Lookahead
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods import make_drafter
from outrider.core.protocol import Drafter, Prefill
from outrider.core.rng import CounterRNG
from outrider.core.testing.table_target import TableTarget
from outrider.core.tree import Tree

GREEDY = Sampling(temperature=0)


class Fixed:
    """Always the same chain, with the given beliefs."""

    vocabulary, needs, bytes_read = None, frozenset[str](), 0

    def __init__(self, tokens: list[int], beliefs: list[float] | None) -> None:
        self.tokens, self.beliefs = tokens, beliefs

    def begin(self, prefill: Any, prompts: Any, sampling: Any) -> None:
        self.rows = len(prompts)

    def propose(self, room: torch.Tensor, rng: CounterRNG) -> Draft:
        ids = torch.tensor([self.tokens] * self.rows)
        belief = None if self.beliefs is None else torch.tensor([self.beliefs] * self.rows)
        live = torch.arange(len(self.tokens)) < room[:, None]
        return Draft.guess(ids, Tree.chain(len(self.tokens)), live, belief)

    def observe(self, draft: Any, scores: Any, verdict: Any, rng: Any) -> None:
        pass

    def end(self) -> None:
        pass


def numbered(*drafters: Drafter) -> dict[str, Drafter]:
    return {str(number): drafter for number, drafter in enumerate(drafters)}


def merged(ensemble: Ensemble, room: int = 9) -> dict[tuple[int, ...], float]:
    """The path to each guess, and its estimated probability."""
    ensemble.begin(Prefill(), [[1]], GREEDY)
    draft = ensemble.propose(torch.tensor([room]), CounterRNG([0]))
    assert draft.belief is not None
    paths = [tuple(one for one in path if one >= 0) for path in draft.path_tokens()[0, 1:].tolist()]
    return dict(zip(paths, draft.belief[0].tolist(), strict=True))


def test_guesses_that_begin_alike_are_one_and_count_for_more() -> None:
    found = merged(Ensemble(drafters=numbered(Fixed([1, 2], [0.5, 0.3]), Fixed([1, 3], [0.5, 0.3])), min_probability=0))
    assert {*found} == {(1,), (1, 2), (1, 3)}
    alone = merged(Ensemble(drafters=numbered(Fixed([1, 2], [0.5, 0.3])), min_probability=0))
    assert found[(1,)] > alone[(1,)] and found[(1, 2)] == pytest.approx(alone[(1, 2)])


def test_the_likeliest_are_kept_within_the_budget() -> None:
    members = numbered(Fixed([1, 2, 3], [0.9, 0.8, 0.1]), Fixed([5, 6], [0.3, 0.2]))
    assert {*merged(Ensemble(drafters=members, nodes=3, min_probability=0))} == {(1,), (1, 2), (5,)}
    assert {*merged(Ensemble(drafters=members, nodes=9, min_probability=0.5))} == {(1,), (1, 2), (5,)}, "three are free"
    assert {*merged(Ensemble(drafters=members, nodes=9, min_probability=0.5, free=0))} == {(1,), (1, 2)}
    assert {*merged(Ensemble(drafters=members, nodes=9, min_probability=0), room=1)} == {(1,), (5,)}


def test_beliefs_are_corrected_by_what_came_out(say: Any) -> None:
    text = [1, 2] * 20  # one drafter is right and shy, the other wrong and bold
    shy, bold = Fixed([1, 2], [0.3, 0.2]), Fixed([9, 9], [0.9, 0.9])
    ensemble = Ensemble(drafters=numbered(shy, bold), nodes=2, min_probability=0)
    (steps,) = say(ensemble, [[30]], [text])
    assert steps[0].drafted == (9, 9) and steps[-3].drafted == (1, 2)


def test_an_ensemble_is_above_either_alone(say: Any) -> None:
    prompt = [40, 41, 42, 43, 44, 45, 46, 50]
    text = [40, 41, 42, 43, 44, 45, 46, *[3, 9, 9, 4] * 3, 41, 42, 43, 44, 45, 46]

    def steps(*drafters: str) -> int:
        return len(say(make_drafter("ensemble", drafters=drafters, nodes=8), [prompt], [text])[0])

    assert steps("suffix", "token-recycling") <= min(steps("suffix"), steps("token-recycling"))


@pytest.mark.parametrize("drafter", [Jacobi(), Lookahead()])
def test_who_needs_a_draft_of_his_own_is_refused(drafter: Any) -> None:
    with pytest.raises(Incompatible, match="its own draft"):
        Ensemble(drafters=numbered(drafter))


def test_drawn_guesses_are_refused() -> None:
    model = TableTarget(8)
    ensemble = Ensemble(drafters=numbered(DraftModel(model)))
    ensemble.begin(Prefill(), [[1]], Sampling())
    with pytest.raises(Incompatible, match="draws its guesses"):
        ensemble.propose(torch.tensor([4]), CounterRNG([0]))


def test_members_of_two_vocabularies_are_refused() -> None:
    with pytest.raises(Incompatible, match="made for one"):
        Ensemble(drafters=numbered(DraftModel(TableTarget(8)), DraftModel(TableTarget(9))))


@pytest.mark.parametrize("options", [{"drafters": {}}, {"nodes": 0}, {"min_probability": 2}, {"free": -1}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Ensemble(**{"drafters": numbered(Fixed([1], None)), **options})


def test_members_take_their_own_options_by_name() -> None:
    ensemble = make_drafter("ensemble", drafters=("suffix", "prompt-lookup"), options={"suffix": {"nodes": 3}})
    assert isinstance(ensemble, Ensemble) and ensemble.drafters[0].nodes == 3  # type: ignore[attr-defined]
    with pytest.raises(InvalidOption, match="unknown option of the drafter 'suffix'"):
        make_drafter("ensemble", drafters=("suffix",), options={"suffix": {"depht": 3}})
