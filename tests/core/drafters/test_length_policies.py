"""Length policies: when they stop, what they learn, and that they decide before the draw."""

from __future__ import annotations

import pytest
import torch

from outrider.core.cost.theory import best_length
from outrider.core.decode import decode
from outrider.core.distribution import Distribution, Sampling
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.length_policies import AcceptanceHead, Best, DraftExit, Risk, Window, features
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import InvalidOption
from outrider.core.methods import make_drafter
from outrider.core.rules.exact import Exact
from outrider.core.testing.table_target import TableTarget

CPU = torch.device("cpu")
SHAPE = Config(vocabulary=31, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)


def distribution(*probs: float) -> Distribution:
    return Distribution(torch.tensor([probs], dtype=torch.float64), None, len(probs))


def test_the_risk_of_a_rejection_accumulates_over_a_draft() -> None:
    policy = Risk(10, 0.5, lambda read: read[:, 0], None)
    policy.begin(1, CPU)
    policy.start()
    assert [bool(policy.more(distribution(0.8, 0.2), depth)) for depth in range(5)] == [True, True, True, False, False]
    policy.start()  # a new round starts at risk 0
    assert bool(policy.more(distribution(0.8, 0.2), 0)) and not bool(policy.more(distribution(0.5, 0.5), 1))


def test_a_head_reads_states_or_features() -> None:
    wide = {
        "0.weight": torch.eye(3),
        "0.bias": torch.zeros(3),
        "out.weight": torch.ones(1, 3),
        "out.bias": torch.zeros(1),
    }
    head = AcceptanceHead(wide)
    x = torch.tensor([[1.0, -2.0, 0.5]])
    wanted = (x + torch.nn.functional.silu(x)).sum(1).sigmoid()
    torch.testing.assert_close(head(x), wanted)
    with pytest.raises(InvalidOption, match=r"out\.bias"):
        AcceptanceHead({"out.weight": torch.ones(1, 3)})
    read = features(distribution(0.5, 0.25, 0.25), 3)
    torch.testing.assert_close(read[0, [0, 1, 3]], torch.tensor([0.5, 0.25, 3.0], dtype=torch.float64))


def test_specdec_reads_the_draft_models_own_state() -> None:
    seen: list[tuple[int, ...]] = []

    def head(states: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(states.shape))
        return torch.full((len(states),), 0.9)

    target, model = Decoder.random(SHAPE, seed=1), Decoder.random(SHAPE, seed=1)
    drafter = make_drafter("specdec-plus-plus", model=model, head=head, threshold=0.35, length=9)
    steps = list(decode(target, drafter, Exact(), [[1, 2], [5]], max_new_tokens=30))
    assert set(seen) == {(2, SHAPE.hidden_size)}
    assert max(len(step.drafted) for step in steps) == 4, "0.9^4 = 0.66 is the last above 0.65"


def test_the_threshold_rises_while_too_little_is_accepted() -> None:
    policy = DraftExit(8, threshold=0.5, target_acceptance=0.8, step=0.1)
    policy.begin(2, CPU)
    for _ in range(20):
        policy.learn(torch.tensor([4, 4]), torch.tensor([0, 4]))
    sure = Distribution(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), None, 2)
    assert policy.more(sure, 0).tolist() == [False, True]


def test_the_best_length_follows_the_acceptance_rate() -> None:
    policy = Best(5, cost=0.1, max_length=12)
    policy.begin(2, CPU)
    assert policy.start().tolist() == [best_length(0.8, 0.1, max_length=12)[0]] * 2
    for _ in range(60):
        policy.learn(torch.tensor([6, 6]), torch.tensor([6, 1]))
    high, low = policy.start().tolist()
    assert high == 12 and low == best_length(0.5, 0.1, max_length=12)[0] < 5
    rates = [share / 23 for share in range(24)]
    verify = [2 + 0.4 * tokens + (tokens > 8) for tokens in range(1, 16)]
    policy = Best(cost=0.07, verify=verify, max_length=14, acceptance_decay=0.0)
    policy.begin(24, CPU)
    policy._rate = torch.tensor(rates, dtype=torch.float64)
    wanted = [
        max(best_length(rate, policy.cost, lambda tokens: verify[tokens - 1], policy.max_length)[0], 1)
        for rate in rates
    ]
    assert policy.start().tolist() == wanted and len({*wanted}) > 4


def test_windows_grow_and_shrink_row_by_row() -> None:
    policy = Window(4, max_length=8)
    policy.begin(3, CPU)
    policy.learn(torch.tensor([4, 4, 0]), torch.tensor([4, 2, 0]))
    assert policy.start().tolist() == [6, 3, 4]
    for policy_ in ("best", "window"):
        small = TableTarget(5, seed=3, blur=0.1)
        drafter = make_drafter("on-the-fly-window", model=small, policy=policy_, length=2, max_length=9)
        steps = list(
            decode(TableTarget(5, seed=3), drafter, Exact(), [[1]], sampling=Sampling(temperature=0), max_new_tokens=60)
        )
        assert len({len(step.drafted) for step in steps}) > 2


def test_a_policys_settings_are_checked() -> None:
    for options, message in (
        ({"policy": "guess"}, "Known: best"),
        ({"policy": "fixed", "threshold": 0.5}, "option of the policy 'fixed'"),
        ({"policy": "risk"}, "needs head"),
        ({"policy": Window(4), "max_length": 8}, "is an object"),
        ({"policy": "risk", "head": lambda inputs: inputs[:, 0], "threshold": 1.5}, "threshold is 1.5"),
    ):
        with pytest.raises(InvalidOption, match=message):
            DraftModel(TableTarget(5), **options)  # type: ignore[arg-type]
