"""Launches a round, counted on the shadow device with graphs, are those of tests/launches-per-round.json: the most of
any round that records nothing, greedy or sampled, replays and uploads included. Waits are one, but for drafters that
learn on the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.core.batching import ContinuousBatch
from outrider.core.cost.break_even import Costs
from outrider.core.drafters.combined.auto import Auto
from outrider.core.engine.transformer import Decoder
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.protocol import Drafter
from outrider.core.testing.conformance import trial_drafter
from outrider.core.testing.shadow.device import shadow_device
from outrider.core.testing.shadow.ledger import RoundCost, round_costs
from tests.core.shadow.cases import PROMPTS, SAMPLINGS, WAITS, drafter_on, network

# The most that are wanted: for plain decoding 2 replays and 4 others.
WANTED = {
    "plain": 6,
    **dict.fromkeys(("prompt-lookup", "suffix", "ensemble", "auto", "jacobi", "lookahead"), 8),
    **dict.fromkeys(("medusa", "hydra"), 10),
    "eagle3, 63 nodes": 12,
    "draft-model, 5 tokens": 14,
}
PINNED: dict[str, int] = json.loads((Path(__file__).parents[2] / "launches-per-round.json").read_text())
OPTIONS = {"eagle3, 63 nodes": {"nodes": 63}, "draft-model, 5 tokens": {"length": 5}}


def costs(case: str, sampling: str) -> list[RoundCost]:
    """Those of the rounds that recorded nothing."""
    name = case.split(",")[0]
    with shadow_device() as gpu:
        target = Decoder(network("cuda"))
        drafter: Drafter | None = None
        if name == "auto":
            members = {
                each: trial_drafter(DRAFTERS[each], {}, lambda: target) for each in ("suffix", "token-recycling")
            }
            drafter = Auto(costs=Costs.parse("1:10 2:10.1 8:10.2 24:10.5"), drafters=members)
        elif name != "plain":
            method = DRAFTERS[name]
            options = OPTIONS.get(case, method.test_options[0] if name == "ensemble" else {})
            damping = 1e-6 if method.draft_head else 0.3
            drafter = trial_drafter(method, options, lambda: Decoder(network("cuda", damping)))
        rounds = round_costs(gpu, target, drafter, make_rule(), PROMPTS[:1], sampling=SAMPLINGS[sampling], rounds=14)
    return [cost for cost in rounds if not cost.captures]


@pytest.mark.parametrize("case", PINNED)
def test_launches_are_those_pinned(case: str) -> None:
    found = [cost for sampling in SAMPLINGS for cost in costs(case, sampling)]
    most = max(found, key=lambda cost: cost.total)
    assert most.total == PINNED[case], most
    assert max(cost.waits for cost in found) <= WAITS.get(case.split(",")[0], 1)
    assert max(cost.replays.total() for cost in found) <= (2 if case == "plain" else 4)


def test_launches_are_as_few_as_wanted() -> None:
    assert PINNED.keys() == WANTED.keys()
    assert all(PINNED[case] <= most for case, most in WANTED.items())


@pytest.mark.parametrize(("name", "case"), [("medusa", "medusa"), ("eagle3", "eagle3, 63 nodes")])
def test_launches_do_not_grow_with_the_rows_of_a_continuous_batch(name: str, case: str) -> None:
    with shadow_device() as gpu:
        drafter, found = drafter_on("cuda", DRAFTERS[name]), list[int]()
        batch = ContinuousBatch(
            Decoder(network("cuda")), lambda: drafter, make_rule(), sampling=SAMPLINGS["greedy"], rows=3
        )
        for prompt in PROMPTS:
            batch.add(prompt, 100)
        for _ in range(8):
            before = gpu.counts.launches
            batch.round()
            found.append(gpu.counts.launches - before)
        batch.close()
    assert max(found[4:]) == PINNED[case], found
