"""All drafters and rules by name, in the order of the rows. Methods are registered nowhere else."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.core.methods import combined, draft_model, lookup, parallel_decoding, rules, self_speculative, trained
from outrider.core.methods.row import Method


def _table(*families: Iterable[Method]) -> dict[str, Method]:
    return {method.name: method for family in families for method in family}


DRAFTERS = _table(
    lookup.ROWS,
    parallel_decoding.ROWS,
    draft_model.ROWS,
    self_speculative.ROWS,
    trained.ROWS,
    combined.ROWS,
)

RULES = _table(rules.ROWS)
