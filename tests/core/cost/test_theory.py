"""The theory of speed: formulas against simulation, inversions against what they invert, fits against known costs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.cost import theory
from outrider.core.cost.theory import (
    Machine,
    PassCost,
    Workload,
    best_length,
    break_even,
    decoder,
    expected_tokens,
    fit_pass_cost,
    free_tokens,
    intensity,
    measure,
    pass_seconds,
    predict,
    speedup,
)
from outrider.core.errors import InvalidOption

chance = st.floats(0, 1)
length = st.integers(0, 20)
cost = st.floats(0, 2)
verify = st.floats(0.5, 5)


def simulate(chances: list[float], rounds: int) -> np.ndarray:
    """Tokens of each round: guesses are accepted one after the other until the first fails."""
    passed = np.random.default_rng(0).random((rounds, len(chances))) < np.array(chances)
    return 1 + np.cumprod(passed, axis=1).sum(axis=1)


@pytest.mark.parametrize("chances", [[0.8] * 5, [0.3] * 8, [0.9, 0.5, 0.7, 0.1], [0.0, 1.0], [1.0] * 3])
def test_expected_tokens_is_what_a_simulation_counts(chances: list[float]) -> None:
    tokens = simulate(chances, 40_000)
    error = 5 * tokens.std() / math.sqrt(len(tokens)) + 1e-12
    assert expected_tokens(chances, len(chances)) == pytest.approx(tokens.mean(), abs=error)
    if len(set(chances)) == 1:
        assert expected_tokens(chances[0], len(chances)) == pytest.approx(tokens.mean(), abs=error)


@settings(deadline=None)
@given(st.floats(0, 0.999), length, cost)
def test_the_published_formulas(a: float, k: int, c: float) -> None:
    assert expected_tokens(a, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a), rel=1e-9)
    assert speedup(a, k, c) == pytest.approx((1 - a ** (k + 1)) / ((1 - a) * (k * c + 1)), rel=1e-9)


@settings(deadline=None)
@given(length)
def test_full_acceptance_needs_no_special_case(k: int) -> None:
    assert expected_tokens(1.0, k) == k + 1
    assert expected_tokens(1, k) == k + 1


@settings(deadline=None)
@given(chance, length)
def test_acceptance_by_position_agrees_with_a_single_rate(a: float, k: int) -> None:
    assert expected_tokens([a] * (k + 2), k) == expected_tokens(a, k)


def test_speedup_is_what_a_simulated_clock_shows() -> None:
    a, k, c, t = 0.7, 4, 0.15, 1.3
    tokens = simulate([a] * k, 40_000)
    plain, speculative = tokens.sum() * 1.0, len(tokens) * (k * c + t)
    assert plain / speculative == pytest.approx(speedup(a, k, c, t), rel=0.01)


@settings(deadline=None)
@given(chance, cost, st.floats(0, 0.3))
def test_best_length_beats_every_other(a: float, c: float, slope: float) -> None:
    def passes(tokens: int) -> float:
        return 7.0 * (1 + slope * tokens)  # in any unit

    found, value = best_length(a, c, passes, max_length=12)
    others = [speedup(a, k, c, passes(k + 1) / passes(1)) for k in range(13)]
    assert value == pytest.approx(max(others))
    assert others[found] == pytest.approx(max(others))
    assert found == 0 or value > 1


def test_best_length_is_limited_by_the_known_positions() -> None:
    assert best_length([0.9, 0.9], 0.01) == (2, speedup(0.9, 2, 0.01))
    assert best_length(0.9, 0.01, max_length=0) == (0, 1.0)
    assert best_length(0.3, 0.5) == (0, 1.0)


def test_best_length_finds_the_global_maximum() -> None:
    steps = {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 2.0}  # a kernel for one token, another for up to five
    assert best_length(1.0, 0.0, lambda q: steps[q], max_length=4) == (4, 2.5)


@settings(deadline=None)
@given(st.integers(1, 16), st.floats(0.01, 2), verify)
def test_break_even_is_where_the_speedup_crosses_one(k: int, c: float, t: float) -> None:
    a = break_even(k, c, t)
    if a == 0:
        assert speedup(0.0, k, c, t) >= 1
    elif math.isinf(a):
        assert speedup(1.0, k, c, t) < 1
    else:
        assert speedup(a, k, c, t) == pytest.approx(1)
        assert speedup(max(a - 1e-3, 0), k, c, t) < 1


@settings(deadline=None)
@given(st.floats(0.001, 0.999))
def test_one_guess_pays_if_its_acceptance_exceeds_its_cost(c: float) -> None:
    assert break_even(1, c) == pytest.approx(c)


@settings(deadline=None)
@given(
    st.lists(chance, min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(0.1, 2),
    st.floats(1, 8),
    st.floats(0, 0.1),
)
def test_prediction_agrees_with_the_formula(a: list[float], c: float, floor: float, knee: float, slope: float) -> None:
    k, passes = len(a), PassCost(floor, slope, knee)
    found = predict(expected_tokens(a, k), k, passes, draft=k * c * passes(1))
    assert found.speedup == pytest.approx(speedup(a, k, c, passes.relative(k + 1)))
    assert found.tokens_per_second * passes(1) == pytest.approx(found.speedup)


def test_bookkeeping_counts_in_the_prediction() -> None:
    passes = PassCost(2.0, 0.0, 1.0)
    assert predict(3.0, 4, passes, draft=1.0, rest=1.0).speedup == 1.5


@settings(deadline=None)
@given(st.floats(1e-4, 10), st.floats(0, 4), st.floats(1, 30))
def test_fit_recovers_a_pass_cost(floor: float, steepness: float, knee: float) -> None:
    true = PassCost(floor, floor * steepness, knee)
    found = fit_pass_cost([(q, true(q)) for q in range(1, 41)])
    for q in range(1, 60):
        assert found(q) == pytest.approx(true(q), rel=1e-6)
    if steepness > 0.01:
        assert found.knee == pytest.approx(knee, abs=1e-4)


MEASURED = {  # milliseconds of SmolLM2-135M on two cores, by precision
    "bfloat16": {1: 14.3, 4: 14.5, 8: 17.4, 16: 19.2, 32: 25.4},
    "int8": {1: 8.3, 4: 8.1, 8: 12.7, 16: 20.6, 32: 36.9},
    "int4": {1: 7.1, 4: 8.4, 8: 12.4, 16: 20.5, 32: 35.2},
}


@pytest.mark.parametrize("precision", MEASURED)
def test_fit_describes_a_real_model(precision: str) -> None:
    times = MEASURED[precision]
    found = fit_pass_cost(list(times.items()))
    assert found.error < 0.03
    assert all(abs(found(q) / t - 1) < 0.06 for q, t in times.items())


def test_fit_is_constant_if_longer_passes_seem_faster() -> None:
    found = fit_pass_cost([(1, 3.0), (2, 2.0), (4, 1.0)])
    assert found.slope == 0 and 1 < found(1) == found(8) < 3 and found.error > 0.2


def test_the_best_draft_depends_on_the_weights() -> None:
    best = {name: best_length(0.8, 0.05, fit_pass_cost(list(times.items())))[0] for name, times in MEASURED.items()}
    assert best["bfloat16"] > best["int8"] > 0
    assert best["bfloat16"] > best["int4"] > 0


def test_fit_finds_the_best_knee() -> None:
    rng = np.random.default_rng(3)
    points = [(q, float((2 + 0.3 * max(0, q - 6)) * rng.normal(1, 0.03))) for q in (1, 2, 3, 4, 6, 8, 12, 16, 24)]
    found = fit_pass_cost(points)
    q, t = np.array(points).T
    for knee in np.linspace(1, 20, 400):
        columns = np.stack([np.ones_like(q), np.maximum(q - knee, 0)], 1) / t[:, None]
        weights = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
        assert np.sqrt(np.mean((columns @ weights - 1) ** 2)) >= found.error - 1e-9


def test_fit_of_noise_alone_is_flat() -> None:
    found = fit_pass_cost([(1, 1.02), (4, 1.0), (16, 0.98)])
    assert found.slope == 0
    assert found(100) == pytest.approx(1.0, abs=0.02)


H200 = Machine(bandwidth=4.8e12, flops=790e12)
WORK = Workload(weight_bytes=16e9, flops_per_token=16e9)
LLAMA = {"weight_bytes": 16e9, "layers": 32, "width": 4096, "kv_width": 1024}


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 256), st.floats(0, 1e9))
def test_roofline_is_the_longer_of_reading_and_arithmetic(tokens: int, batch: int, cache: float) -> None:
    work = Workload(16e9, 16e9, kv_bytes=cache)
    free = free_tokens(H200, work, batch)
    slower = pass_seconds(H200, work, tokens, batch) > pass_seconds(H200, work, 1, batch) * (1 + 1e-9)
    assert slower == (tokens > max(free, 1) * (1 + 1e-9))
    assert (intensity(work, tokens, batch) > H200.ridge) == (tokens > free)


def test_verification_is_free_up_to_the_ridge() -> None:
    assert free_tokens(H200, WORK) == pytest.approx(H200.ridge)  # two bytes and two operations a parameter
    assert pass_seconds(H200, WORK, 100) == pytest.approx(16e9 / 4.8e12)
    assert pass_seconds(H200, WORK, 1000) == pytest.approx(1000 * 16e9 / 790e12)


def test_long_contexts_keep_verification_free_in_large_batches() -> None:
    short, long = decoder(8e9, **LLAMA), decoder(8e9, **LLAMA, context=32_768)
    assert free_tokens(H200, short, 512) < 1
    assert free_tokens(H200, long, 512) > 10


def test_decoder_counts_weights_attention_and_cache() -> None:
    work = decoder(8e9, **LLAMA, context=1000)
    assert work.kv_bytes == 2 * 32 * 1000 * 1024 * 2
    assert work.flops_per_token == 16e9 + 4 * 32 * 1000 * 4096


def test_launches_are_added() -> None:
    machine = Machine(1e9, 1e9, launch=1e-3)
    assert pass_seconds(machine, Workload(1e9, 1.0, operations=500), 1) == pytest.approx(1.5)


def test_measure_turns_seconds_into_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "_SMALLER", (1 << 20, 64))
    ran = []

    def stopwatch(run: Callable[[], object], device: torch.device, seconds: float) -> float:
        ran.append(run())
        return {1: 64e-6, 2: 0.5, 3: 0.02, 4: 0.01, 5: 0.03}[len(ran)]

    monkeypatch.setattr(theory, "_fastest", stopwatch)
    machine = measure("cpu", torch.bfloat16)
    assert machine.launch == pytest.approx(1e-6)
    assert machine.flops == pytest.approx(2 * 64**3 / 0.5)
    assert machine.bandwidth == pytest.approx((1 << 20) / 0.01)
    assert machine.ridge == pytest.approx(machine.flops / machine.bandwidth)
    assert (machine.device, machine.dtype) == ("cpu", "bfloat16")
    for other in (ran[3], ran[4][0]):  # all ways of streaming compute the same
        torch.testing.assert_close(ran[2][0], other)


def test_measure_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "_SMALLER", (1 << 20, 64))
    machine = measure(seconds=0.01)
    assert 1e6 < machine.bandwidth < 1e14
    assert 1e6 < machine.flops < 1e16
    assert 0 < machine.launch < 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_measure_on_a_gpu() -> None:
    machine = measure("cuda", torch.bfloat16, seconds=0.2)
    assert 1e10 < machine.bandwidth < 1e14
    assert 1e11 < machine.flops < 1e16
    assert machine.ridge > 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: expected_tokens(0.5, -1), "length is -1"),
        (lambda: expected_tokens(1.2, 1), "acceptance 1.2"),
        (lambda: expected_tokens(float("nan"), 1), "acceptance nan"),
        (lambda: expected_tokens([0.5, 0.5], 3), "2 positions"),
        (lambda: speedup(0.5, 1, -0.1), "cost=-0.1"),
        (lambda: predict(6.0, 4, PassCost(1, 0, 1), 0.0), "nodes \\+ 1"),
        (lambda: fit_pass_cost([(4, 1.0), (4, 1.1)]), "two different lengths"),
        (lambda: fit_pass_cost([(1, 0.0), (4, 1.1)]), "seconds above 0"),
        (lambda: pass_seconds(H200, WORK, 0), "tokens=0"),
        (lambda: measure(dtype=torch.int8), "floating-point"),
    ],
)
def test_errors_say_what_was_given(call: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidOption, match=says):
        call()
