"""Drafting ahead: how often outcomes are hit, and in which thread. The conformance suite checks the distributions."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Distribution, Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.overlapped import Overlapped
from outrider.core.errors import InvalidOption
from outrider.core.methods import make_rule
from outrider.core.protocol import Scores
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step
from outrider.core.tree import Tree

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


def test_the_geometric_fan_out_shares_the_outcomes_as_the_paper_derives() -> None:
    rate, r, length = 0.8, 0.5, 3
    drafter = Overlapped(TableTarget(40), length=length, outcomes=24, fan_out="geometric", exponent=r)
    drafter._rate = torch.tensor([[rate]], dtype=torch.float64)
    draft = Draft.guess(torch.tensor([[1, 2, 3]]), Tree.chain(length), torch.ones(1, length, dtype=torch.bool))
    logits = torch.randn(1, length + 1, 40, generator=torch.Generator().manual_seed(0))
    at, token = drafter._likely(draft, logits)
    counts = torch.bincount(at[0], minlength=length + 1).tolist()
    share = [rate ** (k / (1 + r)) for k in range(length)]
    share.append(rate ** (length / (1 + r)) * (1 - rate) ** (-1 / (1 + r)))  # the cap: nothing follows it
    assert sum(counts) == 24
    for count, wanted in zip(counts, share, strict=True):
        assert abs(count - 24 * wanted / sum(share)) < 1.5, (counts, share)
    for k in range(length):  # the likeliest tokens, without the one that was rejected
        best = [t for t in logits[0, k].argsort(descending=True).tolist() if t != k + 1]
        assert set(token[0][at[0] == k].tolist()) == set(best[: counts[k]])


def test_downscaled_draws_make_what_follows_a_rejection_predictable() -> None:
    """(p - q)+ has more of its mass on the tokens that are prepared for."""
    drafter = Overlapped(TableTarget(40), width=3, downscale=0.4)
    contexts = torch.arange(50)[None]
    p, q = (torch.softmax(TableTarget(40, sharpness=2).logits(contexts, blur), -1) for blur in (0.0, 0.3))
    known = q.topk(3).indices

    def predictable(drawn: torch.Tensor) -> torch.Tensor:
        left = (p - drawn).clamp(min=0)
        return left.gather(-1, known).sum(-1) / left.sum(-1)

    lower = drafter._downscaled(Distribution(q, None, 40)).probs
    assert torch.allclose(lower.sum(-1), torch.ones(1, 50, dtype=lower.dtype))
    assert bool((predictable(lower) >= predictable(q) - 1e-9).all())
    assert predictable(lower).mean() > predictable(q).mean() + 0.1


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(InvalidOption, match="at most length"):
        Overlapped(TableTarget(9), length=2, first_length=3)
    with pytest.raises(InvalidOption, match="1 or more"):
        Overlapped(TableTarget(9), outcomes=0)
    with pytest.raises(InvalidOption, match="downscale above 0"):
        Overlapped(TableTarget(9), downscale=0)
    with pytest.raises(InvalidOption, match="fan_out"):
        Overlapped(TableTarget(9), fan_out="wide")


def test_errors_of_drafting_ahead_are_raised() -> None:
    class Broken(Overlapped):
        def draft_ahead(self, draft: Draft) -> None:
            raise RuntimeError("lost")

    target = TableTarget(9)
    steps = decode(target, Broken(TableTarget(9)), make_rule("exact"), [[1]], max_new_tokens=5)
    with pytest.raises(RuntimeError, match="lost"):
        next(steps)
    assert torch.is_grad_enabled()
