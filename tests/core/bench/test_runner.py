"""The benchmark harness: alternation, pairing, and statistics against values computed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from outrider.core.bench.runner import (
    PLAIN,
    Bench,
    Contender,
    Item,
    Outcome,
    Run,
    bootstrap,
    depth,
    figures,
    note,
    pooled,
    predicted,
    row,
    undrafted,
)
from outrider.core.bench.timing import PeakMemory, pass_cost, timed
from outrider.core.cost.theory import PassCost
from outrider.core.decode import decode
from outrider.core.device import lifetime_peak, peak_memory, resident_memory
from outrider.core.distribution import Sampling
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.methods import make_drafter, make_rule
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step, Times

ITEMS = [Item("a", "one", [1, 2, 3]), Item("b", "two", [2, 1]), Item("c", "two", [3, 3, 1])]


def step(index: int, drafted: int, accepted: int, *, draft: float = 0.0, score: float = 0.1) -> Step:
    """A step with a chain of which the first tokens were accepted."""
    return Step(
        row=0,
        index=index,
        drafted=tuple(range(drafted)),
        parents=tuple(range(-1, drafted - 1)),
        emitted=tuple(range(accepted + 1)),
        sources=(*["drafted"] * accepted, "bonus"),
        times=Times(draft=draft, score=score),
    )


def run(name: str, item: Item, seconds: float, steps: Sequence[Step] = (), *, tokens: int = 10, repeat: int = 0) -> Run:
    emitted = tuple(token for one in steps for token in one.emitted) or tuple(range(tokens))
    return Run(name, item, repeat, Outcome(emitted, seconds, tuple(steps), 5))


def contender(name: str, drafter: str | None = None, **options: object) -> Contender:
    """A contender that runs the real loop on a table."""
    target = TableTarget(7, seed=3, sharpness=3.0)

    def call(item: Item) -> tuple[list[int], list[Step]]:
        steps = decode(
            target,
            make_drafter(drafter),
            make_rule("exact"),
            [item.content],
            sampling=Sampling(temperature=0),
            max_new_tokens=20,
        )
        every = list(steps)
        return [token for one in every for token in one.emitted], every

    return Contender(name, lambda item: Outcome(*timed(lambda: call(item))), **options)  # type: ignore[arg-type]


def fake(name: str, said: list[str], seconds: float = 1.0) -> Contender:
    def call(item: Item) -> Outcome:
        said.append(f"{name}{item.id}")
        return Outcome((1,), seconds)

    return Contender(name, call)


def test_contenders_alternate_and_the_first_rotates() -> None:
    said: list[str] = []
    bench = Bench([fake(PLAIN, said), fake("x", said), fake("y", said)], ITEMS[:2], repeat=2)
    assert len(list(bench.go())) == bench.turns == 15
    assert said[:3] == ["plaina", "xa", "ya"], "warm-up"
    assert said[3:] == [
        *["plaina", "xa", "ya"],
        *["xb", "yb", "plainb"],
        *["ya", "plaina", "xa"],
        *["plainb", "xb", "yb"],
    ]
    assert len(bench.runs) == 12, "the warm-up is not counted"
    assert {(one.contender, one.item.id, one.repeat) for one in bench.runs} == {
        (name, item, repeat) for name in (PLAIN, "x", "y") for item in "ab" for repeat in (0, 1)
    }


def test_runs_so_far_can_be_read_after_an_interruption() -> None:
    bench = Bench([contender(PLAIN), contender("prompt-lookup", "prompt-lookup")], ITEMS)
    for count, _ in enumerate(bench.go(), 1):
        if count == 5:
            break
    assert len(bench.runs) == 3
    rows = [row(bench, one) for one in bench.contenders]
    assert [one["prompts"] for one in rows] == [1, 2]
    json.dumps(rows, allow_nan=False)


def test_a_failing_contender_is_skipped_only_if_optional() -> None:
    calls = []

    def fail(item: Item) -> Outcome:
        calls.append(item.id)
        if item.id == "b":
            raise OutriderError("gone")
        return Outcome((1,), 1.0)

    bench = Bench([fake(PLAIN, []), Contender("x", fail, optional=True)], ITEMS)
    list(bench.go())
    assert bench.failed == {"x": "gone"}
    assert calls == ["a", "a", "b"]
    assert len(bench.of(PLAIN)) == 3
    with pytest.raises(OutriderError, match="gone"):
        list(Bench([fake(PLAIN, []), Contender("x", fail)], ITEMS).go())


@pytest.mark.parametrize(
    ("names", "items", "repeat", "words"),
    [
        ([PLAIN], [], 1, "no items"),
        ([PLAIN], ITEMS, 0, "repeat is 0"),
        (["x"], ITEMS, 1, "'plain' be first"),
        ([PLAIN, "x", "x"], ITEMS, 1, "names must differ"),
        ([], ITEMS, 1, "'plain' be first"),
    ],
)
def test_what_makes_no_sense_is_refused(names: list[str], items: list[Item], repeat: int, words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        Bench([fake(name, []) for name in names], items, repeat)


def test_speeds_are_medians_of_prompts_and_ratios_are_paired_within_a_round() -> None:
    # the machine is three times slower in round 1: plain and drafted alike, so the ratio does not change
    plain = [run(PLAIN, item, 2.0 * slow, repeat=r) for r, slow in enumerate((1, 3)) for item in ITEMS]
    each = (1.0, 0.5, 2.0)
    mine = [
        run("x", item, one * slow, repeat=r)
        for r, slow in enumerate((1, 3))
        for item, one in zip(ITEMS, each, strict=True)
    ]
    found = figures(mine, plain)
    assert found["speedup"] == pytest.approx(2.0)  # of 2, 4 and 1
    assert 1.0 <= found["speedup_low"] <= 2.0 <= found["speedup_high"] <= 4.0
    # per prompt the median of 10 / s and 10 / 3s is 20 / 3s: 6.67, 13.3, 3.33
    assert found["tokens_per_second"] == pytest.approx(20 / 3)
    assert found["tokens_per_second_low"] == pytest.approx(5.0)
    assert found["tokens_per_second_high"] == pytest.approx(10.0)
    assert found["throughput"] == pytest.approx(60 / 14)
    assert (found["prompts"], found["tokens"], found["seconds"]) == (3, 60, 14.0)
    assert figures(plain, plain)["speedup"] == 1.0
    assert found["memory"] == 5


def test_the_decode_speedup_excludes_the_prefill() -> None:
    # reading takes 9 s for both, ten tokens 1 s plainly and 0.5 s drafted, two a call
    plain = [run(PLAIN, ITEMS[0], 10.0, [step(number, 0, 0) for number in range(10)])]
    mine = [run("x", ITEMS[0], 9.5, [step(number, 1, 1) for number in range(5)])]
    found = figures(mine, plain)
    assert found["speedup"] == pytest.approx(10 / 9.5)
    assert found["decode_speedup"] == pytest.approx(2.0)
    stranger = [run("y", ITEMS[0], 5.0)]  # whose steps nobody saw
    assert figures(stranger, plain)["decode_speedup"] is None


def test_there_is_no_speedup_without_plain_runs() -> None:
    found = figures([run("x", ITEMS[0], 1.0)], [run(PLAIN, ITEMS[1], 1.0)])
    assert found["speedup"] is None
    assert found["tokens_per_pass"] is None, "nobody saw its steps"


def test_the_bootstrap_interval_has_its_coverage() -> None:
    assert bootstrap([[2.0], [2.0], [2.0]]) == (2.0, 2.0)
    assert bootstrap([[1.0], [3.0]]) == (1.0, 3.0)
    low, high = bootstrap([[1.0, 2.0, 3.0, 4.0, 5.0]])  # one prompt: its repeats are drawn again
    assert 1.0 <= low < 3.0 < high <= 5.0
    # the median of 99 prompts lies between order statistics 40 and 60 in 95 % of cases: binomial(99, 1/2)
    low, high = bootstrap([[float(value)] for value in range(99)])
    assert low == pytest.approx(40, abs=2)
    assert high == pytest.approx(58, abs=2)
    assert bootstrap([[1.0], [2.0], [3.0]]) == bootstrap([[1.0], [2.0], [3.0]])


def test_runs_with_equal_step_numbers_are_pooled() -> None:
    one = run("x", ITEMS[0], 1.0, [step(0, 2, 2), step(1, 2, 0), step(2, 0, 0)])
    two = run("x", ITEMS[1], 1.0, [step(0, 2, 1), step(1, 0, 0)])
    total = pooled([one, two])
    assert (total.tokens, total.target_passes) == (8, 5)
    assert total.tokens_per_pass == 8 / 5
    assert total.acceptance_rate == 3 / 6
    assert total.seconds == pytest.approx(0.5)
    assert total.by_position == pytest.approx((2 / 3, 1 / 3))
    assert undrafted([one.outcome.steps, two.outcome.steps]) == 0.0, "the last step of each had no room"
    assert undrafted([[step(0, 0, 0), step(1, 1, 1), step(2, 0, 0)]]) == 0.5
    assert pooled([]).tokens == 0


def test_the_depth_of_a_tree_is_its_longest_path() -> None:
    assert depth(Step(row=0, index=0, parents=(-1, -1, 0, 2, 1))) == 3
    assert depth(Step(row=0, index=0)) == 0


def test_the_prediction_by_hand() -> None:
    # pass cost 100 ms up to 2 tokens, 10 ms for each one more; drafting 20 ms; half of the first guesses are right,
    # and of the second ones behind a right one all
    steps = [step(0, 2, 2, draft=0.02), step(1, 2, 0, draft=0.02), step(2, 0, 0)]
    cost = PassCost(floor=0.1, slope=0.01, knee=2)
    tokens, seconds = 2 * (1 + 0.5 + 0.5) + 1, 2 * (0.11 + 0.02) + 0.1
    assert predicted([run("x", ITEMS[0], 1.0, steps)], cost) == pytest.approx(tokens / seconds)


@pytest.mark.parametrize(
    ("steps", "speedup", "words"),
    [
        ([step(0, 0, 0), step(1, 0, 0)], 1.0, "switched off throughout"),
        ([step(0, 0, 0), step(1, 2, 2), step(2, 0, 0)], 1.2, "nothing drafted in 50% of steps"),
        ([step(0, 2, 2), step(1, 2, 2)], 1.5, ""),
        ([step(0, 2, 0), step(1, 2, 0)], 0.5, "leave it off (0% of drafted tokens accepted, a chain of 2 breaks even"),
        ([step(0, 2, 2, draft=9.0), step(1, 2, 0, draft=9.0)], 0.1, "no rate breaks even"),
    ],
)
def test_a_slow_drafter_gets_a_note(steps: list[Step], speedup: float, words: str) -> None:
    total = pooled([run("x", ITEMS[0], 1.0, steps)])
    found = {
        "drafter": "x",
        "speedup": speedup,
        "acceptance_rate": total.acceptance_rate,
        "undrafted": undrafted([steps]),
    }
    said = note(found, total, PassCost(floor=0.1, slope=0.05, knee=1))
    assert words in said if words else not said
    assert note(found | {"drafter": PLAIN}, total, None) == ""


def test_a_row_of_the_json_on_a_real_loop() -> None:
    bench = Bench([contender(PLAIN), contender("prompt-lookup", "prompt-lookup")], ITEMS, repeat=2)
    list(bench.go())
    same = dict.fromkeys("abc", "same")
    cost = PassCost(1e-3, 1e-5, 1)
    loops: Callable[[Sequence[int]], bool] = lambda tokens: len(set(tokens)) < 4  # noqa: E731
    looping = bench.looping(loops)
    quality: Callable[[Sequence[Run]], dict[str, object]] = lambda runs: {"count": len(runs)}  # noqa: E731
    plain, lookup = (
        row(bench, one, same=same, looping=looping, cost=cost, quality=quality)  # type: ignore[arg-type]
        for one in bench.contenders
    )
    wanted = {"drafter", "rule", "lossless", "tokens_per_pass", "acceptance_rate", "tokens_per_second", "speedup"}
    wanted |= {"speedup_low", "speedup_high", "identical", "quality", "equivalents_per_token", "memory"}
    assert wanted <= plain.keys() == lookup.keys()
    assert (plain["drafter"], lookup["drafter"]) == (PLAIN, "prompt-lookup")
    assert plain["tokens_per_pass"] == plain["speedup"] == plain["equivalents_per_token"] == 1.0
    assert lookup["tokens_per_pass"] == pytest.approx(1 / lookup["equivalents_per_token"])
    assert (plain["identical"], plain["near_ties"], plain["wrong"]) == (1.0, 0.0, 0.0)
    assert set(lookup["tasks"]) == {"one", "two"}
    assert lookup["tasks"]["two"]["prompts"] == 2
    assert lookup["prompts"] == 3
    left = 3 - len(looping)
    assert (lookup["without_looping"] or {"prompts": 0})["prompts"] == left
    assert plain["quality"] == {"count": 6}
    assert 0 < plain["predicted_tokens_per_second"] <= 1 / 1e-3  # the pass alone takes that long
    json.dumps([plain, lookup], allow_nan=False)


def test_a_row_of_another_engine_has_no_steps() -> None:
    bench = Bench([fake(PLAIN, []), Contender("vllm plain", lambda item: Outcome((1,), 0.5), engine="vllm")], ITEMS)
    list(bench.go())
    found = row(bench, bench.contenders[1])
    assert (found["engine"], found["drafter"], found["speedup"]) == ("vllm", "plain", 2.0)
    assert found["tokens_per_pass"] is None


def test_passes_and_memory_are_measured() -> None:
    cost = pass_cost(TableTarget(11, seed=1), [1, 2, 3], widths=(1, 2, 4), rounds=2)
    assert cost(1) > 0
    gauge = PeakMemory()
    gauge.start()
    assert gauge.read() > 1 << 20


def test_peak_memory_falls_back_to_the_process_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", nothing)
    monkeypatch.setattr(Path, "write_text", nothing)
    gauge = PeakMemory()
    gauge.start()
    assert gauge.read() == lifetime_peak() == resident_memory() == peak_memory() > 1 << 20
