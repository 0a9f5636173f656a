"""Rows that enter and leave: each comes out as it does alone, nobody starves, memory stays within its bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from outrider.core.conformance import KINDS, equip, untaught
from outrider.core.continuous import Continuous
from outrider.core.decode import Drafter, decode
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.laws import Sampling
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.record import Record
from outrider.core.target import TableTarget

CONFIG = Config(vocabulary=61, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, hidden=24)
SAMPLINGS = {
    "greedy": Sampling(temperature=0, end=(3,)),
    "sampled": Sampling(temperature=0.8, end=(3,)),
    "penalised": Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.2, end=(3,)),
}


@cache
def network(dtype: torch.dtype, damped: bool = False) -> Any:
    return Decoder.random(replace(CONFIG, norm_eps=0.3 if damped else 1e-6), 1, dtype=dtype).network


def target(dtype: torch.dtype = torch.float32, *, damped: bool = False) -> Decoder:
    """Damped: right half of the time. One that were right to the last digit would leave rules to decide by rounding."""
    return Decoder(network(dtype, damped))


def maker(name: str | None, dtype: torch.dtype = torch.float32) -> Callable[[], Drafter] | None:
    if name is None:
        return None
    method = DRAFTERS[name]
    if "pupil" in method.needs:
        pupil = untaught(method, target(dtype), vocabulary=0)
        return lambda: method.make(pupil)
    return lambda: equip(method, method.trials[0], lambda: target(dtype, damped=True))


def stop(number: int, tokens: Sequence[int]) -> int | None:
    """A pattern that ends a row and is cut off: 7 behind an even token."""
    for place in range(1, len(tokens)):
        if tokens[place] == 7 and tokens[place - 1] % 2 == 0:
            return place - 1
    return None


@dataclass
class Wish:
    prompt: list[int]
    limit: int
    seed: int


def wishes(count: int, seed: int = 0, longest: int = 30, most: int = 40) -> list[Wish]:
    rng = random.Random(seed)
    return [
        Wish([rng.randrange(4, 61) for _ in range(rng.randint(1, longest))], rng.randint(1, most), rng.randrange(1000))
        for _ in range(count)
    ]


def alone(wish: Wish, name: str | None, sampling: Sampling, dtype: torch.dtype = torch.float32) -> list[int]:
    make = maker(name, dtype)
    steps = decode(
        target(dtype),
        None if make is None else make(),
        make_rule("exact"),
        [wish.prompt],
        sampling=sampling,
        limit=wish.limit,
        stop=stop,
        seed=[wish.seed],
        record=Record(nodes=False),
    )
    return [token for step in steps for token in step.emitted]


FEW = ["token-recycling", "medusa", "eagle", "cs-drafting"]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, mode) for name in (None, "draft-model", "prompt-lookup") for mode in SAMPLINGS),
        *((name, "sampled") for name in (*KINDS, *FEW) if name not in ("draft-model", "prompt-lookup")),
    ],
)
def test_rows_come_out_as_they_do_alone(name: str | None, mode: str) -> None:
    sampling = SAMPLINGS[mode]
    batch = Continuous(target(), maker(name), make_rule("exact"), sampling=sampling, rows=4, stop=stop)
    every = wishes(8, seed=3, most=16)
    found: dict[int, list[int]] = {}
    for wish in every[:5]:
        found[batch.add(wish.prompt, wish.limit, seed=wish.seed)] = []
    late = iter(every[5:])
    for number, step in enumerate(batch):
        found[step.row] += step.emitted
        if number % 5 == 0 and (more := next(late, None)) is not None:
            found[batch.add(more.prompt, more.limit, seed=more.seed)] = []
    assert [found[number] for number in range(8)] == [alone(wish, name, sampling) for wish in every]
    batch.close()


def soak(count: int, name: str | None, sampling: Sampling, *, check: int = 1) -> dict[str, float]:
    """Requests with random limits, stops and cancels -> what was seen; every `check`-th finished row is held against
    its solo run."""
    rng = random.Random(17)
    memory = 6 * 128 * target().slot_bytes
    batch = Continuous(target(), maker(name), make_rule("exact"), sampling=sampling, rows=8, memory=memory, stop=stop)
    every = wishes(count, seed=5)
    found: dict[int, list[int]] = {}
    rounds = done = cancelled = wrong = 0
    most, enough = 0, iter(every)
    given: dict[int, Wish] = {}
    while True:
        while batch.waiting < 12 and (wish := next(enough, None)) is not None:
            number = batch.add(wish.prompt, wish.limit, seed=wish.seed)
            given[number], found[number] = wish, []
        if batch.idle:
            break
        for step in batch.round():
            if step.row not in found:
                raise AssertionError("a cancelled request went on")
            found[step.row] += step.emitted
            if step.finish is not None:
                tokens, wish = found.pop(step.row), given.pop(step.row)
                done += 1
                if done % check == 0:
                    wrong += tokens != alone(wish, name, sampling)
        rounds += 1
        most = max(most, batch.target.cache.store.nbytes)  # type: ignore[attr-defined]
        if rng.random() < 0.15 and found:
            number = rng.choice(list(found))
            batch.cancel(number)
            del found[number], given[number]
            cancelled += 1
    assert not found and done + cancelled == count
    assert batch.cache_bytes == 0 and batch.active == 0
    return {"wrong": wrong, "cancelled": cancelled, "bytes": most, "memory": memory, "rounds": rounds}


@pytest.mark.parametrize("name", [None, "prompt-lookup"])
def test_a_short_soak(name: str | None) -> None:
    found = soak(120, name, SAMPLINGS["greedy"], check=3)
    assert found["wrong"] == 0 and found["cancelled"] > 5
    assert found["bytes"] <= found["memory"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "count"), [("prompt-lookup", "greedy", 2000), ("draft-model", "sampled", 300)]
)
def test_two_thousand_requests(name: str, mode: str, count: int) -> None:
    found = soak(count, name, SAMPLINGS[mode], check=5)
    assert found["wrong"] == 0 and found["cancelled"] > count / 40
    assert found["bytes"] <= found["memory"]


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    config = Config(vocabulary=61, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, hidden=24, context=4096)
    model = Decoder.random(config, 1)
    batch = Continuous(model, None, make_rule("exact"), sampling=Sampling(temperature=0), rows=3)
    short = batch.add([5, 6, 7], 40)
    batch.round()
    long = batch.add([(index * 7) % 57 + 4 for index in range(1900)], 3)
    seen = [[step.row for step in batch.round()] for _ in range(5)]
    assert seen[:3] == [[short]] * 3, "one round for each piece but the last"
    assert seen[3] == [short, long]
    batch.close()


def test_whoever_does_not_fit_is_overtaken_only_so_often() -> None:
    model = target()
    memory = 4 * 128 * model.slot_bytes
    batch = Continuous(
        model, None, make_rule("exact"), sampling=Sampling(temperature=0), rows=4, memory=memory, patience=3
    )
    small = [batch.add([5, 6], 20) for _ in range(3)]
    big = batch.add([5] * 60, 140)  # as wide as all four: it must be alone in there
    small += [batch.add([5, 6], 20) for _ in range(12)]
    order = list(dict.fromkeys(step.row for step in batch))
    assert order.index(big) <= 3 + 3 + 1
    assert sorted(order) == sorted([big, *small])
    with pytest.raises(InvalidOption, match="lower the limit"):
        batch.add([5] * 60, 4000)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(Incompatible, match="enter and leave"):
        Continuous(TableTarget(20), None, make_rule("exact"))  # type: ignore[arg-type]
    batch = Continuous(target(), None, make_rule("exact"), waiting=1)
    with pytest.raises(InvalidOption, match="empty"):
        batch.add([], 5)
    with pytest.raises(InvalidOption, match="limit"):
        batch.add([1], 0)
    batch.add([4], 2)
    with pytest.raises(InvalidOption, match="waiting already"):
        batch.add([4], 2)
