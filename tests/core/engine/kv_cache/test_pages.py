"""Rows of a batch in pages of one store: tokens are those of a row alone, and rows share only what they
have read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch

from outrider.core.batching import ContinuousBatch
from outrider.core.distribution import Sampling
from outrider.core.engine.kv_cache.page_tables import PAGE
from outrider.core.engine.kv_cache.pages import PagedCache
from outrider.core.engine.kv_cache.prefixes import Prefixes
from outrider.core.engine.network import Network, random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.kernels import native
from outrider.core.methods import DRAFTERS, make_drafter, make_rule
from outrider.core.protocol import Drafter
from outrider.core.testing.conformance import random_draft_head, trial_drafter
from outrider.core.testing.soak import SoakRequest, decode_alone, random_requests

CONFIG = Config(
    vocabulary=61, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24, context=1024
)
SAMPLINGS = {"greedy": Sampling(temperature=0, end=(3,)), "sampled": Sampling(temperature=0.8, end=(3,))}


@cache
def network() -> Network:
    return random_network(CONFIG, 1)


def maker(name: str | None) -> Callable[[], Drafter] | None:
    if name is None:
        return None
    method = DRAFTERS[name]
    if method.draft_head is not None:
        head = random_draft_head(method, Decoder(network()), vocabulary=0)
        return lambda: method.make(head, **method.test_options[0])
    return lambda: trial_drafter(method, method.test_options[0], lambda: Decoder(network(), paged=True))


def check(cache: PagedCache, prefixes: Prefixes) -> None:
    """The table has each row's pages, the row's tokens fit into them, and only whole pages before them are shared."""
    table, total = cache.rows.table, cache.store.shape[1]
    assert table is not None
    kept = [block.slots for block in prefixes._blocks]
    holders = Counter([page for pages in cache._held for page in pages] + kept)
    assert +cache._holders == holders
    assert sorted([*holders, *cache._unused]) == [*range(1, total)]
    for row, pages in enumerate(cache._held):
        written = pages[cache.rows.host[row] // PAGE :]
        assert all(holders[page] == 1 for page in written)
        assert table[row].tolist() == [*pages, *[0] * (table.shape[1] - len(pages))]
        assert len(pages) * PAGE >= cache.rows.host[row]


def decoded(batch: ContinuousBatch, asked: list[SoakRequest]) -> list[list[int]]:
    """The tokens of each request, the rows checked after every round."""
    numbers = [batch.add(each.prompt, each.limit, seed=each.seed) for each in asked]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    target: Any = batch.target
    while not batch.idle:
        for step in batch.round():
            found[step.row] += step.emitted
        check(target.cache, target.prefixes)
    return [found[number] for number in numbers]


def alone(name: str | None, asked: list[SoakRequest], mode: str, bits: int | None = None) -> list[list[int]]:
    return [
        decode_alone(each, Decoder(network(), cache_bits=bits), maker(name), make_rule(), sampling=SAMPLINGS[mode])
        for each in asked
    ]


@pytest.mark.parametrize(
    ("name", "mode", "bits"),
    [
        (None, "sampled", None),
        ("prompt-lookup", "greedy", 8),
        ("draft-model", "sampled", None),
        ("eagle3", "sampled", None),
    ],
)
def test_rows_decode_as_they_do_alone(name: str | None, mode: str, bits: int | None) -> None:
    asked = list(islice(random_requests(61, seed=6, max_prompt=150, max_tokens=40), 8))
    asked.append(SoakRequest([*asked[7].prompt, 5, 6, 7], 9, 1))
    target = Decoder(network(), cache_bits=bits, paged=True)
    batch = ContinuousBatch(target, maker(name), make_rule(), sampling=SAMPLINGS[mode], rows=3)
    assert decoded(batch, asked) == alone(name, asked, mode, bits)
    assert batch.reused_tokens > 0
    batch.close()


def test_a_short_row_does_not_hold_the_slots_of_a_long_one() -> None:
    target = Decoder(network(), paged=True)
    memory = (832 + 6 * 128) * target.slot_bytes
    batch = ContinuousBatch(
        target, None, make_rule(), sampling=SAMPLINGS["greedy"], rows=8, memory=memory, prefix_memory=None
    )
    long = SoakRequest([place % 57 + 4 for place in range(750)], 12, 0)
    asked = [long, *islice(random_requests(61, seed=4, max_tokens=20), 9)]
    numbers = [batch.add(each.prompt, each.limit, seed=each.seed) for each in asked]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    most = 0
    while not batch.idle:
        for step in batch.round():
            found[step.row] += step.emitted
        most = max(most, batch.active)
        assert batch.cache_bytes <= memory
        assert target.cache.bytes <= memory + PAGE * target.slot_bytes, "but for the page of empty rows"
    assert most >= 7, "of a rectangle there would be one row"
    assert [found[number] for number in numbers] == alone(None, asked, "greedy")
    batch.close()


def test_a_part_of_a_row_is_read_from_its_pages() -> None:
    target, alike = Decoder(network(), paged=True), Decoder(network())
    text = [place % 57 + 4 for place in range(4 * PAGE)]
    for each in (target, alike):
        each.open(SAMPLINGS["greedy"])
        each.arrange([-1, -1], 8 * PAGE)
        for _ in each.enter(lambda: 1, text):
            pass
    for start, stop in ((0, 5), (PAGE - 1, PAGE + 1), (PAGE, 2 * PAGE), (PAGE + 3, 3 * PAGE + 7)):
        torch.testing.assert_close(
            target.cache.read(start, stop, slice(1, 2)), alike.cache.read(start, stop, slice(1, 2))
        )


def test_more_pages_than_were_provided() -> None:
    asked = list(islice(random_requests(61, seed=8, max_prompt=150, max_tokens=60), 5))
    target = Decoder(network(), paged=True)
    batch = ContinuousBatch(target, maker("prompt-lookup"), make_rule(), sampling=SAMPLINGS["greedy"], rows=3)
    target.cache.provide = lambda rows, slots: PagedCache._enlarge(target.cache, 3)  # type: ignore[method-assign, arg-type]
    assert decoded(batch, asked) == alone(None, asked, "greedy")
    assert target.cache.store.shape[1] > 3
    batch.close()


def test_lengths_are_not_counted_where_pages_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting waits for a device."""
    target = Decoder(network(), paged=True)
    batch = ContinuousBatch(target, None, make_rule(), sampling=SAMPLINGS["greedy"], rows=2)
    batch.add([1, 2, 3], 20)
    batch.round()
    cache = target.cache
    assert isinstance(cache, PagedCache)
    monkeypatch.setattr(cache, "_count", lambda: pytest.fail("counted"))
    (held,) = [row for row, pages in enumerate(cache._held) if pages]
    pages = len(cache._held[held]) + len(cache._unused)
    cache.reserve(pages * PAGE - cache.rows.host[held])
    assert not cache._unused and len(cache._held[held]) == pages
    batch.close()


def test_a_common_beginning_is_in_the_store_once() -> None:
    common = [place % 57 + 4 for place in range(150)]
    asked = [SoakRequest([*common, token], 8, 0) for token in (5, 6, 7, 8)]
    target = Decoder(network(), paged=True)
    batch = ContinuousBatch(target, None, make_rule(), sampling=SAMPLINGS["greedy"], rows=4)
    assert decoded(batch, asked) == alone(None, asked, "greedy")
    assert batch.reused_tokens == 3 * len(common)
    used = target.cache.store.shape[1] - 1 - len(target.cache._unused)  # type: ignore[attr-defined]
    assert used == 6, "two whole pages, and the third of each request"
    batch.close()


@pytest.mark.skipif(native.library() is None, reason="needs the compiled kernels")
def test_compiled_passes_read_and_write_pages() -> None:
    config = replace(CONFIG, hidden_size=64, heads=2, kv_heads=1, head_dim=32, intermediate_size=96)
    target, drafting = (Decoder.random(config, seed, dtype=torch.bfloat16).network for seed in (1, 2))
    asked = [SoakRequest([place % 57 + 4 for place in range(size)], 12, size) for size in (70, 5)]
    found = []
    for paged in (False, True):
        batch = ContinuousBatch(
            Decoder(target, paged=paged),
            lambda: make_drafter("draft-model", model=Decoder(drafting, paged=paged), length=3),  # noqa: B023
            make_rule(),
            sampling=SAMPLINGS["sampled"],
            rows=1,
        )
        tokens: dict[int, list[int]] = {batch.add(each.prompt, each.limit, seed=each.seed): [] for each in asked}
        for step in batch:
            tokens[step.row] += step.emitted
        found.append([tokens[number] for number in sorted(tokens)])
        batch.close()
    assert found[0] == found[1]
