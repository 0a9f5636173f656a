"""Prefix reuse in continuous batches: what one row has read is copied for the next, and changes no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from outrider.core.batching import ContinuousBatch
from outrider.core.constraint import Automaton
from outrider.core.distribution import Sampling
from outrider.core.engine.conditioned import ConditionedDecoder
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.prefixes import Prefixes
from outrider.core.engine.long_context import make_decoder
from outrider.core.engine.network import Network, random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config, Variant
from outrider.core.errors import InvalidOption
from outrider.core.kernels import native
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.protocol import PREFILL_CHUNK, Drafter
from outrider.core.testing.conformance import random_draft_head, trial_drafter
from outrider.core.testing.soak import SoakRequest, decode_alone

CONFIG = Config(
    vocabulary=61, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24, context=1024
)
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [3.0, 4.0, 6.0, 9.0]}
CONFIGS = {
    "plain": CONFIG,
    "windows": replace(CONFIG, variant=Variant(windows=(12, None))),
    "LongRoPE": replace(CONFIG, rope_scaling=("longrope", LONG | {"original_max_position_embeddings": 60})),
}
SYSTEM = [(7 * place) % 53 + 4 for place in range(50)]
PROMPTS = [
    *[[*SYSTEM, 9, 8, 7]] * 2,
    [*SYSTEM[:45], 9, 9, 9],  # differs within a block
    [*SYSTEM, 9, 8, 7, 6, 5, 4, 3, 2, 1, 9],
    SYSTEM[:20],
    [5, 6, 7],
    [*SYSTEM, 30],
    [30, *SYSTEM],
    *[[*SYSTEM, 9, 8, 7]] * 2,
]


@cache
def network(config: str = "plain") -> Network:
    return random_network(CONFIGS[config], 1)


def maker(name: str | None, config: str) -> Callable[[], Drafter] | None:
    if name is None:
        return None
    method = DRAFTERS[name]
    if method.draft_head is not None:
        head = random_draft_head(method, Decoder(network(config)), vocabulary=0)
        return lambda: method.make(head, **method.test_options[0])
    return lambda: trial_drafter(method, method.test_options[0], lambda: make_decoder(network(config)))


@cache
def alone(name: str | None, config: str, bits: int | None, sampling: Sampling) -> list[list[int]]:
    return [
        decode_alone(
            SoakRequest(prompt, 5, seed),
            make_decoder(network(config), cache_bits=bits),
            maker(name, config),
            make_rule(),
            sampling=sampling,
        )
        for seed, prompt in enumerate(PROMPTS)
    ]


WALK = Automaton({0: {token: token % 2 for token in range(61)}, 1: {token: token % 2 for token in range(4, 61, 3)}})
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=0.8)
PENALISED = Sampling(
    temperature=0.7, repetition_penalty=1.4, processors=(lambda ids, logits: logits.roll(ids.shape[1], -1),)
)
HELD = len(PROMPTS) * 64 * Decoder.random(CONFIG).slot_bytes
CASES: dict[str, tuple[Any, ...]] = {  # drafter, config, bits, sampling, memory, prefix memory
    "plain": (None, "plain", None, GREEDY, None, HELD),
    "sampled": ("prompt-lookup", "plain", None, SAMPLED, None, HELD),
    "penalised": (None, "plain", None, PENALISED, None, HELD),
    "constrained": ("prompt-lookup", "plain", None, replace(SAMPLED, constraint=WALK), None, HELD),
    "a draft model": ("draft-model", "plain", None, SAMPLED, None, HELD),
    "a trained drafter": ("eagle3", "plain", None, SAMPLED, None, 4 * HELD),
    "from active rows": (None, "plain", None, SAMPLED, None, 0),
    "little memory": (None, "plain", None, SAMPLED, HELD // 2, HELD),
    "8 bits": ("prompt-lookup", "plain", 8, GREEDY, None, HELD),
    "windows": ("prompt-lookup", "windows", None, GREEDY, None, HELD),
    "LongRoPE": ("prompt-lookup", "LongRoPE", None, GREEDY, None, HELD),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if number % 2 else case for number, case in enumerate(CASES)]
)
def test_reuse_changes_no_token(case: str) -> None:
    name, config, bits, sampling, memory, held = CASES[case]
    target = make_decoder(network(config), cache_bits=bits)
    batch = ContinuousBatch(
        target, maker(name, config), make_rule(), sampling=sampling, rows=3, memory=memory, prefix_memory=held
    )
    output: dict[int, list[int]] = {}
    for seed, prompt in enumerate(PROMPTS):
        output[batch.add(prompt, 5, seed=seed)] = []
    cancelled = batch.add([*SYSTEM, 40, 41], 5)
    rounds = 0
    while not batch.idle:
        for step in batch.round():
            output.setdefault(step.row, []).extend(step.emitted)
        rounds += 1
        if rounds == 3:
            batch.cancel(1)
        if memory is not None:
            assert batch.cache_bytes + batch.prefix_bytes <= memory
        assert batch.prefix_bytes <= held
    assert batch._prefixes is not None
    states = [block.hidden.values() for block in batch._prefixes._blocks]
    tokens = sum(len(block.tokens) for block in batch._prefixes._blocks)
    held_bytes = sum(tensor.nbytes for each in states for tensor in each)
    assert batch.prefix_bytes == held_bytes + tokens * target.slot_bytes or bits == 8
    expected = alone(name, config, bits, sampling)
    for number, tokens in enumerate(expected):
        assert output[number] == (tokens if number != 1 else tokens[: len(output[1])]), number
    assert output[cancelled]
    shared = sum(map(len, PROMPTS[1:])) - len(PROMPTS) - 108
    assert batch.reused_tokens >= (shared if name != "eagle3" else 100)
    if name == "draft-model":
        assert batch._drafter.model.prefixes.reused > 100  # type: ignore[attr-defined]
    batch.close()
    assert batch.prefix_bytes == 0


def test_a_long_prompt_beside_a_short_one_has_room_with_either_factors() -> None:
    prompt = [place % 57 + 4 for place in range(150)]
    wishes = [SoakRequest(prompt, 3, 0), SoakRequest(prompt[:58], 4, 0), SoakRequest(prompt, 4, 0)]
    batch = ContinuousBatch(make_decoder(network("LongRoPE")), None, make_rule(), sampling=GREEDY, rows=2)
    output: dict[int, list[int]] = {batch.add(wish.prompt, wish.limit): [] for wish in wishes}
    for step in batch:
        output[step.row] += step.emitted
    for number, wish in enumerate(wishes):
        one = make_decoder(network("LongRoPE"))
        assert output[number] == decode_alone(wish, one, None, make_rule(), sampling=GREEDY)


def test_an_answer_is_reused_in_the_next_turn() -> None:
    batch = ContinuousBatch(Decoder(network()), None, make_rule(), sampling=GREEDY, rows=2)
    text = [*SYSTEM, 9]
    batch.add(text, 20)
    text += [token for step in batch for token in step.emitted]
    assert batch.reused_tokens == 0 and batch.active == 0
    batch.add([*text, 5, 6], 9)
    tokens = [token for step in batch for token in step.emitted]
    assert batch.reused_tokens == len(text) - 1
    wanted = SoakRequest([*text, 5, 6], 9, 0)
    assert tokens == decode_alone(wanted, Decoder(network()), None, make_rule(), sampling=GREEDY)


def test_conditioned_rows_share_nothing() -> None:
    """What a token's keys and values are depends on the conditioning too."""

    def conditioned() -> ConditionedDecoder:
        target = ConditionedDecoder(network())
        target.set_conditioning(torch.randn(1, 80, 16, generator=torch.Generator().manual_seed(1)))
        return target

    batch = ContinuousBatch(conditioned(), None, make_rule(), sampling=Sampling(temperature=0), rows=1)
    numbers = [batch.add(PROMPTS[0], 5) for _ in range(2)]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    for step in batch:
        found[step.row] += step.emitted
    assert batch.reused_tokens == 0
    wish = SoakRequest(PROMPTS[0], 5, 0)
    alone = decode_alone(wish, conditioned(), None, make_rule(), sampling=Sampling(temperature=0))
    assert [found[number] for number in numbers] == [alone] * 2
    batch.close()


def test_a_whole_prompt_that_is_known_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [place % 57 + 4 for place in range(PREFILL_CHUNK + 100)]
    sizes: list[int] = []
    embed = Network.embed
    target = Decoder(network())
    monkeypatch.setattr(Network, "embed", lambda own, ids: (sizes.append(ids.shape[1]), embed(own, ids))[1])
    batch = ContinuousBatch(target, None, make_rule(), sampling=GREEDY, rows=4)
    numbers = [batch.add(prompt, 3) for _ in range(3)]
    numbers.append(batch.add([*prompt[: PREFILL_CHUNK - 2], 9, 9, 9, 9, 9, 9, 9], 3))
    emitted: dict[int, list[int]] = {number: [] for number in numbers}
    seen: list[int] = []
    while not batch.idle:
        for step in batch.round():
            emitted[step.row] += step.emitted
            seen.append(batch.reused(step.row))
    assert [size for size in sizes if size > 1] == [PREFILL_CHUNK, 99, 2, 4], "later chunks begin where all chunks do"
    assert batch.reused_tokens == 2 * (PREFILL_CHUNK + 99) + PREFILL_CHUNK - 2
    batch.round()
    assert batch.reused(numbers[0]) == 0, "it has ended"
    assert emitted[numbers[0]] == emitted[numbers[1]] == emitted[numbers[2]]
    off = ContinuousBatch(target, None, make_rule(), sampling=GREEDY, rows=4, prefix_memory=None, patience=0)
    off.add(prompt, 3), off.add(prompt, 3)
    assert sum(len(step.emitted) for step in off) == 6 and off.reused_tokens == off.prefix_bytes == 0
    with pytest.raises(InvalidOption, match="prefix_memory"):
        ContinuousBatch(target, None, make_rule(), prefix_memory=-1)


@pytest.mark.skipif(native.library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize(("bits", "paged"), [(None, False), (8, False), (None, True)])
def test_compiled_passes_give_the_same_bits(bits: int | None, paged: bool) -> None:
    config = replace(CONFIG, hidden_size=64, heads=2, kv_heads=1, head_dim=32, intermediate_size=96)
    shared = Decoder.random(config, 1, dtype=torch.bfloat16).network

    def begun() -> Decoder:
        target = Decoder(shared, cache_bits=bits, paged=paged)
        target.open(Sampling(temperature=0), frozenset({"layer.0", "last"}))
        target.arrange([-1, -1], 700)
        target.prefixes.restrict(1 << 30)
        return target

    def entered(target: Decoder, row: int, prompt: list[int]) -> dict[str, torch.Tensor]:
        reading = target.enter(lambda: row, prompt)
        while True:
            try:
                next(reading)
            except StopIteration as end:
                return dict(end.value.hidden)

    text = [(11 * place) % 57 + 4 for place in range(620)]
    for first, cut in ((620, 9), (300, 37), (600, 512), (610, 530), (64, 63)):
        one, other, prompt = begun(), begun(), [*text[:cut], *text[5:90]]
        entered(one, 0, text[:first])
        if cut % 2:  # from the blocks instead of the row
            one.prefixes.retain(0, text[:first])
            one.leave(0)
        found, wanted = entered(one, 1, prompt), entered(other, 1, prompt)
        assert one.prefixes.reused == cut and other.prefixes.reused == 0
        length = len(prompt) - 1
        assert torch.equal(*(target.cache.read(0, length, slice(1, 2)) for target in (one, other)))
        assert all(torch.equal(states, wanted[tap]) for tap, states in found.items())


def test_the_least_recently_used_blocks_are_dropped() -> None:
    cache = Cache((1, 2, 4), torch.float32, torch.device("cpu"))
    cache.open()
    cache.arrange([-1, -1], 256)
    cache.store.normal_()
    prefixes = Prefixes(cache)
    prefixes.restrict(128 * cache.slot_bytes)

    def kept(text: list[int]) -> None:
        prefixes.enter(0, text)
        cache.set_row(0, len(text), 0)
        prefixes.retain(0, text)
        prefixes.leave(0)

    def known(text: list[int]) -> int:
        count, _ = prefixes.enter(1, text)
        prefixes.leave(1)
        return count

    one, two, three = [[number] * 10 + list(range(50)) for number in (1, 2, 3)]
    kept(one), kept(two)
    assert known([*one, 9]) == known([*two, 9]) == 60 and prefixes.bytes == 120 * cache.slot_bytes
    assert known([*one[:40], 99, 98]) == 40, "a block is used in part"
    kept(three)
    assert [known([*text, 9]) for text in (three, one, two)] == [60, 60, 0]
    kept([*three, 5, 6])  # the shorter last block goes
    assert prefixes.bytes <= 128 * cache.slot_bytes and known([*three, 5, 6, 7]) == 62
    prefixes.restrict(32 * cache.slot_bytes)
    assert known([*three, 5, 6, 7]) == 32 and prefixes.bytes == 32 * cache.slot_bytes
    prefixes.restrict(0)
    assert not prefixes.bytes and not known([*three, 9])


def test_answers_are_not_kept_where_prompts_have_other_numbers() -> None:
    cache, prompt = Cache((1, 2, 4), torch.float32, torch.device("cpu")), list(range(30))
    cache.open()
    cache.arrange([-1, -1], 256)
    cache.store.normal_()
    for answers in (True, False):
        prefixes = Prefixes(cache, answers=answers)
        prefixes.restrict(256 * cache.slot_bytes)
        prefixes.enter(0, prompt)
        cache.set_row(0, 50, 0)
        prefixes.retain(0, list(range(50)))
        prefixes.leave(0)
        assert prefixes.enter(1, list(range(60)))[0] == (50 if answers else 29)  # the last token is read with a draft
