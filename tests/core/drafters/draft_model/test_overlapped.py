"""Drafting ahead: how often outcomes are hit, and in which thread. The conformance suite checks the distributions."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.overlapped import Overlapped, pearl
from outrider.core.errors import InvalidOption
from outrider.core.methods import make_rule
from outrider.core.protocol import Scores
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step

PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5]]


class Watched(TableTarget):
    """A table that records the threads that call score()."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.threads: list[str] = []

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        self.threads.append(threading.current_thread().name)
        return super().score(draft, since)


def run(drafter: Overlapped, sampling: Sampling, prompts: list[list[int]] = PROMPTS, limit: int = 60) -> list[Step]:
    target = TableTarget(40, seed=5, sharpness=2)
    return list(decode(target, drafter, make_rule("exact"), prompts, sampling=sampling, max_new_tokens=limit))


def test_a_perfect_model_always_hits_and_drafts_only_ahead() -> None:
    model = Watched(40, seed=5, sharpness=2)
    drafter = Overlapped(model, length=3)
    steps = run(drafter, Sampling(temperature=0))
    assert drafter.hits == drafter.tries and drafter.tries > 20
    assert all(step.accepted == 3 for step in steps if step.index and step.finish is None)
    here = [name for name in model.threads if not name.startswith("outrider-side")]
    assert len(here) == 3, "the first draft, and no other, was drawn while nobody verified"
    assert {step.note for step in steps if step.index and step.drafted} == {"prepared"}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.7, top_k=8)])
def test_more_outcomes_hit_more_often(sampling: Sampling) -> None:
    rates = []
    for outcomes, width in ((1, 1), (4, 2), (12, 4)):
        drafter = Overlapped(TableTarget(40, seed=5, sharpness=2, blur=0.3), length=3, outcomes=outcomes, width=width)
        run(drafter, sampling, limit=60)
        rates.append(drafter.hits / drafter.tries)
    assert 0 < rates[0] < rates[1] < rates[2] < 1, rates


def test_pearl_verifies_its_first_guess_alone_after_a_miss() -> None:
    drafter = pearl(TableTarget(40, seed=5, sharpness=2, blur=0.3), length=4)
    steps = run(drafter, Sampling(temperature=0), [[1, 2, 3]], limit=100)
    sizes = {"prepared": set[int](), "": set[int]()}
    for step in steps[:-4]:
        sizes[step.note].add(len(step.drafted))
    assert sizes == {"prepared": {4}, "": {1}}
    assert 0 < drafter.hits < drafter.tries


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(InvalidOption, match="at most length"):
        Overlapped(TableTarget(9), length=2, first_length=3)
    with pytest.raises(InvalidOption, match="1 or more"):
        Overlapped(TableTarget(9), outcomes=0)


def test_errors_of_drafting_ahead_are_raised() -> None:
    class Broken(Overlapped):
        def draft_ahead(self, draft: Draft) -> None:
            raise RuntimeError("lost")

    target = TableTarget(9)
    steps = decode(target, Broken(TableTarget(9)), make_rule("exact"), [[1]], max_new_tokens=5)
    with pytest.raises(RuntimeError, match="lost"):
        next(steps)
    assert torch.is_grad_enabled()
