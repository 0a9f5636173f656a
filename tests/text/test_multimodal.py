"""Multimodal models: tiny transformers classes with random weights give the output of their own `generate`.

Every drafter on them is tested in tests/test_published.py.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.core.errors import Incompatible, InvalidOption
from outrider.text.multimodal import MultimodalModel, intercept

TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "tiny_classes.py")))
MODELS = {"llava": TINY.llava, "qwen2-vl": TINY.qwen2_vl}


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_answers_equal_the_class_generate(name: str, count: int) -> None:
    model, given = MODELS[name]()
    seeing, answers = MultimodalModel(model, TINY.read(60)), set()
    for number in range(count):
        asked = {**given, "pixel_values": torch.randn_like(given["pixel_values"])}
        asked["input_ids"] = given["input_ids"].clone()
        asked["input_ids"][0, -1] = 20 + number
        length = asked["input_ids"].shape[1]
        own = model.generate(
            **asked, attention_mask=torch.ones(1, length), max_new_tokens=64, do_sample=False, pad_token_id=2
        )
        result = seeing.answer(asked, drafter=None, max_new_tokens=64, temperature=0.0)
        assert result.tokens == own[0, length:].tolist()
        answers.add(tuple(result.tokens))
    assert len(answers) > count // 2


def test_the_picture_changes_the_answer() -> None:
    model, given = TINY.llava()
    seeing = MultimodalModel(model, TINY.read(60))
    one = seeing.answer(given, drafter="suffix", max_new_tokens=16, temperature=0.0)
    other = seeing.answer(
        {**given, "pixel_values": -3 * given["pixel_values"]}, drafter="suffix", max_new_tokens=16, temperature=0.0
    )
    assert one.tokens != other.tokens


def test_unsupported_inputs_raise() -> None:
    model, given = TINY.llava()
    with pytest.raises(InvalidOption, match="expected one prompt"):
        MultimodalModel(model, TINY.read(60)).answer({"input_ids": torch.zeros(2, 3).long()})
    with pytest.raises(Incompatible, match="did not call its language model"):
        intercept(model, torch.nn.Linear(1, 1), given)
