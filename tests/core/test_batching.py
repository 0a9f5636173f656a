"""Continuous batching: each row decodes as it does alone, no request starves, memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.batching import ContinuousBatch
from outrider.core.distribution import Sampling
from outrider.core.engine.kv_cache import mapped
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import Incompatible, InvalidOption, OutriderError
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.protocol import Drafter
from outrider.core.testing.conformance import KINDS, random_draft_head, trial_drafter
from outrider.core.testing.soak import SoakReport, SoakRequest, decode_alone, random_requests, soak
from outrider.core.testing.table_target import TableTarget

CONFIG = Config(vocabulary=61, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24)
SAMPLINGS = {
    "greedy": Sampling(temperature=0, end=(3,)),
    "sampled": Sampling(temperature=0.8, end=(3,)),
    "processed": Sampling(temperature=0.7, processors=(lambda ids, logits: logits.roll(ids.shape[1], -1),), end=(3,)),
    "penalised": Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.2, end=(3,)),
}


@cache
def network(dtype: torch.dtype, damped: bool = False, config: Config = CONFIG) -> Any:
    return Decoder.random(replace(config, norm_eps=0.3 if damped else 1e-6), 1, dtype=dtype).network


def target(dtype: torch.dtype = torch.float32, *, damped: bool = False, config: Config = CONFIG) -> Decoder:
    """Damped: right half of the time. One that were right to the last digit would leave rules to decide by rounding."""
    return Decoder(network(dtype, damped, config))


def maker(
    name: str | None, dtype: torch.dtype = torch.float32, config: Config = CONFIG
) -> Callable[[], Drafter] | None:
    if name is None:
        return None
    method = DRAFTERS[name]
    if method.draft_head is not None:
        draft_head = random_draft_head(method, target(dtype, config=config), vocabulary=0)
        return lambda: method.make(draft_head)
    return lambda: trial_drafter(method, method.test_options[0], lambda: target(dtype, damped=True, config=config))


def stop(number: int, tokens: Sequence[int]) -> int | None:
    """A pattern that ends a row and is cut off: 7 behind an even token."""
    for place in range(1, len(tokens)):
        if tokens[place] == 7 and tokens[place - 1] % 2 == 0:
            return place - 1
    return None


FEW = ["suffix", "token-recycling", "medusa", "eagle", "cs-drafting"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, mode) for name in (None, "draft-model", "prompt-lookup") for mode in SAMPLINGS),
        *((name, "sampled") for name in (*KINDS, *FEW) if name not in ("draft-model", "prompt-lookup")),
    ],
)
def test_rows_decode_as_they_do_alone(name: str | None, mode: str) -> None:
    sampling = SAMPLINGS[mode]
    batch = ContinuousBatch(target(), maker(name), make_rule("exact"), sampling=sampling, rows=4, stop=stop)
    every = list(islice(random_requests(61, seed=3, max_tokens=16), 8))
    found: dict[int, list[int]] = {}
    for wish in every[:5]:
        found[batch.add(wish.prompt, wish.limit, seed=wish.seed)] = []
    late = iter(every[5:])
    for number, step in enumerate(batch):
        found[step.row] += step.emitted
        if number % 5 == 0 and (more := next(late, None)) is not None:
            found[batch.add(more.prompt, more.limit, seed=more.seed)] = []
        assert not step.drafted
    assert [found[number] for number in range(8)] == [
        decode_alone(wish, target(), maker(name), make_rule("exact"), sampling=sampling, stop=stop) for wish in every
    ]
    batch.close()
    assert batch.idle and not batch.round()


def test_rows_move_where_memory_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "available", lambda: False)
    test_rows_decode_as_they_do_alone(None, "greedy")


# a kilobyte of cache for each token
SOAKED = replace(CONFIG, hidden_size=32, kv_heads=2, head_dim=32, intermediate_size=48)


def soaked(count: int, name: str | None, mode: str, stop: Any = stop, *, check: int = 1) -> tuple[SoakReport, int]:
    """What was seen, and the bytes that the cache may have had."""
    weights = Decoder.random(SOAKED, 1).network
    memory = 6 * 128 * Decoder(weights).slot_bytes
    found = soak(
        lambda: Decoder(weights),
        maker(name, config=SOAKED),
        make_rule("exact"),
        count,
        source=random_requests(61, seed=5),
        sampling=SAMPLINGS[mode],
        memory=memory,
        stop=stop,
        check=check,
    )
    return found, memory


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "prompt-lookup"])
def test_a_short_soak(name: str | None) -> None:
    found, memory = soaked(60, name, "greedy", check=3)
    assert found.wrong == 0 and found.cancelled > 2 and found.stopped > 2
    assert found.cache_bytes <= memory


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "count"), [("prompt-lookup", "greedy", 300), ("draft-model", "sampled", 120)])
def test_a_soak(name: str, mode: str, count: int) -> None:
    """Of two thousand: `outrider bench soak`."""
    found, memory = soaked(count, name, mode)
    assert found.wrong == 0 and found.cancelled > count / 40 and found.stopped > count / 20
    assert found.cache_bytes <= memory
    assert found.flat, [one >> 10 for one in found.resident]


_LEFT = 1 << 18  # bytes


@pytest.mark.slow
def test_a_soak_detects_leaks() -> None:
    kept: list[mmap] = []

    def leaking(number: int, tokens: Sequence[int]) -> int | None:
        if len(tokens) < 3:
            kept.append(mmap(-1, _LEFT))  # not the allocator's, which may have room from before
            kept[-1].write(b"x" * _LEFT)
        return stop(number, tokens)

    found, _ = soaked(120, "prompt-lookup", "greedy", leaking, check=50)
    assert found.wrong == 0 and not found.flat, [one >> 10 for one in found.resident]


@pytest.mark.slow
def test_a_soak_reports_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContinuousBatch, "cancel", lambda batch, number: None)
    with pytest.raises(OutriderError, match="continued after it was cancelled"):
        soaked(40, None, "greedy", check=50)
    monkeypatch.undo()
    monkeypatch.setattr(ContinuousBatch, "cache_bytes", 4096)
    with pytest.raises(OutriderError, match="4,096 bytes of cache and 0 rows were not freed"):
        soaked(4, None, "greedy", check=50)


def test_the_reported_bytes_are_those_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "available", lambda: False)  # where rows are as wide as the widest
    model = target()
    batch = ContinuousBatch(model, None, make_rule("exact"), sampling=Sampling(temperature=0), rows=3)
    for wish in islice(random_requests(61, seed=2), 7):
        batch.add(wish.prompt, wish.limit)
    while not batch.idle:
        batch.round()
        assert batch.cache_bytes == model.cache.bytes
    batch.close()


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping around a tensor that are in memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and not line.split()[0].endswith(":"):
            start, stop = (int(part, 16) for part in line.split()[0].split("-"))
            inside = start <= tensor.data_ptr() < stop
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not mapped.available(), reason="Linux maps memory page by page")
def test_a_short_request_does_not_pay_for_the_width_of_a_long_one() -> None:
    config = replace(SOAKED, context=4096)
    model = Decoder(network(torch.float32, config=config))
    memory = (2048 + 6 * 128) * model.slot_bytes
    batch = ContinuousBatch(
        model, None, make_rule("exact"), sampling=Sampling(temperature=0), rows=8, memory=memory, prefix_memory=None
    )
    long = SoakRequest([place % 57 + 4 for place in range(1900)], 12, 0)
    short = list(islice(random_requests(61, seed=4, max_tokens=20), 9))
    numbers = [batch.add(wish.prompt, wish.limit, seed=wish.seed) for wish in (long, *short)]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    most = held = 0
    while not batch.idle:
        for step in batch.round():
            found[step.row] += step.emitted
        most, held = max(most, batch.active), max(held, resident(model.cache.store) if batch.active else 0)
        assert batch.cache_bytes <= memory
    assert most >= 7, "of a rectangle there would be one row"
    assert 1900 * model.slot_bytes < held <= memory
    assert resident(model.cache._lent if model.cache._lent is not None else model.cache.store) < 64 << 10
    for number, wish in zip(numbers, (long, *short), strict=True):
        assert found[number] == decode_alone(
            wish, Decoder(model.network), None, make_rule("exact"), sampling=Sampling(temperature=0)
        )
    batch.close()


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    config = Config(
        vocabulary=61, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24, context=4096
    )
    model = Decoder.random(config, 1)
    batch = ContinuousBatch(model, None, make_rule("exact"), sampling=Sampling(temperature=0), rows=3)
    short = batch.add([5, 6, 7], 40)
    batch.round()
    long = batch.add([(index * 7) % 57 + 4 for index in range(1900)], 3)
    seen = [[step.row for step in batch.round()] for _ in range(5)]
    assert seen[:3] == [[short]] * 3, "one round for each piece but the last"
    assert seen[3] == [short, long]
    batch.close()


def test_a_request_that_does_not_fit_is_overtaken_a_limited_number_of_times() -> None:
    model = target()
    memory = 4 * 128 * model.slot_bytes
    batch = ContinuousBatch(
        model, None, make_rule("exact"), sampling=Sampling(temperature=0), rows=4, memory=memory, patience=3
    )
    small = [batch.add([5, 6], 20) for _ in range(3)]
    big = batch.add([5] * 60, 140)  # as wide as all four: it must be alone in there
    small += [batch.add([5, 6], 20) for _ in range(12)]
    order = list(dict.fromkeys(step.row for step in batch))
    assert order.index(big) <= 3 + 3 + 1
    assert sorted(order) == sorted([big, *small])
    with pytest.raises(InvalidOption, match="lower max_new_tokens"):
        batch.add([5] * 60, 4000)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(Incompatible, match="continuous batching"):
        ContinuousBatch(TableTarget(20), None, make_rule("exact"))  # type: ignore[arg-type]
    batch = ContinuousBatch(target(), None, make_rule("exact"), waiting=1)
    with pytest.raises(InvalidOption, match="empty"):
        batch.add([], 5)
    with pytest.raises(InvalidOption, match="max_new_tokens"):
        batch.add([1], 0)
    batch.add([4], 2)
    with pytest.raises(InvalidOption, match="waiting already"):
        batch.add([4], 2)
