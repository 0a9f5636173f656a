"""Settings of a benchmark: pairs of a drafter and an acceptance rule with their options. Independent of modalities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from outrider.core.bench.runner import PLAIN, sweep
from outrider.core.methods import DRAFTERS, RULES
from outrider.core.methods.rules import EXACT


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of a benchmark's table."""

    drafter: str | None = None  # None: plain decoding
    rule: str = EXACT.name
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    seed_shift: int = 0  # added to the seeds; plain decoding of other seeds shows the variation between seeds

    @property
    def options(self) -> dict[str, Any]:
        """The options of both."""
        return {**self.drafter_options, **self.rule_options}

    @property
    def name(self) -> str:
        return f"{PLAIN}, other seeds" if self.seed_shift else label(self.drafter, self.rule, self.options)


def label(drafter: str | None, rule: str, options: Mapping[str, Any]) -> str:
    """The name of a row."""
    parts = [drafter or PLAIN, *([] if rule == EXACT.name else [rule])]
    given = ", ".join(f"{name}={value}" for name, value in options.items())
    return " ".join([*parts, f"({given})"] if given else parts)


def combine(
    drafters: Sequence[str], rules: Sequence[str], drafter_options: Mapping[str, Any], rule_options: Mapping[str, Any]
) -> list[Setting]:
    """Every drafter under every rule. An option applies to all methods that have it, or to one if prefixed with its
    name (`lantern.delta`). A list of values makes one setting for each."""
    return [
        Setting(drafter=drafter, rule=rule, drafter_options=drafter_values, rule_options=rule_values)
        for drafter, rule in product(drafters, rules)
        for drafter_values in sweep(drafter, drafters, DRAFTERS, drafter_options)
        for rule_values in sweep(rule, rules, RULES, rule_options)
    ]
