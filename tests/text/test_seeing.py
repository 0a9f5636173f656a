"""Language models that see: the real classes of transformers, tiny, of random weights. What they answer is what their
own `generate` answers, whoever drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core.errors import Incompatible, InvalidOption
from outrider.text.seeing import Seeing, caught

WORDS = 60
LANGUAGE = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
PICTURE = 5  # the id that stands for a piece of a picture


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2")


def llava() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**LANGUAGE), image_token_id=PICTURE)
    model = LlavaForConditionalGeneration(config)
    ids = torch.tensor([[0, 7, *[PICTURE] * 4, 9, 12, 30]])
    return model, {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}


def qwen() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig(
        text_config={
            **LANGUAGE,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        },
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
        image_token_id=PICTURE,
        vision_start_token_id=6,
        vision_end_token_id=8,
        video_token_id=4,
    )
    model = Qwen2VLForConditionalGeneration(config)
    ids = torch.tensor([[0, 7, 6, *[PICTURE] * 4, 8, 12, 30]])
    grid = torch.tensor([[1, 4, 4]])
    kinds = (ids == PICTURE).long()
    pixels = torch.randn(16, 3 * 2 * 4 * 4)
    return model, {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}


MODELS = {"llava": llava, "qwen2-vl": qwen}


def made(name: str, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    model, given = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    model.generation_config.eos_token_id = 1
    return model.eval(), given


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_class_s_own(name: str, count: int) -> None:
    model, given = made(name)
    seeing, answers = Seeing(model, tokenizer()), set()
    for number in range(count):
        asked = {**given, "pixel_values": torch.randn_like(given["pixel_values"])}
        asked["input_ids"] = given["input_ids"].clone()
        asked["input_ids"][0, -1] = 20 + number
        length = asked["input_ids"].shape[1]
        own = model.generate(
            **asked, attention_mask=torch.ones(1, length), max_new_tokens=64, do_sample=False, pad_token_id=2
        )
        found = seeing.answer(asked, drafter=None, max_new_tokens=64, temperature=0.0)
        assert found.tokens == own[0, length:].tolist()
        answers.add(tuple(found.tokens))
        for drafter in ("prompt-lookup", "jacobi", "token-recycling") if number < 2 else ():
            options = {"start": None} if drafter == "token-recycling" else {}
            other = seeing.answer(asked, drafter=drafter, drafter_options=options, max_new_tokens=64, temperature=0.0)
            assert other.tokens == found.tokens
    assert len(answers) > count // 2


def test_the_picture_is_looked_at() -> None:
    model, given = made("llava")
    seeing = Seeing(model, tokenizer())
    one = seeing.answer(given, drafter="suffix", max_new_tokens=16, temperature=0.0)
    other = seeing.answer(
        {**given, "pixel_values": -3 * given["pixel_values"]}, drafter="suffix", max_new_tokens=16, temperature=0.0
    )
    assert one.tokens != other.tokens


def test_what_cannot_be_read_is_refused() -> None:
    model, given = made("llava")
    with pytest.raises(InvalidOption, match="one prompt is asked for"):
        Seeing(model, tokenizer()).answer({"input_ids": torch.zeros(2, 3).long()})
    with pytest.raises(Incompatible, match="did not call its language model"):
        caught(model, torch.nn.Linear(1, 1), given)
