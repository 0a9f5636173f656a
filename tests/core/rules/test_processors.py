"""Penalties and transformers' processors under every drafter, by enumeration against their definition."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.generation import logits_process

from outrider.core.constraint import Automaton
from outrider.core.distribution import Sampling
from outrider.core.methods import DRAFTERS
from outrider.core.rules.exact import Exact
from tests.core.constraints.test_constraint import distance


def after(_: int, ids: Any) -> list[int]:
    """A prefix to begin with, and then anything: the third token of the first prompt is 2."""
    return [2] if len(ids) == 2 else [0, 1, 2]


BAD_WORDS = logits_process.NoBadWordsLogitsProcessor([[1, 0], [2]], eos_token_id=None)
PREFIX = logits_process.PrefixConstrainedLogitsProcessor(after, 1)
SAMPLINGS = {
    "repetition and presence": Sampling(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25),
    "bad words": Sampling(processors=(BAD_WORDS,)),
    "no repeated bigrams": Sampling(temperature=0.8, processors=(logits_process.NoRepeatNGramLogitsProcessor(2),)),
    "a forced prefix": Sampling(processors=(PREFIX,)),
    "min-p and processors": Sampling(
        min_p=0.2,
        processors=(logits_process.RepetitionPenaltyLogitsProcessor(1.3), logits_process.MinPLogitsWarper(0.1)),
    ),
    "all with a constraint": Sampling(
        repetition_penalty=1.5,
        processors=(logits_process.RepetitionPenaltyLogitsProcessor(0.8), PREFIX),
        constraint=Automaton({0: {0: 1, 1: 0, 2: 1}, 1: {0: 0, 2: 2}, 2: {1: 0, 0: 2}}),
    ),
}
QUICK = ("prompt-lookup", "sampled-tree")


def cases() -> list[Any]:
    """Each drafter under one of them, and some drafters under all, in the fast part."""
    found = []
    for place, name in enumerate(DRAFTERS):
        for number, sampling in enumerate(SAMPLINGS):
            quick = name in QUICK or (place % 3 == 0 and number == place % len(SAMPLINGS))
            found.append(pytest.param(name, sampling, marks=[] if quick else [pytest.mark.slow]))
    return found


@pytest.mark.parametrize(("name", "sampling"), cases())
def test_processors_keep_their_law(name: str, sampling: str, measured: Any) -> None:
    method = DRAFTERS[name]
    options = method.test_options[0]
    found = distance(method, options, Exact(), SAMPLINGS[sampling], together="columns" not in options)
    measured("enumeration: total variation, penalties and processors", name=sampling, value=found)
    assert found < 1e-12
