"""Constraints on a device: the tokens of the CPU, and masks as bits in one upload a round, without a wait of their own.

A drafter whose guesses are made on the device adds a wait, to know them; a draft model adds one for each level."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.constraint import Automaton
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.transformer import Decoder
from outrider.core.methods import DRAFTERS, make_rule
from tests.core.shadow.cases import ALL, CONFIG, DEVICES, PROMPTS, WAITS, Device, Outcome, drafter_on, network, outcome

# from state s, s + 1 ids lead to other states: after state 0 a single one
LOOPS = Automaton({s: {(7 * s + 3 * k) % CONFIG.vocabulary: (s + k) % 5 for k in range(s + 1)} for s in range(5)})
SETTINGS = {"exact": Sampling(temperature=0, constraint=LOOPS), "gumbel-match": Sampling(constraint=LOOPS)}
MORE_WAITS = {
    **dict.fromkeys(("eagle3", "medusa", "jacobi", "sampled-tree"), 1),
    **dict.fromkeys(("draft-model", "on-the-fly-window", "pearl"), 3),
}
QUICK = (None, "prompt-lookup", "anpd", "suffix", "token-recycling", "ensemble", *MORE_WAITS)


def generate(device: str, name: str | None, rule: str, gpu: Any = None) -> Outcome:
    drafter = None if name is None else drafter_on(device, DRAFTERS[name])
    target, sampling = Decoder(network(device)), SETTINGS[rule]
    steps = decode(target, drafter, make_rule(rule), PROMPTS, sampling=sampling, max_new_tokens=20, seed=1)
    return outcome(steps, gpu)


def texts(found: Outcome) -> list[list[int]]:
    """The tokens of each row."""
    return [
        [token for row, tokens, _ in found.steps if row == number for token in tokens] for number in range(len(PROMPTS))
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", [pytest.param("exact", marks=pytest.mark.slow), "gumbel-match"])
@pytest.mark.parametrize("name", [None, *DRAFTERS] if ALL else QUICK)
def test_tokens_are_those_of_the_cpu(device: Device, name: str | None, rule: str) -> None:
    expected = generate("cpu", name, rule)
    with device() as gpu:
        found = generate("cuda", name, rule, gpu)
    assert texts(found) == texts(expected)
    # on a device it isn't known, without a wait, that a drawn chain stopped at once, so that forced tokens could follow
    assert found.steps == expected.steps or name == "dfly"
    if name in QUICK:
        assert found.steady <= WAITS.get(name or "", 1) + MORE_WAITS.get(name or "", 0), found.places
