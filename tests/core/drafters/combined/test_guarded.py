"""The guard: off where a drafter does not pay, alone and in a batch, and on again where it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from outrider.core.batching import ContinuousBatch
from outrider.core.cost.break_even import Costs
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.combined.guarded import Guarded
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup, chain_draft
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.methods import make_drafter
from outrider.core.protocol import Drafter, Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import Case, enumerate_output, target_distribution, total_variation
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step, Trace

SHAPE = Config(vocabulary=31, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)
GREEDY = Sampling(temperature=0)
PROMPTS = [[3, 9, 4, 17, 9], [8], [20, 21, 22, 1]]


class Right(WeightFree):
    """Drafts `length` tokens of the true continuation, then the token `wrong`."""

    def __init__(self, texts: Sequence[Sequence[int]], length: int, wrong: Sequence[int] = ()) -> None:
        self.texts, self.length, self.wrong = texts, length, wrong

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.at = [0 for _ in prompts]

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        pairs = zip(self.texts, self.at, room.tolist(), strict=True)
        found = [[*text[at : at + self.length], *self.wrong][: max(left, 0)] for text, at, left in pairs]
        return chain_draft(found, rng.device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self.at = [at + len(tokens) for at, tokens in zip(self.at, verdict.rows(draft), strict=True)]

    def end(self) -> None:
        """Nothing to free."""


def guarded(**options: Any) -> Guarded:
    drafter = make_drafter("guarded", **options)
    assert isinstance(drafter, Guarded)
    return drafter


def model() -> Decoder:
    return Decoder.random(SHAPE, seed=1)


def run(drafter: Drafter | None, prompts: Prompts = PROMPTS, limit: int = 60) -> tuple[list[list[int]], list[Step]]:
    out: list[list[int]] = [[] for _ in prompts]
    steps = list(decode(model(), drafter, Exact(), prompts, max_new_tokens=limit, sampling=GREEDY))
    for step in steps:
        out[step.row] += step.emitted
    return out, steps


@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_the_distribution_is_the_targets(kind: str) -> None:
    def drafter() -> Drafter:
        small = TableTarget(3, seed=1, sharpness=0.7, blur=0.4)
        return guarded(drafter=DraftModel(small, length=2) if kind == "model" else PromptLookup(length=2))

    prompts = [(0, 1), (2, 1, 0, 1, 2, 1)]
    case = Case(
        target=lambda: TableTarget(3, seed=1, sharpness=0.7),
        drafter=drafter,
        rule=Exact(),
        prompts=prompts,
        limits=(2, 2),
    )
    for row, distribution in enumerate(enumerate_output(case, together=False)):
        wanted = target_distribution(TableTarget(3, seed=1, sharpness=0.7), prompts[row], Sampling(), case.limits[row])
        assert total_variation(distribution, wanted) < 1e-12


@pytest.mark.parametrize("row", [0, 1, 2])
def test_drafting_is_off_where_it_does_not_pay_and_the_trace_notes_it(row: int) -> None:
    prompts = PROMPTS[row : row + 1]
    texts = run(None, prompts)[0]
    bad = guarded(
        drafter=Right(texts, 0, (29, 28, 27)), costs=lambda rows, tokens: 1 + 0.2 * (rows * tokens - 1), probe=10
    )
    found, steps = run(bad, prompts)
    assert found == texts
    off = [step for step in steps if step.note.startswith("plain (off: 0.")]
    assert len(off) > 0.7 * len(steps) and not any(step.drafted for step in off)
    assert Trace.from_json(Trace(steps=tuple(steps)).to_json()).steps[-1].note == steps[-1].note
    good = guarded(drafter=Right(texts, 4), costs=lambda rows, tokens: 1 + 0.2 * (rows * tokens - 1))
    assert not any("off" in step.note for step in run(good, prompts)[1])


@pytest.mark.parametrize(("rows", "pays"), [(1, True), (2, True), (8, False)])
def test_more_rows_switch_drafting_off_sooner(rows: int, pays: bool) -> None:
    """Passes cost the same up to ten tokens: two rows of five are free, eight cost four times as much."""
    prompts = [PROMPTS[0]] * rows
    plain = run(None, prompts)[0]
    drafter = guarded(
        drafter=Right(plain, 1, (29, 28, 27)), costs=lambda rows, tokens: max(rows * tokens, 10) / 10, probe=100
    )
    found, steps = run(drafter, prompts)
    drafting = sum(bool(step.drafted) for step in steps) / len(steps)
    assert drafting > 0.9 if pays else drafting < 0.1
    assert found == plain


def test_many_rows_try_once_and_pause_long() -> None:
    """Four more tokens in each of eight rows cost three more rounds, and bring one token."""
    prompts = [PROMPTS[0]] * 8
    plain = run(None, prompts, limit=90)[0]
    costs = Costs.parse("1:10 8:10 8x1:20 8x5:80")
    drafter = guarded(drafter=Right(plain, 1, (29, 28, 27)), costs=costs)
    found, steps = run(drafter, prompts, limit=90)
    assert found == plain
    assert {step.index for step in steps if step.drafted} == {0}
    assert all("off: 0.50x" in step.note for step in steps if step.index)


def test_a_batch_that_drains_drafts_again() -> None:
    """Requests of many lengths through a continuous batch: all come out as plain decoding's; guesses are tried once
    few are left."""
    costs = "1:10 8:11 2:10 8x1:20 8x2:60 8x5:200"
    made = make_drafter("guarded", drafter="suffix", costs=Costs.parse(costs))
    assert isinstance(made, Guarded) and made.supports_batching()
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [8, 9] * 4, [3] * 6, [5, 6, 5, 6], [1, 2, 3, 1, 2, 3], [9], [4, 4, 4], [7, 7]]
    limits = [10, 12, 11, 10, 12, 11, 13, 80]
    alone = [
        [
            token
            for step in decode(model(), None, Exact(), [prompt], max_new_tokens=limit, sampling=GREEDY)
            for token in step.emitted
        ]
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    batch = ContinuousBatch(model(), lambda: made, Exact(), sampling=GREEDY, rows=8)
    for prompt, limit in zip(prompts, limits, strict=True):
        batch.add(prompt, limit)
    found: dict[int, list[int]] = {number: [] for number in range(8)}
    drafted: list[tuple[int, bool]] = []
    for step in batch:
        found[step.row] += step.emitted
        drafted.append((step.alive, not step.note.startswith("plain")))
    batch.close()
    assert list(found.values()) == alone
    assert not any(tried for alive, tried in drafted if alive > 4)
    assert any(tried for alive, tried in drafted if alive == 1)


def test_self_drafting_has_a_cost_and_is_switched_off() -> None:
    drafter = guarded(drafter="draft-on-the-fly", options={"length": 3, "skip_ratio": 0.2})
    steps = list(decode(Decoder.random(SHAPE, 1), drafter, Exact(), [PROMPTS[0]], sampling=GREEDY, max_new_tokens=40))
    assert steps[0].cost > 1
    assert any("off" in step.note for step in steps)
