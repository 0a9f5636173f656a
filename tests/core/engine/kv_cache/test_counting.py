"""What a cache keeps of a step is the same whether rows are counted on the host or all at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outrider.core.draft import Draft, Verdict
from outrider.core.engine.kv_cache import cache
from outrider.core.engine.kv_cache import rows as counting
from outrider.core.engine.kv_cache.rows import Rows, advance, prefilled_rows, scratch_mask, sequence_positions
from outrider.core.tree import Tree


def _case(seed: int) -> tuple[Rows, int, Draft, Verdict, torch.Tensor]:
    """Rows with tokens waiting, a chain drafted behind them of which some was scored, and what of it is kept."""
    rng = random.Random(seed)
    batch, wait, size = rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 4)
    waiting = [wait, *(rng.randint(1, wait) for _ in range(batch - 1))]
    entries = [rng.randint(0, 9) for _ in range(batch)]
    accepted = [rng.randint(0, size) for _ in range(batch)]
    count = [rng.randint(0, one + 1) for one in accepted]
    pending = torch.tensor([[rng.randrange(50) for _ in range(wait)] for _ in range(batch)])
    even = len({*waiting}) == len({*entries}) == 1
    rows = Rows(torch.tensor(entries), pending, torch.tensor(waiting), tuple(entries), tuple(waiting), even)
    tokens = torch.randint(50, (batch, size), generator=torch.Generator().manual_seed(seed))
    draft = Draft.guess(tokens, Tree.chain(size), torch.ones_like(tokens, dtype=torch.bool))
    path = torch.tensor([[node if node < one else -1 for node in range(size)] for one in accepted]).view(batch, size)
    none = torch.zeros(batch, size)
    verdict = Verdict(
        path=path.long(),
        accepted=torch.tensor(accepted),
        token=torch.full((batch,), 49),
        resampled=torch.zeros(batch, dtype=torch.bool),
        tried=none.bool(),
        chance=none,
        p=none,
        q=none,
    )
    return rows, rng.randint(-1, size), draft, verdict, torch.tensor(count)


def test_of_a_prompt_that_was_read_the_last_token_waits() -> None:
    rows = prefilled_rows([[7, 8, 9], [5]], torch.device("cpu"), True)
    assert (rows.host, rows.host_pending, rows.uniform) == ((2, 0), (1, 1), False)
    assert rows.entries.tolist() == [2, 0] and rows.pending.tolist() == [[9], [5]]
    assert rows.pending_count.tolist() == [1, 1]
    assert prefilled_rows([[1, 2], [3, 4]], torch.device("cpu"), True).uniform


@pytest.mark.parametrize("seed", range(60))
def test_counted_or_all_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, scored, draft, verdict, count = _case(seed)
    few, tokens, kept = advance(rows, scored, draft, verdict, count, True)
    monkeypatch.setattr(counting, "_FEW", 0)
    many, all_tokens, all_kept = advance(rows, scored, draft, verdict, count, True)
    assert (few.host, few.uniform) == (many.host, many.uniform)
    assert torch.equal(few.entries, many.entries) and torch.equal(few.pending_count, many.pending_count)
    for row, waits in enumerate(few.pending_count.tolist()):
        assert few.pending[row, :waits].tolist() == many.pending[row, :waits].tolist()
    assert torch.equal(tokens, all_tokens) and torch.equal(kept, all_kept)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_remembered_of_a_shape_is_what_ragged_rows_are_told(seed: int) -> None:
    rows, _, draft, _, _ = _case(seed)
    alone = Rows(rows.entries[:1], rows.pending[:1], rows.pending_count[:1], rows.host[:1], rows.host_pending[:1], True)
    ragged = replace(alone, uniform=False)
    one = Draft.guess(draft.tokens[:1], draft.tree, draft.live[:1])
    assert torch.equal(sequence_positions(alone, one), sequence_positions(ragged, one))
    assert torch.equal(scratch_mask(alone, one).expand(1, -1, -1), scratch_mask(ragged, one).expand(1, -1, -1))


@pytest.mark.parametrize("seed", range(20))
def test_entries_are_moved_to_the_same_slots(seed: int) -> None:
    rows, _, _, _, _ = _case(seed)
    rng, batch = random.Random(seed), len(rows.host)
    size, depth = 6, 4
    path = torch.tensor([sorted(rng.sample(range(size), depth)) for _ in range(batch)])
    kept = torch.arange(depth) < torch.tensor([[rng.randint(0, depth)] for _ in range(batch)])
    stores = []
    for move in ("move", "_move_where_needed"):
        one = cache.Cache((2, 2, 4), torch.float32, torch.device("cpu"))
        slots = max(rows.host) + rows.pending.shape[1] + size + depth
        one.store = torch.arange(2 * batch * 2 * slots * 4, dtype=torch.float32).view(2, batch, 2, slots, 4).clone()
        getattr(one, move)(rows, path, kept)
        stores.append(one.store)
    assert torch.equal(*stores)


def test_what_stands_before_a_draft_is_seen_and_a_gap_is_not() -> None:
    sight = torch.tensor([[[True, False], [True, True]]])
    found = counting.full_mask(3, 2, sight)
    assert found.tolist() == [[[True] * 3 + [False] * 2 + row for row in sight[0].tolist()]]
