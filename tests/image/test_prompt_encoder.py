"""Prompt ids: fixed length, inflected words, and errors for prompts without a known word."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.app.page.backends.image import ImageBackend
from outrider.core.errors import InvalidOption
from outrider.image.loading import load
from outrider.image.prompt_encoder import COMMON, HELD_OUT, LENGTH, PromptEncoder, most_common_words, words
from outrider.image.training.data import HELD_NAME, TRAIN, Picture, split

ENCODER = PromptEncoder(10, ("noto", "fluent"), ("cat", "cherry", "dance", "face", "heart", "red", "tear"))


def test_words_are_lower_case_ascii_without_stop_words() -> None:
    assert words("Cat with Tears-of-Joy!") == ["cat", "tears", "joy"]
    assert words("São Tomé & Príncipe 24") == ["sao", "tome", "principe", "24"]


def test_every_prompt_has_the_same_number_of_ids() -> None:
    first = 10 + 2 + 2
    assert ENCODER.encode("red heart") == [10, first + 5, first + 4, *[10] * 6]
    assert ENCODER.encode("red heart", "fluent")[0] == 13
    assert ENCODER.unconditional == [10] * 9
    assert len(ENCODER.encode("red " * 40)) == ENCODER.length == 1 + LENGTH
    assert all(len(ENCODER.encode(name)) == ENCODER.length for name in COMMON)


def test_inflected_words_have_the_id_of_their_base_form() -> None:
    ids = ENCODER._ids
    assert [ENCODER.word_id(word) for word in ("cats", "cherries", "dancing", "danced", "tears")] == [
        ids["cat"],
        ids["cherry"],
        ids["dance"],
        ids["dance"],
        ids["tear"],
    ]
    assert ENCODER.word_id("zeppelin") is None
    assert ENCODER.encode("red zeppelin")[2] == ENCODER.unknown


@pytest.mark.parametrize(
    ("prompt", "style", "message"),
    [
        ("", None, "empty"),
        (" of the ", None, "empty"),
        ("zeppelin", None, "none of the words"),
        ("haert", None, "did you mean heart"),
        ("heart", "apple", "unknown style 'apple'.*fluent, noto"),
        (3, None, "is a int"),
    ],
)
def test_bad_prompts_are_refused(prompt: str, style: str | None, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        ENCODER.encode_checked(prompt, style)


def test_the_vocabulary_prefers_words_in_names_to_keywords() -> None:
    texts = [("red heart", ("love",)), ("red apple", ("love", "fruit")), ("fruit bowl", ("love",))]
    assert most_common_words(texts, 3) == ("apple", "fruit", "red")  # love is only a keyword; ties are alphabetical
    assert len(set(COMMON)) == len(COMMON) >= 100


def test_the_held_out_names_are_not_in_the_training_split() -> None:
    assert len(set(HELD_OUT)) == len(HELD_OUT) >= 60
    drawn = [Picture(name, (), np.zeros((2, 2, 3), np.uint8)) for name in (*HELD_OUT, *COMMON)]
    assert split({"noto": drawn}).split.tolist() == [HELD_NAME] * len(HELD_OUT) + [TRAIN] * len(COMMON)
    known = load("emoji").prompt_encoder.words
    assert all(word in known for name in HELD_OUT for word in words(name))


def test_the_shipped_model_knows_every_word_of_the_example_prompts() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    readme, notebook = (
        (root / name).read_text(encoding="utf-8") for name in ("README.md", "notebooks/07-images.ipynb")
    )
    help_text = CliRunner().invoke(cli, ["image", "--help"], env={"COLUMNS": "200"}).stdout
    shown = [
        *re.findall(r'outrider image "([^"]+)"', readme),
        *re.findall(r"such as '([^']+)'", help_text),
        *re.findall(r'im\.generate\(\\"([^"\\]+)', notebook),
        *ImageBackend.examples,
    ]
    encoder = load("emoji").prompt_encoder
    assert {"red heart", "pizza"} <= set(shown) and len(shown) >= len(ImageBackend.examples) + 2
    unknown = {word for prompt in shown for word in words(prompt) if encoder.word_id(word) is None}
    assert not unknown
