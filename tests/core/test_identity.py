"""Rung 2: on small random decoders with a real cache, every drafter gives what plain decoding gives, token for token:
greedy, and with `gumbel-match` at T=1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.methods import DRAFTERS, Method
from outrider.core.protocol import Drafter, Rule
from outrider.core.rules.exact import Exact, GumbelMatch
from outrider.core.testing.conformance import KINDS, random_draft_head, trial_drafter
from outrider.core.trace import Step
from tests.turns import ALL, turn

VOCABULARY = 61
_MOST, _ALONE = (120, 20) if ALL else (64, 8)  # prompts, and those of them that are decoded alone
DTYPES = ("float32", "float64")
MODES: dict[str, tuple[Sampling, Rule]] = {
    "greedy": (Sampling(temperature=0, end=(3,)), Exact()),
    "gumbel-match": (Sampling(end=(3,)), GumbelMatch()),
}
# settings of the size people use; the small ones of the method table are there to be enumerated
USUAL: dict[str, Mapping[str, Any]] = {
    "draft-model": {"length": 4},
    "sampled-tree": {"tree": (-1, -1, 0, 0, 1, 2)},
    "top-k-tree": {"tree": (-1, -1, -1, 0, 0, 1, 3, 6)},
    "dynamic-tree": {"nodes": 8, "width": 3, "depth": 3},
    "jacobi": {"window": 6},
    "prompt-lookup": {"length": 5},
    "cs-drafting": {"lengths": (3, 2), "inner_length": 3},
    "sequoia": {"acceptance": (0.5, 0.2, 0.1), "nodes": 8, "depth": 4},
    "specdec-plus-plus": {"head": lambda facts: facts[:, 0].sqrt(), "tap": None},
    "specinfer": {"samples": 3, "depth": 3},
    "specexec": {"nodes": 24, "batch": 4, "width": 4, "passes": 6},
    "draft-verify": {"skip": ("attention.1",), "threshold": 0.1},
    "swift": {"window": 8, "trials": 12, "bayes_interval": 3, "threshold": 0.05},
    "draft-on-the-fly": {"threshold": 0.1},
    "input-guided": {"source": [*range(4, 61)] * 6, "anchor": 1},
    "rest": {"store": [[(7 * n * n + n) % 61 for n in range(4000)]], "min_ngram": 1},
    "lookahead": {"window": 4, "ngram": 3},
}


CONFIG = Config(vocabulary=VOCABULARY, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)


@lru_cache
def prompts(count: int) -> list[list[int]]:
    """Of 1 to 12 tokens, none of them the end token."""
    random = np.random.default_rng(7)
    return [[int(t) for t in random.integers(4, VOCABULARY, random.integers(1, 13))] for _ in range(count)]


def target(dtype: torch.dtype) -> Decoder:
    return Decoder.random(CONFIG, seed=1, dtype=dtype)


def maker(method: Method, damp: float) -> Callable[[], Drafter]:
    """The draft model is the target with its norms damped: by 0.3 it is right half of the time."""
    options = USUAL.get(method.name, {})
    if method.draft_head is not None:
        draft_head = random_draft_head(method, target(torch.float64), vocabulary=0)
        return lambda: method.make(draft_head, **options)
    model = Decoder.random(replace(CONFIG, norm_eps=damp), seed=1)
    return lambda: trial_drafter(method, options, lambda: model)


def outputs(
    drafter: Callable[[], Drafter | None], mode: str, dtype: torch.dtype, numbers: range, limit: int, batch: int
) -> tuple[list[tuple[int, ...]], list[Step]]:
    """Of the prompts of these numbers, which are their seeds too."""
    sampling, rule = MODES[mode]
    every, steps = [prompts(_MOST)[number] for number in numbers], list[Step]()
    emitted: list[list[int]] = [[] for _ in every]
    model = target(dtype)
    for start in range(0, len(every), batch):
        part = every[start : start + batch]
        seeds = list(numbers[start : start + batch])
        for step in decode(model, drafter(), rule, part, sampling=sampling, max_new_tokens=limit, seed=seeds):
            emitted[start + step.row] += step.emitted
            steps.append(step)
    return [tuple(row) for row in emitted], steps


@lru_cache
def plain(mode: str, dtype: torch.dtype, count: int, limit: int) -> list[tuple[int, ...]]:
    """Nothing drafted, twenty rows at a time: below it is shown that rows do not notice."""
    return outputs(lambda: None, mode, dtype, range(count), limit, 20)[0]


def settings(dtype: str, quick: int, *others: int) -> list[Any]:
    """Kinds of drafts in every mode and size of batch, in the fast part in one; other drafters in batches of one size,
    in one of the modes and dtypes."""
    found = []
    for mode in MODES:
        for one in DRAFTERS.values():
            kind = one.name in KINDS
            if kind or (mode, dtype) in turn(one.name, [(mode, dtype) for mode in MODES for dtype in DTYPES]):
                for batch in (quick, *others) if kind else (quick,):
                    marks = [] if kind and batch == quick and dtype == "float64" else [pytest.mark.slow]
                    found.append(pytest.param(mode, one, batch, id=f"{mode}-{one.name}-{batch}", marks=marks))
    return found


@pytest.mark.parametrize(("mode", "method", "batch"), settings("float64", 5, 1, 2))
def test_identity_in_float64(mode: str, method: Method, batch: int) -> None:
    found, steps = outputs(maker(method, 0.3), mode, torch.float64, range(10), 40, batch)
    assert found == plain(mode, torch.float64, 10, 40)
    assert len(steps) < sum(map(len, found)), "something must have been accepted"


@pytest.mark.parametrize(("mode", "method", "batch"), settings("float32", 8, 1))
def test_identity_in_float32(mode: str, method: Method, batch: int, measured: Any) -> None:
    """For one drafter of each kind many prompts, the last of them alone; 24 for the others."""
    together = range(_MOST - _ALONE if method.name in KINDS else 24)
    part = range(_MOST - _ALONE, _MOST) if batch == 1 else together
    found, steps = outputs(maker(method, 0.03), mode, torch.float32, part, 64, batch)
    count, every = len(found), plain(mode, torch.float32, _MOST, 64)
    wrong = sum(one != every[number] for one, number in zip(found, part, strict=True))
    name = f"{method.name}, {mode}, batch {batch}"
    measured(f"identity: mismatches of {count} prompts x 64 tokens, float32", name=name, value=wrong)
    measured("identity: tokens a target call in those runs", name=name, value=sum(map(len, found)) / len(steps))
    assert wrong == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_plain_rows_are_the_same_alone(mode: str) -> None:
    assert (
        outputs(lambda: None, mode, torch.float32, range(_MOST // 2), 64, 1)[0]
        == plain(mode, torch.float32, _MOST, 64)[: _MOST // 2]
    )
