"""Measures configurations in turns and reports medians, so that other load on the machine affects all of them alike.

Independent of how outputs are produced.
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
    """One measurement of one configuration."""

    seconds: float
    tokens: int
    calls: int
    outputs: list[list[int]]
    more: Row


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bound(work: Callable[[Any], Round], name: Any) -> Callable[[], Round]:
    return lambda: work(name)


def turns(cases: dict[str, Callable[[], Round]], repeat: int, baselines: Mapping[str, str] = {}) -> list[Row]:
    """Run all cases in turn, with a warm-up, and return a row for each; the first is plain decoding. `baselines`: the
    case with which the outputs of each case are compared (default: the first)."""
    rounds: dict[str, list[Round]] = {name: [] for name in cases}
    for number in range(repeat + 1):
        for name, case in cases.items():
            result = case()
            if number:
                rounds[name].append(result)
    plain = next(iter(rounds.values()))
    rows = []
    for name, results in rounds.items():
        ratios = [a.seconds / a.tokens / (b.seconds / b.tokens) for a, b in zip(plain, results, strict=True)]
        last = results[-1]
        expected = rounds[baselines[name]] if baselines else plain
        same = sum(a == b for a, b in zip(expected[-1].outputs, last.outputs, strict=True))
        if baselines:
            last.more["as_exact"] = _agreed(plain[-1].outputs, last.outputs)
        rows.append(
            {
                "drafter": name,
                "tokens": last.tokens,
                "tokens_per_second": statistics.median(one.tokens / one.seconds for one in results),
                "speedup": statistics.median(ratios),
                "speedup_range": [min(ratios), max(ratios)],
                "tokens_per_pass": last.tokens / last.calls,
                "same": same,
                "of": len(last.outputs),
                **last.more,
            }
        )
    return rows


def _agreed(expected: Sequence[list[int]], outputs: Sequence[list[int]]) -> float:
    """Return the share of the outputs before their first difference."""
    pairs = (zip(a, b, strict=False) for a, b in zip(expected, outputs, strict=True))
    same = sum(len(list(takewhile(lambda pair: pair[0] == pair[1], pair_list))) for pair_list in pairs)
    return same / max(sum(map(len, expected)), 1)
