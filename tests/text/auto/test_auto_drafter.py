"""drafter="auto": plain where nothing pays, the same output again from a noted calibration, costs measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import text
from outrider.core.cost.break_even import Costs
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.combined import round_costs
from outrider.core.drafters.combined.auto import Auto
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.lookup.suffix import Suffix
from outrider.core.drafters.lookup.token_recycling import TokenRecycling
from outrider.core.drafters.lookup.trie import Trie
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Drafter, Prefill
from outrider.core.tree import Tree
from outrider.text import TextModel, bigrams

FREE = "1:10 2:10 4:10 8:10 16:10 32:10"  # milliseconds: a pass over many tokens costs what one costs
DEAR = "1:10 2:20 4:40 8:80 16:160 32:320"
REPEATING = "one two three four five six seven " * 6
RAW: dict[str, Any] = {"raw": True, "max_new_tokens": 40}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def members() -> dict[str, Drafter]:
    return {"suffix": Suffix(), "token-recycling": TokenRecycling()}


def drafted(lm: TextModel, costs: str, **options: Any) -> int:
    out = lm.generate(REPEATING, drafter="auto", drafter_options={"costs": costs}, **RAW, **options)
    return out.trace.summary().drafted


def test_it_drafts_where_guesses_are_free_and_hardly_where_they_cost_as_much_as_tokens(lm: TextModel) -> None:
    assert drafted(lm, FREE) > 20
    assert drafted(lm, DEAR) <= 10, "a probe now and then"


def test_it_is_the_default_and_changes_no_token(lm: TextModel) -> None:
    plain = lm.generate(REPEATING, drafter=None, **RAW)
    found = lm.generate(REPEATING, **RAW)
    assert found.trace.method == "auto"
    assert found.tokens == plain.tokens
    batch = lm.generate([REPEATING, "the cat", "a"], drafter_options={"costs": FREE}, **RAW)
    assert [one.tokens for one in batch] == [
        lm.generate(one, drafter=None, **RAW).tokens for one in (REPEATING, "the cat", "a")
    ]


def test_it_starts_from_bigrams_where_they_are_known(lm: TextModel) -> None:
    asked = {"drafter": "auto", "drafter_options": {"costs": FREE}, "raw": True, "max_new_tokens": 4}
    without = lm.generate("x", **asked)
    bigrams.bigrams(lm)  # worked out, and kept
    found = lm.generate("x", **asked)
    assert not without.trace.steps[0].drafted and found.trace.steps[0].drafted
    assert found.tokens == without.tokens


def test_costs_are_measured_once_and_noted_so_that_a_seed_stays_true(lm: TextModel, cache: Path) -> None:
    first = lm.generate(REPEATING, temperature=1.0, seed=5, **RAW)
    (kept,) = (cache / "calibrations").iterdir()
    costs = first.trace.options["drafter.costs"]
    assert kept.read_text() == costs
    again = lm.generate(REPEATING, temperature=1.0, seed=5, **RAW)
    assert again.tokens == first.tokens
    assert [step.drafted for step in again.trace.steps] == [step.drafted for step in first.trace.steps]
    kept.write_text(DEAR)
    replayed = lm.generate(REPEATING, temperature=1.0, seed=5, drafter_options={"costs": costs}, **RAW)
    assert replayed.tokens == first.tokens, "what the trace says is enough to have it again"
    kept.write_text("nonsense")
    lm.generate(REPEATING, **RAW)
    assert kept.read_text().startswith("0:"), "a broken calibration is measured anew"


def test_drafters_by_name_have_costs_of_their_own(lm: TextModel, cache: Path) -> None:
    plain = lm.generate(REPEATING, drafter=None, **RAW)
    found = lm.generate(REPEATING, drafter_options={"drafters": ["prompt-lookup", "suffix"]}, **RAW)
    assert found.tokens == plain.tokens
    (kept,) = (cache / "calibrations").iterdir()
    assert kept.stem.endswith("prompt-lookup+suffix")
    for wrong in ("suffix", [], [3]):
        with pytest.raises(InvalidOption, match="drafters is"):
            lm.generate(REPEATING, drafter_options={"drafters": wrong}, **RAW)
    with pytest.raises(InvalidOption, match="no-such"):
        lm.generate(REPEATING, drafter_options={"drafters": ["no-such"]}, **RAW)


@pytest.mark.slow
@pytest.mark.parametrize("costs", [FREE, DEAR], ids=["awake", "asleep"])
def test_a_trained_drafter_can_be_one_of_them(costs: str) -> None:
    lm = text.load("smollm2-135m")
    asked: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0}
    prompts = ["Name three fruits.", "Count from one to nine."]
    options = {"drafters": ["suffix", "eagle3"], "costs": costs}
    found = lm.generate(prompts, drafter="auto", drafter_options=options, **asked)
    assert [one.tokens for one in found] == [one.tokens for one in lm.generate(prompts, drafter=None, **asked)]
    assert (found[0].trace.summary().drafted > 30) == (costs == FREE)


def counts(costs: str, *rows: list[float]) -> list[int]:
    """How many guesses each row tries, given the chances of its guesses to be right."""
    drafter = Auto(costs=Costs.parse(costs), drafters={"suffix": Suffix()})
    drafter.begin(Prefill(), [[1, 2, 3]] * len(rows), Sampling())
    return drafter.counts(rows)


def test_as_many_guesses_are_tried_as_should_be_the_fastest() -> None:
    flat, steep = "1:10 8:10 9:40", "1:10 2:16 3:22"
    assert counts(flat, [0.5, 0.4, 0.01]) == [3], "up to eight tokens cost what one costs"
    assert counts(flat, [0.2] * 20) == [7]
    assert counts("1:10 8:10 9:15 40:15", [0.9] * 20) == [20], "half as much again for many times the tokens"
    assert counts(steep, [0.5, 0.5]) == [0]
    assert counts(steep, [0.9, 0.2]) == [1]
    assert counts(flat, *[[0.5, 0.4, 0.3]] * 4) == [1] * 4, "the rows share the room of a pass"


TABLE = "1:10 2:10.5 4:11 8:12 2x1:12 2x2:16 2x3:20 8x1:20 8x2:40 8x3:60 32x0:75 32x1:50 32x2:120 32x4:240"


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([[0.5, 0.3]], 2),  # 1.8 tokens for 10.75 / 10
        ([[0.5, 0.3]] * 2, 1),  # 1.5 for 16 / 12; 1.8 for 20 / 12 are slower
        ([[0.5, 0.3], []], 1),  # the second row pays for guesses of the first, but to have looked in vain is dearer
        ([[0.9, 0.9, 0.9], []], 3),  # unless they are so good
        ([[0.5, 0.3]] * 8, 0),
        ([[0.6, 0.6, 0.6]] * 8, 1),  # 1.6 for 2: no gain, yet better than 1 for a plain round and the look
        ([[1.0]] * 5, 1),  # 2 for 28 / 16
        ([[0.9]] * 32, 0),
    ],
)
def test_rows_decide_together_by_what_was_measured_of_as_many(rows: list[list[float]], wanted: int) -> None:
    assert counts(TABLE, *rows) == [wanted] * len(rows)


class Counted(TokenRecycling):
    """How often it was asked for guesses, told what was committed, and told so afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.watched, self.heard = 0, 0, list[list[int]]()

    def propose(self, room: Any, rng: Any) -> Draft:
        self.asked += 1
        return super().propose(room, rng)

    def observe(self, *given: Any) -> None:
        self.watched += 1
        super().observe(*given)

    def observe_committed(self, row: int, tokens: Any) -> None:
        self.heard.append(list(tokens))
        super().observe_committed(row, tokens)


class Knowing(Counted):
    """Says what comes next. As it proposes for itself, it is taken for one that asks a model."""

    def __init__(self, known: list[int]) -> None:
        super().__init__()
        self.known, self.place = known, 0

    def propose(self, room: Any, rng: Any) -> Draft:
        self.asked += 1
        tokens = torch.tensor([self.known[self.place : self.place + 4]], dtype=torch.long)
        belief = torch.full(tokens.shape, 0.9, dtype=torch.float64)
        return Draft.guess(tokens, Tree.chain(tokens.shape[1]), torch.ones_like(tokens, dtype=torch.bool), belief)

    def observe(self, draft: Any, scores: Any, verdict: Any, rng: Any) -> None:
        super().observe(draft, scores, verdict, rng)
        self.place += len(verdict.rows(draft)[0])


@pytest.mark.parametrize(
    ("total_variation", "asked"), [("-1:10.2 0:15", 8), ("-1:10.2 0:45", 0), ("0:15", 8), ("0:45", 0)]
)
def test_who_asks_a_model_is_asked_where_that_brings_more_than_it_costs(
    lm: TextModel, total_variation: str, asked: int
) -> None:
    plain = lm.generate("the cat sat on the mat", drafter=None, **RAW).tokens
    knowing = Knowing(plain)
    drafter = Auto(
        costs=Costs.parse(f"{total_variation} 1:10 2:10.5 8:11 24:12"),
        drafters={"suffix": Suffix(), "knowing": knowing},
    )
    out = lm.generate("the cat sat on the mat", drafter=drafter, **RAW)
    assert out.tokens == plain
    assert knowing.watched == len(out.trace.steps), "it sees what becomes of the others' guesses"
    assert knowing.asked == asked
    assert (len(out.trace.steps) < 10) == (asked == 8)


class Remembering(TokenRecycling):
    """Knows what comes next without a model, after the first tokens."""

    def __init__(self, known: list[int], first: int) -> None:
        super().__init__()
        self.known, self.first, self.place = known, first, 0

    def tries(self, room: Any) -> list[Trie]:
        trie = Trie()
        if self.place >= self.first:
            trie.add(self.known[self.place : self.place + 2], 0.8)
        return [trie]

    def observe(self, draft: Any, scores: Any, verdict: Any, rng: Any) -> None:
        super().observe(draft, scores, verdict, rng)
        self.place += len(verdict.rows(draft)[0])


def test_what_a_model_loses_does_not_end_drafting_by_the_others(lm: TextModel) -> None:
    plain, wrong = lm.generate(REPEATING, drafter=None, **RAW).tokens, Knowing([0] * 100)
    costs = Costs.parse("-1:10.2 0:16 1:10 2:16.5 8:17 24:18")
    drafter = Auto(costs=costs, drafters={"remembering": Remembering(plain, 10), "wrong": wrong})
    found = lm.generate(REPEATING, drafter=drafter, **RAW)
    assert found.tokens == plain
    assert 0 < wrong.asked <= 4
    assert len(found.trace.steps) <= 15 + (len(plain) - 10) / 3, "soon as if there were no model"


CROWD = [REPEATING, "the cat sat on the mat", "rain", "a quick brown fox", "seven", "wizards play", "the dog", "log"]


def test_a_crowd_that_gains_nothing_decodes_as_if_nobody_drafted(lm: TextModel) -> None:
    """Looking costs half a round, so there are few looks; what was missed is heard before the next one."""
    costs = "1:10 2:11 2x1:12 2x2:16 8x0:30 8x1:20 8x2:60 8x3:100"
    counted = Counted()
    drafter = Auto(costs=Costs.parse(costs), drafters={"counted": counted})
    found = lm.generate(CROWD, drafter=drafter, raw=True, max_new_tokens=90)
    plain = lm.generate(CROWD, drafter=None, raw=True, max_new_tokens=90)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    rounds = max(len(one.trace.steps) for one in found)
    crowded = [one.tokens for one in plain]
    assert rounds >= 60 and counted.asked <= 1 + 0.02 * rounds / 0.5
    assert counted.watched == counted.asked, "where nobody guesses, nobody listens"
    assert all(any(said == one[at : at + len(said)] for one in crowded for at in range(90)) for said in counted.heard)


def test_a_continuous_batch_wakes_up_when_it_drains(lm: TextModel) -> None:
    costs = "1:10 2:10 8:10 24:10 2x1:10 2x2:10.1 2x8:11 8x1:20 8x2:60 8x9:400"
    asked = [*CROWD[1:], REPEATING]
    with lm.batch(rows=8, raw=True, drafter_options={"costs": costs}) as batch:
        requests = [batch.add(one, 60 if one == REPEATING else 12) for one in asked]
        for _ in batch:
            pass
    plain = [lm.generate(one, drafter=None, raw=True, max_new_tokens=60).tokens for one in asked]
    for request, wanted in zip(requests, plain, strict=True):
        assert request.tokens == wanted[: len(request.tokens)]
    last = requests[-1].steps
    crowded, alone = [step for step in last if step.alive == 8], [step for step in last if step.alive == 1]
    assert crowded and all(len(step.emitted) == 1 for step in crowded)
    assert sum(len(step.emitted) for step in alone) > 1.3 * len(alone)


@pytest.mark.slow
def test_rounds_of_several_rows_are_measured_when_there_are_so_many(lm: TextModel, cache: Path) -> None:
    lm.generate(REPEATING, **RAW)
    (kept,) = (cache / "calibrations").iterdir()
    first = kept.read_text()
    assert Costs.parse(first).rows == (1,) and "0:" in first.split()[0]
    lm.generate(["a", "the cat"], **RAW)
    assert kept.read_text().startswith(first) and Costs.parse(kept.read_text()).rows == (1, 2)
    with lm.batch(rows=5, max_new_tokens=2) as batch:
        request = batch.add("a")
        for _ in batch:
            pass
    noted = request.result.trace.options["drafter.costs"]
    assert Costs.parse(str(noted)).rows == (1, 2, 8) and noted == kept.read_text()
    assert [round_costs.sizes(rows) for rows in (1, 2, 3, 8, 9, 32, 40, 500)] == [
        *([1], [1, 2], [1, 2, 8], [1, 2, 8]),
        *([1, 2, 8, 32], [1, 2, 8, 32], [1, 2, 8, 32, 64], [1, 2, 8, 32, 64]),
    ]


def test_a_short_context_is_enough_to_measure_in() -> None:
    few = Decoder.random(
        Config(
            vocabulary=48, hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=48, context=96
        )
    )
    assert {1, 2} <= {*round_costs.measure(few, members())}


def test_what_is_measured_are_whole_rounds_of_each_shape(lm: TextModel) -> None:
    seen: list[tuple[int, int]] = []

    class Watched(Decoder):
        def score(self, draft: Draft, since: int | None = None) -> Any:
            seen.append((draft.rows, draft.size + 1))
            return super().score(draft, since)

    target = lm.target()
    assert isinstance(target, Decoder)
    found = round_costs.measure(Watched(target.network), members(), 8)
    assert {*found} == {0, 1, 2, 3, 5, 9, 17} and min(found.values()) > 0
    assert {*seen} == {(8, width or 1) for width in found}
    assert sum(rows * width for rows, width in seen) < 9 * 8 * 40
    assert {*round_costs.measure(Watched(target.network), members(), 32)} == {0, 1, 2, 3, 5}, "no wider than is useful"


def test_guarded_goes_by_the_same_costs_and_notes_them(lm: TextModel, cache: Path) -> None:
    out = lm.generate([REPEATING, "a"], drafter="guarded", **RAW)[0]
    (kept,) = (cache / "calibrations").iterdir()
    assert out.trace.options["drafter.costs"] == kept.read_text()
    dear = lm.generate(REPEATING, drafter="guarded", drafter_options={"costs": DEAR}, **RAW)
    assert dear.trace.options["drafter.costs"] == DEAR and dear.tokens == out.tokens


def test_guessing_rests_where_nothing_pays_and_is_tried_again(lm: TextModel) -> None:
    counted = Counted()
    drafter = Auto(costs=Costs.parse(DEAR), drafters={"counted": counted})
    out = lm.generate("the cat", drafter=drafter, raw=True, max_new_tokens=90)
    rounds = len(out.trace.steps)
    assert 8 <= counted.asked < rounds / 2 and counted.watched == rounds
    assert out.tokens == lm.generate("the cat", drafter=None, raw=True, max_new_tokens=90).tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cost": 1}, "Did you mean 'costs'"),
        ({"max_guesses": 0}, "max_guesses is 0"),
        ({"costs": "fast"}, "give tokens and milliseconds"),
        ({"costs": "1:10"}, "at least two different numbers"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str, lm: TextModel) -> None:
    with pytest.raises(InvalidOption, match=said):
        lm.generate("x", drafter_options=options)


def test_a_draft_model_can_not_be_merged_and_the_measurement_says_so() -> None:
    config = Config(vocabulary=48, hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=48)
    members = {"draft-model": DraftModel(Decoder.random(config, 1), length=2)}
    with pytest.raises(Incompatible, match="draws its guesses"):
        round_costs.measure(Decoder.random(config, 2), members)
