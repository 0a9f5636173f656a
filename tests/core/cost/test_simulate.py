"""Simulation: a made-up device is recovered from two of its traces and predicts the others; every result says that
it is a simulation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from outrider.core.cost.simulate import DEVICES, WORD, Device, Model, Shape, Workload, fit, shared, simulate, unpacking
from outrider.core.errors import InvalidOption
from outrider.core.trace import Step, Times

MODEL = Model(270e6, 270e6, 30)
HERE = Device("made up", 60e9, 1.4e12, call=4e-4, step=3e-4, node=2e-5, overlap=1.0)
SHARE = 0.1


def steps(count: int, length: int, accepted: int, *, model: Model = MODEL, small: bool = True) -> list[Step]:
    """A chain each step, as long as that machine takes for it."""
    drafting = length * HERE.seconds(model.share(SHARE, 3), 1) if small else 0.0
    return [
        Step(
            row=0,
            index=number,
            drafted=(0,) * length,
            parents=tuple(range(-1, length - 1)),
            emitted=(0,) * (accepted + 1),
            cost=1 + SHARE * length * small,
            times=Times(draft=drafting, score=HERE.seconds(model, length + 1), rest=HERE.step + length * HERE.node),
        )
        for number in range(count)
    ]


def measured(drafted: list[Step], plain: list[Step]) -> float:
    def pace(made: list[Step]) -> float:
        return sum(len(one.emitted) for one in made) / sum(one.times.total for one in made)

    return pace(drafted) / pace(plain)


def test_a_device_is_recovered_from_two_traces() -> None:
    plain = steps(40, 0, 0, small=False)
    found = fit("here", MODEL, plain, steps(40, 4, 2))
    for name in ("bandwidth", "flops", "call", "step", "node"):
        assert getattr(found, name) == pytest.approx(getattr(HERE, name), rel=1e-6), name
    few = replace(MODEL, weight_bytes=98e6, unpacking=(2.3, 0.04))
    cases = {
        "longer": (MODEL, steps(20, 8, 3), 3),
        "without a model": (MODEL, steps(20, 6, 2, small=False), 0),
        "fewer bits": (few, steps(20, 4, 2, model=few), 3),
    }
    for name, (model, made, layers) in cases.items():
        base = steps(20, 0, 0, model=model, small=False)
        told = simulate(found, model, Workload.of(name, made, layers=layers))
        assert told.speedup == pytest.approx(measured(made, base), rel=1e-6), name


def test_a_fit_is_robust_to_slow_steps() -> None:
    plain, drafted = steps(40, 0, 0, small=False), steps(40, 4, 2)
    plain[3] = replace(plain[3], times=replace(plain[3].times, score=1.0))
    drafted[7] = replace(drafted[7], times=replace(drafted[7].times, draft=1.0))
    found = fit("here", MODEL, plain, drafted)
    assert found.bandwidth == pytest.approx(HERE.bandwidth, rel=1e-6)
    assert found.call == pytest.approx(HERE.call, rel=1e-6)


def test_quantized_passes_take_their_matrices_time() -> None:
    few = replace(MODEL, weight_bytes=90e6)
    whole = {count: HERE.seconds(MODEL, count) - HERE.call for count in (1, 5)}
    assert unpacking(whole, whole, 1.0) == (1.0, 0.0)
    slow = {count: 0.9 * taken + 2e-4 * (count - 1) for count, taken in whole.items()}
    found = replace(few, unpacking=unpacking(slow, whole, 3.0))
    reading = MODEL.weight_bytes / HERE.bandwidth
    assert found.unpacking[0] == pytest.approx(2.7)  # 0.9 of the time for a third of the bytes
    longer = HERE.seconds(found, 5) - HERE.seconds(found, 1)
    assert longer == pytest.approx((slow[5] - slow[1] - whole[5] + whole[1]) * reading / whole[1] + 4 * 270e6 / 1.4e12)


def test_a_drafter_costs_what_it_reads() -> None:
    tree = Step(row=0, index=0, drafted=(1, 2, 3), parents=(-1, -1, 0), emitted=(1, 2), cost=1.1)
    chain = Step(row=0, index=1, drafted=(1, 2, 3), parents=(-1, 0, 1), emitted=(1,), cost=1.3)
    nothing = Step(row=0, index=2, emitted=(1,))
    work = Workload.of("any", [tree, chain, nothing], layers=2)
    assert [one.passes for one in work.shapes] == [1, 3, 0] and work.tokens_per_pass == pytest.approx(4 / 3)
    assert Workload.of("lookup", [replace(chain, cost=1.0)]).shapes[0].passes == 0
    with pytest.raises(InvalidOption, match="no steps"):
        Workload.of("none", [])


def test_a_device_is_a_roofline_with_constant_times() -> None:
    sharp = Device("d", 1e12, 1e14, layer=1e-5, overlap=1e3)
    ridge = sharp.flops / sharp.bandwidth * MODEL.weight_bytes / MODEL.flops_per_token
    assert sharp.seconds(MODEL, ridge / 10) == pytest.approx(MODEL.weight_bytes / 1e12 + 30e-5)
    assert sharp.seconds(MODEL, ridge * 10) == pytest.approx(10 * MODEL.weight_bytes / 1e12 + 30e-5)
    times = [sharp.seconds(MODEL, tokens) for tokens in (1, 8, 64, 512)]
    assert all(one <= other for one, other in pairwise(times))
    four = shared(sharp, 4, link=1e11, hop=1e-6)
    alone, together = sharp.seconds(MODEL, 1), four.seconds(MODEL, 1, 576)
    exchanged = 2 * 30 * (1e-6 + 2 * 576 / 1e11)
    assert together == pytest.approx((alone - 30e-5) / 4 + 30e-5 + exchanged)
    with pytest.raises(InvalidOption, match="1 or more"):
        shared(sharp, 0, 1.0, 0.0)


def test_a_drafter_can_run_on_another_device() -> None:
    work = Workload("w", tuple(Shape(4, 4, 0.4, 3) for _ in range(5)), layers=3)
    slow = Device("slow", 1e10, 1e12)
    quick = replace(slow, drafter=Device("quick", 1e13, 1e13))
    assert simulate(quick, MODEL, work).speedup > simulate(slow, MODEL, work).speedup
    assert simulate(quick, MODEL, work).plain == simulate(slow, MODEL, work).plain


def test_every_device_has_a_source_and_every_result_says_simulation() -> None:
    work = Workload("w", (Shape(4, 4, 0.4, 3),), layers=3)
    for device in DEVICES.values():
        assert len(device.source) > 20
        told = simulate(device, MODEL, work, width=576)
        assert WORD in str(told) and told.to_dict()["kind"] == WORD
        assert 0 < told.speedup < 4 and told.tokens_per_second > 0


def test_a_fit_requires_both_traces() -> None:
    with pytest.raises(InvalidOption, match="4 drafted tokens"):
        fit("here", MODEL, steps(3, 0, 0), steps(3, 5, 2))
    with pytest.raises(InvalidOption, match="smaller model"):
        fit("here", MODEL, steps(3, 0, 0), steps(3, 4, 2, small=False))
