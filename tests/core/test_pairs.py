"""Which rule takes which drafter: what the rows say is what happens."""

from __future__ import annotations

import pytest

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible
from outrider.core.methods import DRAFTERS, RULES, Method
from outrider.core.testing.conformance import KINDS, trial_drafter
from tests.turns import takes_turn

CONFIG = Config(vocabulary=13, hidden_size=16, layers=3, heads=2, kv_heads=1, head_dim=8, intermediate_size=24)
PROMPTS = [[1, 2, 3, 1, 2, 3, 4, 1, 2], [5, 6, 5, 6, 5]]


def accepted(drafter: Method, rule: Method, temperature: float) -> bool:
    """Does it decode with the usual options?"""
    required = {name: value for name, value in drafter.test_options[0].items() if name in (*drafter.needs, "tap")}
    made = trial_drafter(drafter, required, lambda: Decoder.random(CONFIG, 1))
    steps = decode(
        Decoder.random(CONFIG, 1),
        made,
        rule.make(),
        PROMPTS,
        sampling=Sampling(temperature=temperature),
        max_new_tokens=12,
    )
    try:
        return len(list(steps)) > 0
    except Incompatible:
        return False


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=str)
def test_rules_for_sampled_chains_take_the_drafters_that_sample_them(drafter: Method) -> None:
    for rule in RULES.values():
        if rule.samples_chain:
            assert all(accepted(drafter, rule, temperature) for temperature in (1.0, 0.0)) == rule.can_verify(drafter)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if not rule.samples_chain], ids=str)
def test_every_other_rule_takes_every_drafter(rule: Method) -> None:
    """Kinds of drafts with every rule, other drafters in turns."""
    for drafter in DRAFTERS.values():
        assert rule.can_verify(drafter)
        if drafter.name in KINDS or takes_turn(rule.name, drafter.name):
            assert accepted(drafter, rule, 1.0), drafter.name


def test_some_rule_is_for_sampled_chains() -> None:
    assert [rule.name for rule in RULES.values() if rule.samples_chain] == ["block"]
    assert sum(method.samples_chain for method in DRAFTERS.values()) > 8
