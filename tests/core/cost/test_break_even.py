"""What rounds cost by rows and tokens, and how seldom one looks where drafting doesn't pay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.core.cost.break_even import Costs, Pace, Promise, Rest
from outrider.core.errors import InvalidOption

TEXT = "1:10 5:18 9:16 13:24 4x0:36 4x1:24 4x2:40 4x4:72 8x0:60 8x1:40 8x3:120"


def test_costs_of_one_row_lie_between_those_measured_and_go_on_behind_them() -> None:
    costs = Costs.parse("1:10 5:18 9:16 13:24")
    # what 5 tokens took longer than 9 was somebody else's doing
    assert [costs(1, tokens) for tokens in (1, 3, 5, 7, 9, 13, 17)] == [10, 13, 16, 16, 16, 24, 32]
    assert costs(3, 3) == costs(1, 9) and costs.rows == (1,), "nothing else is known of several rows"


def test_costs_of_several_rows_lie_between_those_of_fewer_and_of_more() -> None:
    costs = Costs.parse(TEXT)
    assert [costs(4, tokens) for tokens in (1, 2, 3, 4, 5)] == [24, 40, 56, 72, 88]
    assert costs(6, 1) == pytest.approx(32) and costs(6, 2) == pytest.approx((40 + 80) / 2)
    assert costs(2, 1) == pytest.approx(10 + (24 - 10) / 3) and costs(16, 1) == pytest.approx(72)
    assert costs.ratio(4, 3) == pytest.approx(3) and costs.ratio(8, 2) == pytest.approx(3)


def test_a_look_costs_what_guessing_adds_to_a_plain_round() -> None:
    costs = Costs.parse(TEXT)
    assert costs.look(4) == pytest.approx(0.5) == costs.look(8) == costs.look(20)
    assert 0 < Costs.parse("1:10 2:11").look(1) < 0.1, "not measured: little"
    assert Costs.parse("1:10 2:11 1x0:9").look(1) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "give tokens and milliseconds"),
        ("1:10", "at least two"),
        ("1:10 2:0", "times above 0"),
        ("0x1:3 0x2:4 1:1 2:2", "at least two"),
        ("4x1:10 4x2:11", "those of one row"),
    ],
)
def test_costs_that_are_none(text: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        Costs.parse(text)


@pytest.mark.parametrize("total_variation", [0.0, 0.03, 0.4, 1.2, 5.0])
def test_looking_in_vain_costs_two_in_a_hundred_at_most(total_variation: float) -> None:
    rest, rounds, spent = Rest(), 0, 0.0
    while rounds < 3000:
        rounds += 1
        if rest.due(total_variation, 8):
            rest.vain(total_variation)
            spent += total_variation
        if rounds in (60, 300, 3000):
            assert spent <= rest.first + 0.02 * rounds
    assert spent / rounds < 0.021 and (total_variation == 0 or spent > 0)


def test_what_is_cheap_is_looked_at_at_once_and_what_is_dear_later() -> None:
    assert [Rest().due(total_variation, 4) for total_variation in (0.1, 0.5, 0.6)] == [True, True, False]


def test_drafting_that_pays_goes_on_and_losing_ends_it() -> None:
    rest = Rest()
    for _ in range(50):
        assert rest.due(0.4, 8)
        rest.paid()
        rest.gained(0.3)
    assert rest.left == rest.most
    lost = 0
    while rest.due(0.4, 8):
        rest.paid()
        rest.gained(-0.5)
        lost += 1
    assert lost == 5 and not any(rest.due(0.4, 8) for _ in range(40))


def test_rows_that_leave_are_a_reason_to_look_again() -> None:
    rest = Rest()
    assert rest.due(0.3, 32)
    rest.vain(0.3)
    assert not any(rest.due(0.3, rows) for rows in (32, 30, 24, 17)), "it costs, and little has changed"
    assert rest.due(0.3, 16)
    rest.vain(0.3)
    assert not rest.due(0.3, 9)
    assert rest.due(0.1, 1)


def long_run(choose: Callable[[Pace, list[float], list[float]], int]) -> float:
    """Tokens a plain round of sure and of poor rounds in turn: what is expected of as many guesses as are chosen, at a
    price of 0.3 for having guessed and 0.04 for each that is tried."""
    pace, tokens, time = Pace(), 0.0, 0.0
    for number in range(400):
        chances = [(0.8, 0.3)[number % 2] ** (node + 1) for node in range(12)]
        brought = [1 + sum(chances[:count]) for count in range(13)]
        took = [1.3 + 0.04 * count for count in range(13)]
        count = choose(pace, brought, took)
        pace.took(brought[count], took[count])
        tokens, time = tokens + brought[count], time + took[count]
    return tokens / time


def test_guesses_worth_what_others_bring_in_their_time_make_the_largest_whole() -> None:
    def by_worth(pace: Pace, brought: list[float], took: list[float]) -> int:
        return max(range(13), key=lambda count: pace.worth(brought[count], took[count]))

    def by_rate(_: Pace, brought: list[float], took: list[float]) -> int:
        found = max(range(13), key=lambda count: brought[count] / took[count])
        return found if brought[found] > took[found] else 0

    best = max(long_run(lambda *_, count=count: count) for count in range(13))
    assert long_run(by_worth) > 1.005 * max(long_run(by_rate), best)


def test_the_pace_is_never_below_that_of_plain_rounds_and_follows_what_happens() -> None:
    pace = Pace(memory=8)
    assert pace.worth(1.0, 1.0) == 0
    for _ in range(20):
        pace.took(1.0, 2.0)
    assert pace.worth(1.5, 1.5) == 0
    for _ in range(20):
        pace.took(3.0, 1.5)
    assert -0.3 < pace.worth(2.0, 1.0) <= 0.1


def test_the_dear_are_asked_by_what_they_brought_and_get_another_chance() -> None:
    promise = Promise(tokens=2.5)
    assert promise.above(1.5) == pytest.approx(1.0) and promise.above(4.0) < 0
    for _ in range(60):
        promise.kept(1.0)
    assert 0 < promise.above(1.0) < 0.01
    for _ in range(100):
        promise.passed()
    assert 0.5 < promise.above(1.0) < 1.5
    for _ in range(60):
        promise.kept(5.0)
    before = promise.above(1.0)
    promise.passed()
    assert promise.above(1.0) == before > 3.9


def test_a_glance_costs_no_more_than_a_look() -> None:
    costs = Costs.parse("-1:11 0:15 1:10 2:11 8x1:20 8x2:25")
    assert (costs.glance(1), costs.look(1)) == (pytest.approx(0.1), pytest.approx(0.5))
    assert Costs.parse("-1:16 0:15 1:10 2:11").glance(1) == pytest.approx(0.5)
    assert Costs.parse("0:15 1:10 2:11").glance(1) == pytest.approx(0.5), "not measured"
