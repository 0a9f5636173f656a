"""The cost of rounds by rows and tokens, and how rarely drafting is tried while it does not pay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.core.cost.break_even import Costs, DraftBudget, ModelDraftValue, RecentSpeed
from outrider.core.errors import InvalidOption

TEXT = "1:10 5:18 9:16 13:24 4x0:36 4x1:24 4x2:40 4x4:72 8x0:60 8x1:40 8x3:120"


def test_costs_of_one_row_are_interpolated_and_extrapolated() -> None:
    costs = Costs.parse("1:10 5:18 9:16 13:24")
    # 5 tokens took longer than 9: a wrong measurement
    assert [costs(1, tokens) for tokens in (1, 3, 5, 7, 9, 13, 17)] == [10, 13, 16, 16, 16, 24, 32]
    assert costs(3, 3) == costs(1, 9) and costs.rows == (1,), "several rows were not measured"


def test_costs_of_several_rows_are_interpolated() -> None:
    costs = Costs.parse(TEXT)
    assert [costs(4, tokens) for tokens in (1, 2, 3, 4, 5)] == [24, 40, 56, 72, 88]
    assert costs(6, 1) == pytest.approx(32) and costs(6, 2) == pytest.approx((40 + 80) / 2)
    assert costs(2, 1) == pytest.approx(10 + (24 - 10) / 3) and costs(16, 1) == pytest.approx(72)
    assert costs.ratio(4, 3) == pytest.approx(3) and costs.ratio(8, 2) == pytest.approx(3)


def test_the_overhead_is_what_guessing_adds_to_a_plain_round() -> None:
    costs = Costs.parse(TEXT)
    assert costs.overhead(4) == pytest.approx(0.5) == costs.overhead(8) == costs.overhead(20)
    assert 0 < Costs.parse("1:10 2:11").overhead(1) < 0.1, "not measured: a small default"
    assert Costs.parse("1:10 2:11 1x0:9").overhead(1) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "give tokens and milliseconds"),
        ("1:10", "at least two"),
        ("1:10 2:0", "times above 0"),
        ("0x1:3 0x2:4 1:1 2:2", "at least two"),
        ("4x1:10 4x2:11", "those of one row"),
    ],
)
def test_invalid_costs_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Costs.parse(text)


@pytest.mark.parametrize("cost", [0.0, 0.03, 0.4, 1.2, 5.0])
def test_failed_tries_cost_at_most_two_percent(cost: float) -> None:
    budget, rounds, spent = DraftBudget(), 0, 0.0
    while rounds < 3000:
        rounds += 1
        if budget.may_draft(cost, 8):
            budget.failed(cost)
            spent += cost
        if rounds in (60, 300, 3000):
            assert spent <= budget.initial + 0.02 * rounds
    assert spent / rounds < 0.021 and (cost == 0 or spent > 0)


def test_cheap_drafters_are_tried_at_once_and_expensive_ones_later() -> None:
    assert [DraftBudget().may_draft(cost, 4) for cost in (0.1, 0.5, 0.6)] == [True, True, False]


def test_drafting_continues_while_it_pays_and_ends_when_it_loses() -> None:
    budget = DraftBudget()
    for _ in range(50):
        assert budget.may_draft(0.4, 8)
        budget.succeeded()
        budget.add(0.3)
    assert budget.balance == budget.limit
    lost = 0
    while budget.may_draft(0.4, 8):
        budget.succeeded()
        budget.add(-0.5)
        lost += 1
    assert lost == 5 and not any(budget.may_draft(0.4, 8) for _ in range(40))


def test_fewer_rows_make_the_next_try_due() -> None:
    budget = DraftBudget()
    assert budget.may_draft(0.3, 32)
    budget.failed(0.3)
    assert not any(budget.may_draft(0.3, rows) for rows in (32, 30, 24, 17)), "half of the rows are not gone yet"
    assert budget.may_draft(0.3, 16)
    budget.failed(0.3)
    assert not budget.may_draft(0.3, 9)
    assert budget.may_draft(0.1, 1)


def long_run(choose: Callable[[RecentSpeed, list[float], list[float]], int]) -> float:
    """Tokens per plain round over alternating good and bad rounds, with the expected yield of the chosen number of
    guesses, at a cost of 0.3 for guessing and 0.04 per verified guess."""
    speed, tokens, time = RecentSpeed(), 0.0, 0.0
    for number in range(400):
        probabilities = [(0.8, 0.3)[number % 2] ** (node + 1) for node in range(12)]
        brought = [1 + sum(probabilities[:count]) for count in range(13)]
        took = [1.3 + 0.04 * count for count in range(13)]
        count = choose(speed, brought, took)
        speed.record(brought[count], took[count])
        tokens, time = tokens + brought[count], time + took[count]
    return tokens / time


def test_choosing_by_worth_beats_choosing_by_rate() -> None:
    def by_worth(speed: RecentSpeed, brought: list[float], took: list[float]) -> int:
        return max(range(13), key=lambda count: speed.worth(brought[count], took[count]))

    def by_rate(_: RecentSpeed, brought: list[float], took: list[float]) -> int:
        best = max(range(13), key=lambda count: brought[count] / took[count])
        return best if brought[best] > took[best] else 0

    best = max(long_run(lambda *_, count=count: count) for count in range(13))
    assert long_run(by_worth) > 1.005 * max(long_run(by_rate), best)


def test_the_recent_speed_is_at_least_plain_and_follows_the_rounds() -> None:
    speed = RecentSpeed(memory=8)
    assert speed.worth(1.0, 1.0) == 0
    for _ in range(20):
        speed.record(1.0, 2.0)
    assert speed.worth(1.5, 1.5) == 0
    for _ in range(20):
        speed.record(3.0, 1.5)
    assert -0.3 < speed.worth(2.0, 1.0) <= 0.1


def test_the_value_of_model_drafts_follows_queries_and_recovers() -> None:
    value = ModelDraftValue(rounds=1.5, tokens=2.4)
    for _ in range(60):
        value.record(1.0, 2.0)
    assert (value.tokens, value.rounds) == (pytest.approx(1.0, abs=0.01), pytest.approx(2.0, abs=0.01))
    for _ in range(100):
        value.skip()
    assert 1.5 < value.tokens < 2.4 and 1.5 < value.rounds < 1.9
    for _ in range(60):
        value.record(5.0, 1.5)
    before = value.tokens
    value.skip()
    assert value.tokens == before > 4.9


def test_the_cheap_overhead_is_at_most_the_whole_overhead() -> None:
    costs = Costs.parse("-1:11 0:15 1:10 2:11 8x1:20 8x2:25")
    assert (costs.cheap_overhead(1), costs.overhead(1)) == (pytest.approx(0.1), pytest.approx(0.5))
    assert Costs.parse("-1:16 0:15 1:10 2:11").cheap_overhead(1) == pytest.approx(0.5)
    assert Costs.parse("0:15 1:10 2:11").cheap_overhead(1) == pytest.approx(0.5), "not measured"
