"""Prompts as ids: always as many, words found in their forms, nothing passed over in silence."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.app.page.backends.image import Pictures
from outrider.core.errors import InvalidOption
from outrider.image.loading import load
from outrider.image.prompt_encoder import COMMON, HELD_OUT, LENGTH, PromptEncoder, commonest, words
from outrider.image.training.data import HELD_NAME, LEARNED, Drawn, split

NAMES = PromptEncoder(10, ("noto", "fluent"), ("cat", "cherry", "dance", "face", "heart", "red", "tear"))


def test_words_are_plain_and_say_something() -> None:
    assert words("Cat with Tears-of-Joy!") == ["cat", "tears", "joy"]
    assert words("São Tomé & Príncipe 24") == ["sao", "tome", "principe", "24"]


def test_every_prompt_has_as_many_ids() -> None:
    first = 10 + 2 + 2
    assert NAMES.encode("red heart") == [10, first + 5, first + 4, *[10] * 6]
    assert NAMES.encode("red heart", "fluent")[0] == 13
    assert NAMES.free == [10] * 9
    assert len(NAMES.encode("red " * 40)) == NAMES.length == 1 + LENGTH
    assert all(len(NAMES.encode(one)) == NAMES.length for one in COMMON)


def test_forms_of_a_word_are_found() -> None:
    ids = NAMES._ids
    assert [NAMES.known(one) for one in ("cats", "cherries", "dancing", "danced", "tears")] == [
        ids["cat"],
        ids["cherry"],
        ids["dance"],
        ids["dance"],
        ids["tear"],
    ]
    assert NAMES.known("zeppelin") is None
    assert NAMES.encode("red zeppelin")[2] == NAMES.other


@pytest.mark.parametrize(
    ("prompt", "style", "said"),
    [
        ("", None, "empty"),
        (" of the ", None, "empty"),
        ("zeppelin", None, "none of the words"),
        ("haert", None, "did you mean heart"),
        ("heart", "apple", "unknown style 'apple'.*fluent, noto"),
        (3, None, "is a int"),
    ],
)
def test_bad_prompts_are_refused(prompt: str, style: str | None, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        NAMES.read(prompt, style)


def test_the_commonest_words_are_kept_names_before_keywords() -> None:
    texts = [("red heart", ("love",)), ("red apple", ("love", "fruit")), ("fruit bowl", ("love",))]
    assert commonest(texts, 3) == ("apple", "fruit", "red")  # love is a keyword only; ties go by the alphabet
    assert len(set(COMMON)) == len(COMMON) >= 100


def test_names_that_measure_were_held_out() -> None:
    assert len(set(HELD_OUT)) == len(HELD_OUT) >= 60
    drawn = [Drawn(name, (), np.zeros((2, 2, 3), np.uint8)) for name in (*HELD_OUT, *COMMON)]
    assert split({"noto": drawn}).split.tolist() == [HELD_NAME] * len(HELD_OUT) + [LEARNED] * len(COMMON)
    known = load("emoji").names.words
    assert all(one in known for name in HELD_OUT for one in words(name))


def test_the_model_that_ships_knows_every_word_that_it_is_shown_with() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    readme, notebook = (
        (root / name).read_text(encoding="utf-8") for name in ("README.md", "notebooks/07-images.ipynb")
    )
    told = CliRunner().invoke(cli, ["image", "--help"], env={"COLUMNS": "200"}).stdout
    shown = [
        *re.findall(r'outrider image "([^"]+)"', readme),
        *re.findall(r"such as '([^']+)'", told),
        *re.findall(r'im\.generate\(\\"([^"\\]+)', notebook),
        *Pictures.examples,
    ]
    names = load("emoji").names
    assert {"red heart", "pizza"} <= set(shown) and len(shown) > len(Pictures.examples) + 2
    unknown = {word for prompt in shown for word in words(prompt) if names.known(word) is None}
    assert not unknown
