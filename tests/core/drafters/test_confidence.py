"""Stops that read confidence: at every temperature they read the drafter's softmax at temperature 1."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import DraftModel, DynamicTree
from outrider.core.drafters.length_policies import Confidence, DraftExit, Policy, Risk
from outrider.core.drafters.self_speculative.layer_skip import draft_on_the_fly, draft_verify, swift
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.head_runner import reduced
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS, make_drafter
from outrider.core.protocol import Drafter, Scores
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import Case, enumerate_output, random_draft_head, target_distribution
from outrider.core.testing.conformance import total_variation as distance
from outrider.core.testing.table_target import TableTarget

GREEDY = Sampling(temperature=0)
SAMPLINGS = {"T=0": GREEDY, "T=0.3, top-k 2": Sampling(temperature=0.3, top_k=2)}
PROMPT = [1, 4, 2]


def table(blur: float = 0.0) -> TableTarget:
    return TableTarget(7, seed=3, blur=blur)


def head(inputs: torch.Tensor) -> torch.Tensor:
    """An acceptance head that takes the highest probability, the first feature, at its word."""
    return inputs[:, 0]


def learned(name: str, **options: Any) -> Learned:
    return Learned(random_draft_head(DRAFTERS[name], table()), **options)


# a drafter of each method by the threshold of its stop, between 0 (drafts on) and 1
STOPS: dict[str, Callable[[float], Drafter]] = {
    "bild": lambda t: make_drafter("bild", model=table(0.3), threshold=t, length=6),
    "draft-verify": lambda t: draft_verify(("mlp.0",), length=6, threshold=t),
    "draft-on-the-fly": lambda t: draft_on_the_fly(length=6, threshold=t, skip_ratio=0.5),
    "specdec-plus-plus": lambda t: make_drafter(
        "specdec-plus-plus", model=table(0.3), head=head, tap=None, threshold=min(1 - t, 0.999), length=6
    ),
    "kangaroo": lambda t: learned("kangaroo", length=6, threshold=t),
    "dspark": lambda t: learned("dspark", length=6, risk=min(max(1 - t, 0.001), 0.999)),
    "dynamic-tree": lambda t: DynamicTree(table(0.3), min_probability=t),
    "dynamic-tree, greedy drafter": lambda t: DynamicTree(table(0.3), min_probability=t, sampling=GREEDY),
    "swift": lambda t: swift(threshold=t, bayes_interval=0),
    "eagle2": lambda t: learned("eagle2", draft_kind="dynamic", min_probability=t),
}


def drafted(drafter: Drafter | None, sampling: Sampling) -> tuple[int, list[int]]:
    """The number of tokens drafted, and the output."""
    steps = list(decode(table(), drafter, Exact(), [PROMPT], sampling=sampling, max_new_tokens=12))
    return sum(len(step.drafted) for step in steps), [token for step in steps for token in step.emitted]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", STOPS)
def test_a_stop_reacts_to_its_threshold_at_every_temperature(name: str, sampling: str) -> None:
    (often, one), (seldom, other) = (drafted(STOPS[name](threshold), SAMPLINGS[sampling]) for threshold in (0.01, 0.8))
    assert often > seldom
    if SAMPLINGS[sampling].greedy:
        assert one == other == drafted(None, GREEDY)[1]


POLICIES: dict[str, Callable[[], Policy]] = {
    "confidence": lambda: Confidence(3, threshold=0.45),
    "confidence, the last token too": lambda: Confidence(3, threshold=0.45, last=True),
    "confidence of the whole draft": lambda: Confidence(3, threshold=0.3, last=True, joint=True),
    "draft-exit": lambda: DraftExit(3, threshold=0.45),
    "risk": lambda: Risk(3, 0.6, head, None),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.6, top_k=2), Sampling(temperature=1.5, repetition_penalty=1.4)]
)
def test_a_stop_read_at_another_temperature_than_the_draw_is_exact(name: str, sampling: Sampling) -> None:
    prompt, target = [2, 1], partial(TableTarget, 3, seed=1, sharpness=0.7)
    case = Case(
        target=target,
        drafter=lambda: DraftModel(target(blur=0.4), policy=POLICIES[name]()),
        rule=Exact(),
        prompts=[prompt],
        sampling=sampling,
    )
    assert distance(enumerate_output(case)[0], target_distribution(target(), prompt, sampling, 3)) < 1e-12


def test_the_second_exits_of_kangaroo_and_dspark_are_on_and_other_options_refused() -> None:
    for name, given in (("kangaroo", {"threshold": 0.6}), ("dspark", {"risk": 0.95})):
        usual, same, never = (
            drafted(learned(name, length=6, **options), GREEDY) for options in ({}, given, {"policy": "fixed"})
        )
        assert usual == same and usual[0] < never[0] and usual[1] == never[1]
    for name, options in (
        ("dspark", {"draft_kind": "dynamic", "policy": "confident"}),
        ("dspark", {"threshold": 0.5}),
        ("kangaroo", {"risk": 0.5}),
        ("kangaroo", {"policy": "confident"}),
        ("eagle3", {"threshold": 0.5}),
        ("medusa", {"policy": "confidence"}),
    ):
        with pytest.raises(InvalidOption, match="confiden"):
            learned(name, **options)


def test_confidence_keeps_penalties_and_the_reduced_vocabulary() -> None:
    logits, ids = torch.tensor([[[2.0, 1.0, 0.5]]]), torch.tensor([0, 2, 3])
    options = {"repetition_penalty": 1.5, "presence_penalty": 0.2}
    for words in (None, ids):
        size = 3 if words is None else 5
        pair = [
            Scores(draft, reduced(sampling, [[0]], size, draft.tokens.device, words), torch.tensor([1]), logits)
            for draft in [Draft.empty(1, torch.device("cpu"))]
            for sampling in (Sampling(temperature=0, top_p=0.5, **options), Sampling(**options))
        ]
        torch.testing.assert_close(pair[0].softmax().dense().probs, pair[1].distributions().dense().probs)
        assert pair[0].distributions().width == 1 and pair[0].softmax().dense().probs.shape[-1] == size
