"""The best tree from measured acceptance rates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.core.drafters.tree_shapes import branching
from outrider.core.errors import InvalidOption
from outrider.core.trace import Step
from outrider.core.training.draft_head import DraftHead
from outrider.speech.conditioned_heads import ConditionedHeads
from outrider.speech.evaluation.tree_search import best_tree, measured_tree
from outrider.speech.model import SpeechModel
from outrider.speech.voice import Voice, VoiceDecoder

WIDE = branching((2, 2))  # 0 and 1; below 0: 2 and 3, below 1: 4 and 5


def step(*path: int) -> Step:
    """A step in which siblings are tried in order up to the accepted one."""
    tried = [False] * 6
    current = -1
    for node in (*path, None):
        siblings = [child for child, parent in enumerate(WIDE) if parent == current]
        for child in siblings:
            tried[child] = True
            if child == node:
                current = child
                break
        else:
            break
    return Step(row=0, index=0, drafted=(7,) * 6, parents=WIDE, tried=tuple(tried), path=path)


def test_acceptance_is_measured_by_level() -> None:
    # level 0: first sibling 5 of 10, second 2 of 10; level 1: first 1 of 7, second 3 of 7
    steps = [step(0, 2), *[step(0, 3)] * 3, step(0), step(1), step(1), step(), step(), step()]
    best = best_tree(steps, 6)
    assert best.acceptance[0] == pytest.approx((0.5, 0.2)) and best.acceptance[1] == pytest.approx((3 / 7, 1 / 7))
    assert best.shape == WIDE and best.tokens_per_pass == pytest.approx(1 + 0.7 + 0.7 * 4 / 7)
    small = best_tree(steps, 2)
    assert small.shape == (-1, 0) and small.tokens_per_pass == pytest.approx(1 + 0.5 + 0.5 * 3 / 7)
    with pytest.raises(InvalidOption, match="nothing was drafted"):
        best_tree([Step(row=0, index=0)], 4)


def test_a_drafter_runs_the_tree_measured_for_it(small_voice: Callable[..., Voice], speaker: SpeechModel) -> None:
    def taught(name: str, target: VoiceDecoder) -> DraftHead:
        return ConditionedHeads(target, heads=3).to(torch.float64)

    model = SpeechModel(small_voice(), speaker.codec, speaker.vocoder, name="small", taught=taught, dtype=torch.float64)
    measured = measured_tree(model, "medusa", ["Yes.", "No."], nodes=4, wide=(4, 2), temperature=0.5)
    assert 1 <= len(measured.shape) <= 4 and 1 < measured.tokens_per_pass <= 3
    options = {"rule": "gumbel-match", "seed": 1, "temperature": 0.5}
    drafted = model.generate("Two.", drafter="medusa", drafter_options={"tree": measured.shape}, **options)  # type: ignore[arg-type]
    assert drafted.tokens == model.generate("Two.", drafter=None, **options).tokens  # type: ignore[arg-type]
    assert max(len(step.drafted) for step in drafted.trace.steps) == len(measured.shape)
    with pytest.raises(InvalidOption, match="no sentences"):
        measured_tree(model, "medusa", [])
