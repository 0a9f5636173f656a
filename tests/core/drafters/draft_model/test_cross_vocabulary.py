"""Cross-vocabulary drafting: what the model reads, and the distributions it draws from; and Sequoia's calibration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.draft_model.cross_vocabulary import cross_vocabulary
from outrider.core.drafters.draft_model.sequoia import Calibration, Sequoia, measure
from outrider.core.drafters.draft_model.vocab_bridge import Renamed
from outrider.core.drafters.tree_shapes import sequoia
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact
from outrider.core.testing.table_target import TableTarget

GREEDY = Sampling(temperature=0)


def renamed(vocabulary: int) -> Renamed:
    """A bridge that gives every token another id."""
    return Renamed({token: (token + 1) % vocabulary for token in range(vocabulary)})


@pytest.mark.parametrize("way", ["retokenise", "shared"])
def test_the_model_reads_and_writes_its_own_ids(way: str) -> None:
    drafter = cross_vocabulary(TableTarget(5, seed=1), bridge=renamed(5), method=way, length=4)
    drafter.begin(Prefill(), [[0, 4], [2]], GREEDY)
    draft = drafter.propose(torch.tensor([9, 2]), CounterRNG.of(0, 2))
    for row, prompt in enumerate([[1, 0], [3]]):
        alone = list(decode(TableTarget(5, seed=1), None, Exact(), [prompt], sampling=GREEDY, max_new_tokens=4))
        wanted = [(step.emitted[0] - 1) % 5 for step in alone]
        live = int(draft.live[row].sum())
        assert draft.tokens[row, :live].tolist() == wanted[:live] and live == (4, 2)[row]


def test_the_distribution_over_shared_tokens_is_renormalised() -> None:
    names = {0: 3, 2: 1}  # two of the model's five
    model = TableTarget(5, seed=1)
    drafter = cross_vocabulary(model, bridge=Renamed(names, unknown=4, size=3), method="shared", length=1)
    drafter.begin(Prefill(), [[0, 1]], Sampling())
    draft = drafter.propose(torch.tensor([5]), CounterRNG.of(0, 1))
    alone = TableTarget(5, seed=1)
    alone.begin([[3, 4]], Sampling())
    raw = torch.softmax(alone.logits(alone._context), -1)[0]
    assert draft.distributions is not None
    found = draft.distributions.dense().probs[0, 0]
    wanted = torch.tensor([float(raw[3]), 0.0, float(raw[1])], dtype=torch.float64) / float(raw[3] + raw[1])
    torch.testing.assert_close(found, wanted)


def test_unshared_tokens_are_not_drafted() -> None:
    bridge = Renamed({0: 0, 1: 1}, unknown=2)
    passage = bridge.open([0, 7])
    assert passage.settled() == [0, 2] and passage.settled() == [] and passage.tail == []
    assert passage.back([1, 0, 2, 1]) == [1, 0]
    with pytest.raises(InvalidOption, match="share no tokens"):
        cross_vocabulary(TableTarget(3), bridge=Renamed({}), method="shared")
    with pytest.raises(InvalidOption, match="retokenise"):
        cross_vocabulary(TableTarget(3), method="telepathy")


# ---- Sequoia


def test_measured_acceptance_determines_the_tree(tmp_path: Path) -> None:
    target, model = TableTarget(5, seed=3), TableTarget(5, seed=3, blur=0.3)
    *_, counts = measure(target, model, [[1, 2], [0]], sampling=Sampling(), width=3, depth=3, tokens=150)
    assert counts.tried[0] > 100 and 0.4 < counts.vector()[0] < 0.95
    dear = Calibration(counts, 0.5, ((1, 1.0), (2, 1.5), (4, 2.5), (8, 4.5)))
    cheap = Calibration(counts, 0.01, ((1, 1.0), (2, 1.0), (4, 1.0), (8, 1.02), (16, 1.05)))
    shapes = [Sequoia(model, acceptance=one, nodes=16, depth=5).shape for one in (dear, cheap)]
    assert len(shapes[0]) < len(shapes[1])
    cheap.save(tmp_path / "sequoia.json")
    assert Calibration.load(tmp_path / "sequoia.json") == cheap
    assert Sequoia(model, acceptance=str(tmp_path / "sequoia.json"), nodes=16, depth=5).shape == shapes[1]
    plain = Sequoia(model, acceptance=counts.vector(), nodes=9, depth=3)
    assert plain.shape == sequoia(counts.vector(), 9, 3).shape(9, 3)
    (tmp_path / "bad.json").write_text('{"acceptance": {"tried": [1], "accepted": [2]}, "draft": 0, "passes": []}')
    with pytest.raises(InvalidOption, match="accepted 2 times"):
        Sequoia(model, acceptance=tmp_path / "bad.json")


def test_temperature_0_drafts_the_likeliest_siblings() -> None:
    model = TableTarget(5, seed=3, blur=0.3)
    drafter = Sequoia(model, acceptance=(0.5, 0.3), nodes=6, depth=3)
    steps = list(decode(TableTarget(5, seed=3), drafter, Exact(), [[1]], sampling=GREEDY, max_new_tokens=30))
    assert all(all(step.fixed) for step in steps) and max(len(step.drafted) for step in steps) == 6
    steps = list(decode(TableTarget(5, seed=3), drafter, Exact(), [[1]], max_new_tokens=30))
    assert not any(any(step.fixed) for step in steps)
