"""Trees by measured acceptance."""

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
from outrider.speech.voice import Speaker, Voice

WIDE = branching((2, 2))  # 0 and 1; below 0: 2 and 3, below 1: 4 and 5


def step(*path: int) -> Step:
    """Siblings are tried in order up to the accepted one."""
    tried = [False] * 6
    above = -1
    for node in (*path, None):
        group = [kid for kid, parent in enumerate(WIDE) if parent == above]
        for kid in group:
            tried[kid] = True
            if kid == node:
                above = kid
                break
        else:
            break
    return Step(row=0, index=0, drafted=(7,) * 6, parents=WIDE, tried=tuple(tried), path=path)


def test_each_level_has_its_own_measure() -> None:
    # level 0: first sibling 5 of 10, second 2 of 10; level 1: first 1 of 7, second 3 of 7
    steps = [step(0, 2), *[step(0, 3)] * 3, step(0), step(1), step(1), step(), step(), step()]
    found = best_tree(steps, 6)
    assert found.acceptance[0] == pytest.approx((0.5, 0.2)) and found.acceptance[1] == pytest.approx((3 / 7, 1 / 7))
    assert found.shape == WIDE and found.tokens_per_pass == pytest.approx(1 + 0.7 + 0.7 * 4 / 7)
    small = best_tree(steps, 2)
    assert small.shape == (-1, 0) and small.tokens_per_pass == pytest.approx(1 + 0.5 + 0.5 * 3 / 7)
    with pytest.raises(InvalidOption, match="nothing was drafted"):
        best_tree([Step(row=0, index=0)], 4)


def test_a_drafter_is_measured_and_runs_its_tree(small_voice: Callable[..., Voice], speaker: SpeechModel) -> None:
    def taught(name: str, target: Speaker) -> DraftHead:
        return ConditionedHeads(target, heads=3).to(torch.float64)

    model = SpeechModel(small_voice(), speaker.codec, speaker.vocoder, name="small", taught=taught, dtype=torch.float64)
    found = measured_tree(model, "medusa", ["Yes.", "No."], nodes=4, wide=(4, 2), temperature=0.5)
    assert 1 <= len(found.shape) <= 4 and 1 < found.tokens_per_pass <= 3
    options = {"rule": "gumbel-match", "seed": 1, "temperature": 0.5}
    said = model.generate("Two.", drafter="medusa", drafter_options={"tree": found.shape}, **options)  # type: ignore[arg-type]
    assert said.tokens == model.generate("Two.", **options).tokens  # type: ignore[arg-type]
    assert max(len(one.drafted) for one in said.trace.steps) == len(found.shape)
    with pytest.raises(InvalidOption, match="no sentences"):
        measured_tree(model, "medusa", [])
