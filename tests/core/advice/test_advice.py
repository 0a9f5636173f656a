"""Advice from exact costs: passes replayed at every length against decoding, the best length against enumeration."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from outrider.core.advice.advise import advise, best_length
from outrider.core.advice.measure import RoundCosts, measure
from outrider.core.advice.predict import Candidate, DraftCost, Machine
from outrider.core.advice.replay import Attempt, Pass, as_recorded, attempts, fills, replay
from outrider.core.cost.theory import best_length as exact_best
from outrider.core.cost.theory import expected_tokens
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Drafter
from outrider.core.rules.exact import Exact
from outrider.core.testing.table_target import TableTarget

LONGEST, TOKENS = 10, 120
LENGTHS = (1, 2, 3, 5)


def record(drafter: Drafter, tokens: int = TOKENS, vocabulary: int = 5) -> tuple[Attempt, ...]:
    target = TableTarget(vocabulary, 3, sharpness=2.0)
    sampling = Sampling(temperature=0)
    return attempts(decode(target, drafter, Exact(), [[1, 0, 1]], sampling=sampling, max_new_tokens=tokens))


def draft_model(length: int) -> DraftModel:
    return DraftModel(TableTarget(5, 3, sharpness=2.0, blur=0.35), length=length)


@pytest.fixture(scope="module")
def decoded() -> dict[int, tuple[Attempt, ...]]:
    """The records of a draft model at several lengths and at the longest."""
    return {length: record(draft_model(length)) for length in (*LENGTHS, LONGEST)}


def test_a_draft_models_passes_at_every_length_are_those_of_decoding(decoded: dict[int, tuple[Attempt, ...]]) -> None:
    longest = decoded[LONGEST]
    assert fills([longest], LONGEST)
    assert all(attempt.accepted < LONGEST for attempt in longest)  # every guess is known
    for length in LENGTHS:
        real = as_recorded(decoded[length])
        assert replay(longest, length, always=True) == real, length
        assert sum(each.emitted for each in real) == TOKENS


def test_a_lookups_passes_are_close_to_those_of_decoding() -> None:
    """Its drafts depend on where they begin; two symbols make text that repeats."""
    longest = record(PromptLookup(length=LONGEST, max_ngram=2), vocabulary=2)
    assert not fills([longest], LONGEST)
    for length in (1, 4):
        real = as_recorded(record(PromptLookup(length=length, max_ngram=2), vocabulary=2))
        assert len(replay(longest, length, always=False)) == pytest.approx(len(real), rel=0.1)


def test_a_replay_at_the_recorded_length_is_the_record() -> None:
    whole = (Attempt(3, 3, 3, 4), Attempt(3, 3, 1, 2), Attempt(0, 0, 0, 1), Attempt(2, 2, 0, 1), Attempt(0, 0, 0, 1))
    assert replay(whole, 3, always=False) == [Pass(3, 4), Pass(3, 2), Pass(0, 1), Pass(1, 1), Pass(0, 1)]
    assert replay(whole[:1], 1, always=True) == [Pass(1, 2), Pass(1, 2)]


def independent(rate: float, length: int, scale: int = 10) -> tuple[tuple[Attempt, ...], ...]:
    """Every outcome of drafts of `length` guesses that are right with the probability `rate`, each as a prompt of its
    own, as often as it is likely: the whole of their distribution."""
    share, prompts = round(rate * scale), []
    for outcome in product((True, False), repeat=length):
        accepted = next((place for place, right in enumerate(outcome) if not right), length)
        copies = 1
        for right in outcome:
            copies *= share if right else scale - share
        prompts += [(Attempt(length, length, accepted, accepted + 1),)] * copies
    return tuple(prompts)


COSTS = {"free": 0.0, "knee": 0.02, "steep": 0.6}


@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("rate", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("draft", [0.0, 0.1, 0.5])
def test_the_advice_is_the_fastest_length_by_enumeration(kind: str, rate: float, draft: float) -> None:
    """For each length the whole distribution of accepted tokens is enumerated, and the speed is exact."""
    slope = COSTS[kind]

    def verify(tokens: int) -> float:
        return 10 * (1 + slope * max(tokens - 2, 0) + (slope if tokens > 1 else 0))

    machine = Machine(RoundCosts.of({(1, tokens): verify(tokens) for tokens in range(1, 6)}), draws=8)
    speeds = {}
    for length in (1, 2, 3):
        paid = DraftCost({(1, length): 10 * draft * length, (1, 0): 0.0})
        each = Candidate("table", independent(rate, length), paid)  # as recorded: one length
        speeds[length] = machine.speedup(each, 0)
        exact = expected_tokens(rate, length) / (length * draft + verify(length + 1) / verify(1))
        assert speeds[length] == pytest.approx(exact)
    best, speedup = exact_best(rate, draft, verify, 3)
    fastest = max(speeds, key=lambda length: speeds[length])
    assert (fastest if speeds[fastest] > 1 else 0) == best
    costs = DraftCost({(1, length): 10 * draft * length for length in (0, 1, 2, 3)})
    given = advise(machine, [Candidate(f"of {k}", independent(rate, k), costs, shape=f"{k}") for k in (1, 2, 3)])
    if best == 0:
        assert given.chosen is None  # never slower than plain decoding
        assert given.best[0].speedup <= 1 and "needs" in given.reason
    else:
        assert given.best[0].candidate.name == f"of {best}" and given.best[0].speedup == pytest.approx(speedup)


def test_the_predicted_speed_is_that_of_decoding_at_every_length(decoded: dict[int, tuple[Attempt, ...]]) -> None:
    machine = Machine(RoundCosts.of({(1, tokens): 10 + 1.5 * (tokens - 1) for tokens in (1, 5, 12)}), draws=8)
    cost = DraftCost({(1, 0): 0.0, (1, LONGEST): 1.0 * LONGEST})
    candidate = Candidate("draft-model", (decoded[LONGEST],), cost, always=True, longest=LONGEST)
    real = {}
    for length in LENGTHS:
        spent = sum(10 + 1.5 * each.drafted + each.drafted for each in as_recorded(decoded[length]))
        real[length] = 10 * TOKENS / spent
        assert machine.speedup(candidate, length) == pytest.approx(real[length])
    chosen = best_length(machine, candidate)
    assert chosen.speedup >= max(real.values()) - 1e-9
    assert chosen.low <= chosen.speedup <= chosen.high


def test_rounds_that_take_longer_than_their_parts_slow_the_prediction() -> None:
    machine = Machine(RoundCosts.of({(1, tokens): 10.0 for tokens in (1, 5)}), draws=8)
    of_parts = Candidate("as its parts", independent(0.5, 2), DraftCost({(1, 2): 5.0}))
    slower = replace(of_parts, pace=(1.2, 1.3))
    expected, found = machine.predict(of_parts, 0), machine.predict(slower, 0)
    assert found.speedup == pytest.approx(expected.speedup / 1.25)
    assert found.pass_cost == pytest.approx(1.25) and found.draft_cost == pytest.approx(0.625)
    alike = replace(of_parts, records=((Attempt(2, 2, 1, 2),),) * 3)  # an interval of the paces alone
    paced = machine.predict(replace(alike, pace=(1.2, 1.3)), 0)
    ends = [machine.speedup(alike, 0) / pace for pace in (1.3, 1.2)]
    assert [paced.low, paced.high] == pytest.approx(ends, rel=0.01)


def test_a_batch_is_as_wide_as_its_widest_draft() -> None:
    """Half of the passes draft three tokens: of two rows three quarters do."""
    half = (Attempt(3, 3, 3, 4), Attempt(0, 0, 0, 1))
    costs = {(rows, tokens): 1.0 + rows * tokens for rows in (1, 2) for tokens in (1, 4)}
    machine = Machine(RoundCosts.of(costs), draws=8)
    two = machine.predict(Candidate("x", (half,), DraftCost({})), 0, 2)
    assert two.pass_cost == pytest.approx((0.25 * 3 + 0.75 * 9) / 3)
    assert two.tokens_per_pass == 2.5


def test_advice_for_batches_says_where_drafting_stops_paying_and_is_plain_data() -> None:
    """The cost of eight rows grows with their tokens."""
    costs = {(1, 1): 10.0, (1, 5): 11.0, (8, 1): 12.0, (8, 5): 60.0}
    machine = Machine(RoundCosts.of(costs), draws=8)
    good = Candidate("good", independent(0.6, 3), DraftCost({(1, 0): 0.0, (1, 3): 0.5}))
    bad = Candidate("bad", independent(0.2, 3), DraftCost({(1, 0): 0.0, (1, 3): 30.0}))
    given = advise(machine, [bad, good], (1, 8))
    assert given.chosen is not None and given.chosen.candidate is good
    assert given.pays_below == 8
    data = given.to_dict()
    assert data["advice"]["drafter"] == "good" and data["pays_below_rows"] == 8
    assert [each["drafter"] for each in data["candidates"]] == ["good", "bad"]
    assert data["candidates"][0]["by_position"] == pytest.approx([0.6, 0.36, 0.216])
    assert advise(machine, []).chosen is None
    with pytest.raises(InvalidOption, match="recorded with up to"):
        Candidate("x", (), DraftCost({}), longest=2).passes(3)


def test_an_uncertain_gain_is_not_advised() -> None:
    """Two prompts: one gains, the other loses."""
    records = ((Attempt(3, 3, 3, 4),) * 4, (Attempt(3, 3, 0, 1),) * 4)
    machine = Machine(RoundCosts.of({(1, 1): 10.0, (1, 4): 22.0}), draws=200)
    given = advise(machine, [Candidate("x", records, DraftCost({}))])
    assert given.best[0].speedup > 1 > given.best[0].low
    assert given.chosen is None and "within its interval" in given.reason


def test_costs_are_measured_for_every_shape_in_turn() -> None:
    ticks: list[None] = []
    found = measure(
        lambda: TableTarget(7, 1),
        [[1, 2], [3]],
        sizes=(1, 3),
        widths=(1, 2, 5),
        rounds=3,
        progress=lambda: ticks.append(None),
    )
    assert found.shapes == ((1, 1), (1, 2), (1, 5), (3, 1), (3, 2), (3, 5))
    assert found.samples.shape == (3, 6) and (found.samples > 0).all() and len(ticks) == 4
    assert found.costs()(3, 4) > 0 and found.rows == (1, 3)
    assert set(found.to_dict()) == {"1x1", "1x2", "1x5", "3x1", "3x2", "3x5"}
