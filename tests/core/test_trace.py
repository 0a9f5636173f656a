"""Traces are written and read back; other input is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.draft_model.model import TopKTree
from outrider.core.errors import TraceError
from outrider.core.methods import make_rule
from outrider.core.step_recorder import Record
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step, Summary, Times, Trace, machine, versions


def trace() -> Trace:
    steps = decode(
        TableTarget(9, seed=1),
        TopKTree(TableTarget(9, seed=1, blur=0.3), tree=(-1, -1, 0, 2)),
        make_rule("lenience"),
        [[1, 2], [3]],
        sampling=Sampling(temperature=0.9),
        max_new_tokens=12,
        record=Record(alternatives=2, logprobs=True, entropy=True),
    )
    return Trace(
        tuple(steps), "top-k-tree", "lenience", False, (1, 2), {"temperature": 0.9}, machine(), versions(), memory=5
    )


def test_a_trace_reads_back_the_same() -> None:
    one = trace()
    two = Trace.from_json(one.to_json())
    assert two == one
    assert all(len(step.entropy) == len(step.emitted) and min(step.entropy) >= 0 for step in two.steps)
    assert two.rows == 2 and len(two.tokens(1)) == len(two.sources(1)) == 12
    assert two.row(1).steps == tuple(step for step in one.steps if step.row == 1)
    assert two.summary() == one.summary() and two.summary().total_variation > 0


HOSTILE: list[str] = [
    "",
    "null",
    "[]",
    "{",
    '"trace"',
    "[" * 100_000,
    '{"schema": 2}',
    '{"schema": true}',
    '{"extra": 1}',
    '{"steps": [{"row": 0}]}',
    '{"steps": [{"row": 0, "index": 0, "cost": NaN}]}',
    '{"steps": [{"row": 0, "index": 0, "cost": 1e999}]}',
    '{"steps": [{"row": 0, "index": 0, "path": [0]}]}',
    '{"steps": [{"row": 0, "index": -1}]}',
    '{"steps": [{"row": 0, "index": 0, "emitted": [1], "sources": []}]}',
    '{"steps": [{"row": 0, "index": 0, "emitted": [1], "sources": ["<script>"]}]}',
    '{"steps": [{"row": 0, "index": 0, "emitted": [1.5], "sources": ["bonus"]}]}',
    '{"steps": [{"row": 0, "index": 0, "finish": "never"}]}',
    '{"machine": {"nested": {"too": "deep"}}}',
    '{"seed": "7"}',
    '{"lossless": 1}',
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_raise_one_typed_error(text: str) -> None:
    with pytest.raises(TraceError) as caught:
        Trace.from_json(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_trace_too_large_to_be_one_is_not_read() -> None:
    with pytest.raises(TraceError, match="characters"):
        Trace.from_json(" " * 5_000_001)


@pytest.mark.slow
def test_a_thousand_damaged_traces() -> None:
    """Each reads as a trace or raises TraceError; nothing else, whatever is broken."""
    rng, good = random.Random(0), trace().to_json()
    wrong: list[Any] = [None, -1, 1e308, "x", [], {}, [[]], True, 2**70, "\u202e"]
    refused = 0
    for case in range(1000):
        if case % 2:
            text = list(good)
            for _ in range(rng.randint(1, 5)):
                text[rng.randrange(len(text))] = chr(rng.choice([0, 34, 44, 58, 91, 123, 0x202E, rng.randrange(256)]))
            damaged = "".join(text)
        else:
            data = json.loads(good)
            where = rng.choice([data, *data["steps"]])
            where[rng.choice(list(where))] = rng.choice(wrong)
            damaged = json.dumps(data)
        try:
            Trace.from_json(damaged)
        except TraceError:
            refused += 1
    assert refused > 800


def test_metrics_by_hand() -> None:
    """Three steps whose figures can be counted on fingers."""
    tree = {"parents": (-1, 0, 1), "fixed": (True,) * 3, "chance": (1.0,) * 3, "p": (1.0,) * 3, "q": (1.0,) * 3}

    def step(index: int, accepted: int, cost: float) -> Step:
        return Step(
            row=0,
            index=index,
            drafted=(5, 6, 7),
            tried=(True,) * 3,
            path=tuple(range(accepted)),
            emitted=tuple(range(accepted + 1)),
            sources=(*["drafted"] * accepted, "resampled" if accepted < 3 else "bonus"),  # type: ignore[arg-type]
            total_variation=(0.1,) * (accepted + 1),
            times=Times(1, 2, 3, 4),
            cost=cost,
            **tree,
        )

    found = Summary.of([step(0, 3, 1.5), step(1, 0, 1.5), step(2, 1, 1.0)])
    assert (found.tokens, found.target_passes, found.drafted, found.accepted) == (7, 3, 9, 4)
    assert found.tokens_per_pass == pytest.approx(7 / 3) and found.acceptance_rate == pytest.approx(4 / 9)
    assert found.equivalents_per_token == pytest.approx(4 / 7)
    assert found.histogram == (1, 1, 0, 1)
    assert found.by_position == pytest.approx((2 / 3, 1 / 3, 1 / 3))
    assert found.conditional == pytest.approx((2 / 3, 1 / 2, 1))
    assert found.sources == {"drafted": 4, "relaxed": 0, "resampled": 2, "bonus": 1}
    assert found.total_variation == pytest.approx(0.7) and found.seconds == 30
    assert found.tokens_per_second == pytest.approx(7 / 30) and found.times == Times(3, 6, 9, 12)
    assert Summary.of([]).tokens_per_pass == 0


@pytest.mark.parametrize("path", [(1, 0), (0, 2), (0, 1, 2), (1,)])
def test_a_path_starts_at_the_root_and_is_committed(path: tuple[int, ...]) -> None:
    three = {"fixed": (True,) * 3, "tried": (True,) * 3, "parents": (-1, 0, 1), "drafted": (5, 6, 7)}
    good = Step(row=0, index=0, path=(0, 1), emitted=(5, 6), sources=("drafted", "drafted"), **three)
    assert Trace.from_json(Trace((good,)).to_json()).steps == (good,)
    with pytest.raises(TraceError):
        Trace.from_json(Trace((replace(good, path=path),)).to_json())


def test_positions_count_over_all_steps() -> None:
    def step(depth: int, accepted: int) -> Step:
        chain = tuple(range(-1, depth - 1))
        sources = (*["drafted"] * accepted, "bonus")
        return Step(row=0, index=0, drafted=(1,) * depth, parents=chain, emitted=(1,) * (accepted + 1), sources=sources)

    summary = Summary.of([step(3, 0), step(3, 2), step(1, 1), step(0, 0)])
    assert summary.histogram == (2, 1, 1)
    assert summary.by_position == (2 / 3, 1 / 2, 0.0)
    assert summary.conditional == (2 / 3, 1.0, 0.0)
