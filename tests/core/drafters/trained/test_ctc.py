"""CTC drafting: the prefix beam search against every sequence of frames, and the tree of prefixes."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.drafters.trained.ctc import CtcFrames, collapse, prefix_beams, prefix_tree
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.rng import CounterRNG

SHAPE = Config(vocabulary=31, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=48)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_beam_search_sums_all_frames_that_collapse_alike(length: int) -> None:
    size, frames = 3, 5  # two tokens and the blank
    logits = 2 * torch.randn(2, frames, size, generator=torch.Generator().manual_seed(length)).double()
    tokens, value = prefix_beams(logits, length, 40)
    for row in range(2):
        exact: dict[tuple[int, ...], float] = {}
        probs = logits[row].softmax(-1)
        for path in product(range(size), repeat=frames):
            said = tuple(collapse(torch.tensor(path), size - 1, length).tolist())
            exact[said] = exact.get(said, 0.0) + float(probs[torch.arange(frames), list(path)].prod())
        assert value[row].sum() == pytest.approx(1)
        assert (value[row].diff() <= 0).all()
        found = {
            tuple(one): float(mass) for one, mass in zip(tokens[row].tolist(), value[row], strict=True) if mass > 0
        }
        assert found == pytest.approx(exact)


def test_few_beams_keep_the_likeliest() -> None:
    logits = 3 * torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0)).double()
    every, masses = prefix_beams(logits, 3, 400)
    few, _ = prefix_beams(logits, 3, 12, choices=5)
    assert few[0, 0].tolist() == every[0, 0].tolist()
    greedy = collapse(logits.argmax(-1), 7, 3)
    assert masses[0, 0] >= masses[0][(every[0] == greedy[0]).all(-1)].sum()


def test_sequences_share_their_prefixes() -> None:
    tokens = torch.tensor([[[4, 7, -1], [4, 9, 1], [5, -1, -1], [4, 7, 2]]])
    at, parents, mass, live = prefix_tree(tokens, torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.double))
    assert live[0].nonzero()[:, 0].tolist() == [0, 2, 4, 5, 9, 11]
    assert at[0, live[0]].tolist() == [4, 5, 7, 9, 1, 2]
    assert parents[0, live[0]].tolist() == [-1, -1, 0, 0, 5, 4]
    torch.testing.assert_close(mass[0, live[0]], torch.tensor([0.8, 0.2, 0.5, 0.3, 0.3, 0.1], dtype=torch.double))


@pytest.mark.parametrize("options", [{}, {"rank": 4, "mixing": 2, "hidden": 8, "lora": 2}])
def test_a_draft_is_the_tree_of_the_likeliest_prefixes(options: dict[str, int]) -> None:
    model = Decoder.random(SHAPE, seed=5)
    torch.manual_seed(0)
    head = CtcFrames(model, frames=5, length=3, **options)
    with torch.no_grad():
        head.blank.weight.normal_()
        head.heads.outer.weight.normal_()
    drafter = Learned(head.drafts(model), nodes=9, depth=3)
    prefill = model.begin([[1, 2, 3], [4, 5, 6]], Sampling(temperature=0), head.needs)
    drafter.begin(prefill, [[1, 2, 3], [4, 5, 6]], Sampling(temperature=0))
    draft = drafter.propose(torch.tensor([8, 2]), CounterRNG([0, 1]))
    assert draft.size == 9
    for row, deepest in ((0, 3), (1, 2)):
        paths = []
        for node in range(draft.size):
            if draft.live[row, node]:
                path, at = [], node
                while at >= 0:
                    path.append(int(draft.tokens[row, at]))
                    at = int(draft.tree.parents[row, at])
                paths.append(tuple(reversed(path)))
        assert len(set(paths)) == len(paths) > 2 and max(map(len, paths)) <= deepest
