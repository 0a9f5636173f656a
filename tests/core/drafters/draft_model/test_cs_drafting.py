"""Cascades: the draft model's own draws with fewer of its passes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.cs_drafting import CSDrafting
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Drafter, Scores
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import Case, enumerate_output, target_distribution, total_variation
from outrider.core.testing.table_target import TableTarget

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [0, 4], [2]]


class Counting(TableTarget):
    """Counts its passes."""

    passes = 0

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        self.passes += 1
        return super().score(draft, since)


def run(drafter: Drafter, sampling: Sampling, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, ...]]:
    steps = decode(TableTarget(5, seed=3), drafter, Exact(), prompts, sampling=sampling, max_new_tokens=40, seed=9)
    return [step.drafted + step.emitted for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_p=0.7), Sampling(top_k=2)])
@pytest.mark.parametrize("others", [0, 1])
def test_a_vertical_cascade_draws_what_the_model_alone_draws(sampling: Sampling, others: int) -> None:
    """Identical for every seed, whatever the stages below guess."""
    alone, first = Counting(5, seed=3, blur=0.3), Counting(5, seed=3, blur=0.3)
    below = [TableTarget(5, seed=3, blur=0.35) for _ in range(others)]
    cascade = CSDrafting(first, other_models=below, lengths=(4, *[0] * (others + 1)), inner_length=3)
    assert run(cascade, sampling) == run(DraftModel(alone, length=4), sampling)
    if others or sampling.greedy:
        assert first.passes < alone.passes


def test_later_positions_are_left_to_cheaper_stages() -> None:
    model, other = Counting(5, seed=3, blur=0.3), TableTarget(5, seed=3, blur=0.5)
    drafter = CSDrafting(model, other_models=[other], lengths=(2, 2, 2), inner_length=2)
    steps = list(decode(TableTarget(5, seed=3), drafter, Exact(), PROMPTS, max_new_tokens=30, seed=1))
    full = [step for step in steps if len(step.drafted) == 6]
    assert full and all(step.fixed == (False,) * 4 + (True,) * 2 for step in full)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (0, 2, 0), (2, 0, 1)])
def test_every_cascade_keeps_the_distribution(lengths: tuple[int, ...]) -> None:
    def cascade() -> Drafter:
        models = [TableTarget(3, seed=1, sharpness=0.7, blur=blur) for blur in (0.4, 0.6)]
        return CSDrafting(models[0], other_models=models[1:], lengths=lengths, inner_length=2, max_ngram=2)

    prompts = [(0, 1), (2, 1, 0, 1)]
    case = Case(
        target=lambda: TableTarget(3, seed=1, sharpness=0.7),
        drafter=cascade,
        rule=Exact(),
        prompts=prompts,
        limits=(3, 2),
    )
    for row, distribution in enumerate(enumerate_output(case)):
        wanted = target_distribution(TableTarget(3, seed=1, sharpness=0.7), prompts[row], Sampling(), case.limits[row])
        assert total_variation(distribution, wanted) < 1e-12


def test_a_lenient_model_takes_guesses_that_it_would_not_have_drawn() -> None:
    """As fixed guesses, and with fewer of its passes for each drafted token."""
    passes, fixed = [], []
    for lenience in (1.0, 20.0):
        model = Counting(5, seed=3, blur=0.3)
        drafter = CSDrafting(model, lengths=(4, 0), inner_length=3, lenience=lenience)
        steps = list(decode(TableTarget(5, seed=3), drafter, Exact(), PROMPTS[:1], max_new_tokens=60, seed=1))
        passes.append(model.passes / sum(len(step.drafted) for step in steps))
        fixed.append(sum(sum(step.fixed) for step in steps))
    assert passes[1] < passes[0] and fixed[0] == 0 < fixed[1]


def test_invalid_cascades_are_refused() -> None:
    with pytest.raises(InvalidOption, match="2 lengths"):
        CSDrafting(TableTarget(5), lengths=(1, 2, 3))
    with pytest.raises(Incompatible, match="vocabularies of"):
        CSDrafting(TableTarget(5), other_models=[TableTarget(6)])
