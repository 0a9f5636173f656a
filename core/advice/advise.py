"""The advice: the drafter and the draft length with the highest predicted speed, or none, with the reason.

A drafter is advised only if the whole interval of its predicted speedup is above 1. Independent of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.advice.predict import Candidate, Machine, Prediction


@dataclass(frozen=True)
class Advice:
    """What to do for one row, what else was tried, and what holds for batches."""

    machine: Machine
    best: tuple[Prediction, ...]  # of each candidate its best length for one row, fastest first
    batches: tuple[Prediction, ...]  # of the first of `best`: its best length in batches, by size

    @property
    def chosen(self) -> Prediction | None:
        """The drafter to use for one row; None: plain decoding."""
        first = self.best[0] if self.best else None
        return first if first is not None and first.low > 1 else None

    @property
    def pays_below(self) -> int | None:
        """The smallest predicted batch size at which the drafter is no longer faster than plain decoding."""
        return next((each.rows for each in self.batches if each.speedup <= 1), None)

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        if not self.best:
            return "no drafter could be measured for this target"
        first = self.best[0]
        needs = first.pass_cost + first.draft_cost
        spent = f"a pass over the draft costs {first.pass_cost:.2f} plain passes and drafting {first.draft_cost:.2f}"
        tokens = f"{first.tokens_per_pass:.2f} tokens"
        if self.chosen is not None:
            return f"a round yields {tokens} for {needs:.2f} plain passes: {spent}"
        if first.speedup <= 1:
            return f"the best drafter, {first.candidate.name}, yields {tokens} a round and needs {needs:.2f}: {spent}"
        return (
            f"the best drafter, {first.candidate.name}, is predicted at {first.speedup:.2f}x, and {first.low:.2f}x is "
            f"within its interval: {tokens} a round, {spent}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "advice": None if self.chosen is None else _data(self.chosen),
            "reason": self.reason,
            "pays_below_rows": self.pays_below,
            "candidates": [
                _data(each) | {"by_position": [round(share, 4) for share in each.candidate.by_position]}
                for each in self.best
            ],
            "batches": [_data(each) for each in self.batches],
            "round_ms": self.machine.rounds.to_dict(),
        }


def _data(each: Prediction) -> dict[str, Any]:
    return {
        "drafter": each.candidate.name,
        "length": each.length or None,
        "shape": each.candidate.shape,
        "options": dict(each.candidate.options),
        "rows": each.rows,
        "speedup": each.speedup,
        "speedup_low": each.low,
        "speedup_high": each.high,
        "tokens_per_pass": each.tokens_per_pass,
        "acceptance_rate": each.acceptance,
        "pass_cost": each.pass_cost,
        "draft_cost": each.draft_cost,
    }


def best_length(machine: Machine, candidate: Candidate, rows: int = 1) -> Prediction:
    """The fastest length of a candidate; of equally fast ones the shortest."""
    length = max(candidate.lengths, key=lambda each: machine.speedup(candidate, each, rows))
    return machine.predict(candidate, length, rows)


def advise(machine: Machine, candidates: Sequence[Candidate], sizes: Sequence[int] = (1,)) -> Advice:
    """The advice for one row, and for batches of these sizes with the drafter that is advised."""
    best = sorted((best_length(machine, each) for each in candidates), key=lambda p: p.speedup, reverse=True)
    batches = [best_length(machine, best[0].candidate, rows) for rows in sorted(set(sizes))] if best else []
    return Advice(machine, tuple(best), tuple(batches))
