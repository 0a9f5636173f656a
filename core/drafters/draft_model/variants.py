"""The chain of a draft model under names of its own, for what is special about when it stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.length_policies import AcceptanceHead, Best, Confidence, Policy, Risk, Window
from outrider.core.errors import unknown
from outrider.core.protocol import Target


def specdec_pp(
    model: Target,
    head: Callable[[Tensor], Tensor] | Mapping[str, Tensor],
    *,
    threshold: float = 0.7,
    length: int = 16,
    tap: str | None = "last",
    sampling: Sampling | None = None,
) -> DraftModel:
    """SpecDec++ (arXiv 2405.19715): a trained head says how likely the draft model's next token is to be accepted, and
    drafting stops where the risk of a rejection passes the threshold. `head` is an AcceptanceHead, its tensors, or any
    function of the state at `tap`; see outrider.core.drafters.length_policies.Risk."""
    made = head if callable(head) else AcceptanceHead(head)
    return DraftModel(model, policy=Risk(length, made, threshold, tap), sampling=sampling)


def bild(model: Target, *, fallback: float = 0.5, length: int = 12, sampling: Sampling | None = None) -> DraftModel:
    """BiLD's drafting (arXiv 2302.07863): the small model runs until it is unsure, its likeliest token being less
    likely than `fallback`, and the big one takes over. With the rule `bild` it rolls back only where the two disagree
    much, as in the paper; with an exact rule nothing is lost. The paper's small model decodes greedily; ours draws."""
    return DraftModel(model, policy=Confidence(length, fallback), sampling=sampling)


def on_the_fly_window(
    model: Target,
    *,
    by: str = "best",
    length: int = 5,
    most: int = 16,
    cost: float = 0.1,
    sampling: Sampling | None = None,
) -> DraftModel:
    """The window follows what was accepted: `best` takes the length that is predicted to be the fastest for the
    acceptance seen lately, a drafted token costing `cost` target passes ("A Drop-in Solution for On-the-Fly Adaptation
    of Speculative Decoding in Large Language Models", 2024; its model of throughput is the published formula here);
    `steps` grows it by two when all was accepted and shrinks it by one when not, as transformers does."""
    if by not in ("best", "steps"):
        raise unknown("way to adapt the window", by, ("best", "steps"))
    policy: Policy = Best(length, cost, most=most) if by == "best" else Window(length, most)
    return DraftModel(model, policy=policy, sampling=sampling)
