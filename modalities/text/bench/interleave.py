"""Configurations measured in turns: each once a round, the middle one of their rounds told, so that a machine that is
busy for a while is busy for all of them. Knows seconds, tokens and outputs; nothing of what makes them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

Row = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """One configuration, once."""

    seconds: float
    tokens: int
    calls: int
    outputs: list[list[int]]
    more: Row


def now(place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter()


def bound(work: Callable[[Any], Round], name: Any) -> Callable[[], Round]:
    return lambda: work(name)


def turns(cases: dict[str, Callable[[], Round]], repeat: int, beside: Mapping[str, str] = {}) -> list[Row]:
    """Each case once a round, the first round, which warms up, left out -> a row each; the first case is plain.
    `beside`: whose outputs a case's should be, where that is not the first's."""
    rounds: dict[str, list[Round]] = {name: [] for name in cases}
    for number in range(repeat + 1):
        for name, case in cases.items():
            one = case()
            if number:
                rounds[name].append(one)
    plain = next(iter(rounds.values()))
    rows = []
    for name, found in rounds.items():
        ratios = [a.seconds / a.tokens / (b.seconds / b.tokens) for a, b in zip(plain, found, strict=True)]
        last = found[-1]
        wanted = rounds[beside[name]] if beside else plain
        same = sum(a == b for a, b in zip(wanted[-1].outputs, last.outputs, strict=True))
        if beside:
            last.more["as_exact"] = _agreed(plain[-1].outputs, last.outputs)
        rows.append(
            {
                "drafter": name,
                "tokens": last.tokens,
                "tokens_per_second": statistics.median(it.tokens / it.seconds for it in found),
                "speedup": statistics.median(ratios),
                "tokens_per_pass": last.tokens / last.calls,
                "same": same,
                "of": len(last.outputs),
                **last.more,
            }
        )
    return rows


def _agreed(wanted: Sequence[list[int]], found: Sequence[list[int]]) -> float:
    """How much of outputs came before they first differ."""
    pairs = (zip(a, b, strict=False) for a, b in zip(wanted, found, strict=True))
    same = sum(len(list(takewhile(lambda pair: pair[0] == pair[1], one))) for one in pairs)
    return same / max(sum(map(len, wanted)), 1)
