"""Drafters under a constraint: forced tokens are guessed, forbidden guesses dropped, and drawn ones never."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from outrider.core.constrained_drafter import ConstrainedDrafter
from outrider.core.constraint import Automaton, Positions
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.errors import Unsatisfied
from outrider.core.methods import DRAFTERS
from outrider.core.protocol import Drafter, Prefill, WeightFree
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import Case, enumerate_output, total_variation, trial_drafter
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step
from outrider.core.tree import Tree
from tests.core.constraints.test_constraint import PROMPTS, WALK, defined_distribution, model, target

# a choice of two, then three forced tokens, over and over
KEYS = Automaton({0: {0: 1, 1: 5}, 1: {2: 2}, 2: {3: 3}, 3: {4: 0}, 5: {4: 6}, 6: {3: 7}, 7: {2: 0}})
GREEDY = Sampling(temperature=0, constraint=KEYS)


class Guess(WeightFree):
    """The same guesses in every round, on a tree."""

    def __init__(self, tokens: Sequence[int] = (), tree: Sequence[int] = ()) -> None:
        self.tokens, self.tree = tokens, Tree.of(tuple(tree))

    def begin(self, *_: Any) -> None:
        """Nothing to prepare."""

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        tokens = torch.tensor([self.tokens] * len(room)).long().view(len(room), -1)
        return Draft.guess(tokens, self.tree, self.tree.depths < room[:, None])

    def observe(self, *_: Any) -> None:
        """Nothing to learn."""

    def end(self) -> None:
        """Nothing to free."""


def steps(drafter: Drafter | None, limit: int = 16, rows: int = 1, sampling: Sampling = GREEDY) -> list[Step]:
    prompts = [[1, 2 + row] for row in range(rows)]
    table = TableTarget(6, seed=2)
    return list(decode(table, drafter, Exact(), prompts, sampling=sampling, max_new_tokens=limit, seed=1))


def emitted(found: Sequence[Step], row: int = 0) -> list[int]:
    return [token for step in found if step.row == row for token in step.emitted]


@pytest.mark.parametrize("rows", [1, 3])
def test_forced_tokens_are_guessed_at_no_cost(rows: int) -> None:
    """16 tokens are 4 choices with 3 forced tokens each: each choice takes a pass, which accepts those before it."""
    plain, guessed = steps(None, rows=rows), steps(Guess(), rows=rows)
    assert [emitted(guessed, row) for row in range(rows)] == [emitted(plain, row) for row in range(rows)]
    assert len(plain) == 16 * rows and len(guessed) == 5 * rows
    assert all(step.accepted == len(step.drafted) for step in guessed)


def test_guesses_are_pruned_and_continued() -> None:
    """Of the guesses 0, 2, 5 and 1, 4 the 5 is forbidden, and what each path forces is added."""
    step = steps(Guess((0, 2, 5, 1, 4), (-1, 0, 1, -1, 3)))[0]
    assert step.drafted == (0, 2, 1, 4, 3, 4, 3, 2)
    assert step.accepted == 4 and emitted([step])[:4] in ([0, 2, 3, 4], [1, 4, 3, 2])


class Probing(Guess):
    """The second of two guesses is a probe, which is scored for itself and never tried."""

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        draft = super().propose(room, rng)
        return replace(draft, probe=torch.tensor([[False, True]]).expand_as(draft.live))


def test_probes_stay_and_hide_nothing() -> None:
    """A forbidden probe stays alive; a forbidden guess does not; and what is forced is added beside them."""
    drafter = ConstrainedDrafter(Probing((5, 3), (-1, -1)), KEYS)
    drafter.begin(Prefill(), [[1]], GREEDY)
    drafter._masks = drafter._masks.committed([[0]])
    draft = drafter.propose(torch.tensor([8]), CounterRNG([0]))
    assert draft.live.tolist() == [[False, True, True, True, True]]
    assert draft.tokens.tolist() == [[5, 3, 2, 3, 4]] and draft.tree.parents.tolist() == [[-1, -1, -1, 2, 3]]
    assert draft.probe is not None and draft.probe.tolist() == [[False, True, False, False, False]]
    host = draft.on_host
    assert host.of is draft.tokens and host.tried == draft.tried.tolist() and host.tokens == draft.tokens.tolist()


def test_no_more_is_guessed_than_a_row_has_room_for() -> None:
    assert [len(step.drafted) for step in steps(Guess(), limit=3)] == [0, 1]


def test_plain_decoding_stays_plain() -> None:
    assert all(not step.drafted for step in steps(None))


class DropsDrawn(ConstrainedDrafter):
    """Drops drawn guesses that the constraint forbids, as it does with fixed ones."""

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        draft = self.inner.propose(room, rng)
        live = draft.live.clone()
        for row, (walker, output) in enumerate(zip(self._masks.walkers, self._masks.outputs, strict=True)):
            for node, path in enumerate(draft.host_paths[row][1:]):
                live[row, node] &= walker.reach(output, path)
        return replace(draft, live=live)


@pytest.mark.parametrize("wrong", [False, True], ids=["kept", "dropped"])
def test_dropping_drawn_guesses_is_caught(wrong: bool) -> None:
    """A draft model that draws without the constraint: its forbidden tokens must be tried, and rejected."""
    sampling = Sampling(constraint=WALK)

    def drafter() -> Drafter:
        inner = DraftModel(model(), length=2, sampling=Sampling())
        return DropsDrawn(inner, WALK) if wrong else inner

    with patch("outrider.core.decode.constrained", lambda drafter, _: drafter):
        case = Case(target=target, drafter=drafter, rule=Exact(), prompts=PROMPTS[:1], sampling=sampling)
        found = total_variation(enumerate_output(case)[0], defined_distribution(PROMPTS[0], sampling, 3))
    assert found > 0.01 if wrong else found < 1e-12


def test_an_output_that_leaves_the_constraint_is_refused() -> None:
    """A processor that forbids all that the constraint allows, and an automaton that stops short."""

    def contrary(ids: Tensor, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([0, 1]), -torch.inf)

    with pytest.raises(Unsatisfied, match="row 0 emitted a token that its constraint forbids, after 0 tokens"):
        steps(None, sampling=replace(GREEDY, processors=(contrary,)))
    with pytest.raises(Unsatisfied, match="after 2 tokens"):
        steps(None, sampling=replace(GREEDY, constraint=Automaton({0: {0: 1}, 1: {1: 2}})))


@pytest.mark.parametrize("name", ["prompt-lookup", "top-k-tree", "jacobi"])
def test_borders_and_endings_of_code_ids_hold(name: str) -> None:
    """Positions: a border of one id, two ids in a region, a fixed ending."""

    frame = Positions([(5,)] * 3 + [None, (1, 2), None] + [(4,), (3,), (4,)])
    method, sampling = DRAFTERS[name], Sampling(constraint=frame)
    drafter = trial_drafter(method, method.test_options[0], lambda: TableTarget(6, seed=3))
    output = emitted(steps(drafter, limit=9, sampling=sampling))
    assert output[:3] == [5] * 3 and output[4] in (1, 2) and output[6:] == [4, 3, 4]
