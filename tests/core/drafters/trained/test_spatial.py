"""Spatial heads: the state above a position is the target's own, whatever was accepted."""

from __future__ import annotations

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.spatial import SpatialHeads
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import random_draft_head

CONFIG = Config(vocabulary=5, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24)
COLUMNS = 6


def target() -> Decoder:
    return Decoder.random(CONFIG, 3, dtype=torch.float64)


def behind(tokens: list[int]) -> torch.Tensor:
    """The target's states after every token, from one new pass."""
    model = target()
    return model.begin([[*tokens, 0]], Sampling(), frozenset({"last"})).hidden["last"][0]


@pytest.mark.parametrize("prompts", [[[1], [2]], [[1, 2, 3], [4], [0, 1, 2, 3, 4, 0, 1, 2]]])
@pytest.mark.parametrize("options", [{"draft_kind": "chain", "length": 3}, {"tree": (-1, -1, 0, 1, 2)}])
def test_the_state_above_is_the_targets(prompts: list[list[int]], options: dict[str, object]) -> None:
    draft_head = random_draft_head(DRAFTERS["spatial"], target(), heads=3, columns=COLUMNS, vocabulary=0)
    drafter = Learned(draft_head, **options)  # type: ignore[arg-type]
    rows, checked, accepted = [list(one) for one in prompts], 0, 0
    for step in decode(target(), drafter, Exact(), prompts, max_new_tokens=20, seed=1):
        rows[step.row] += step.emitted
        accepted += step.accepted
        if step.finish is None and len(rows[step.row]) > 1:
            states = behind(rows[step.row][:-1])
            place = torch.arange(len(states) - COLUMNS, len(states)).clamp(min=0)
            torch.testing.assert_close(drafter.model._latest[step.row], states[place], atol=1e-9, rtol=0)
            checked += 1
    assert checked > 5 * len(prompts) and accepted > 3


def test_more_heads_than_columns_are_refused() -> None:
    with pytest.raises(InvalidOption, match="fewer than columns"):
        SpatialHeads(target(), heads=4, columns=4)
