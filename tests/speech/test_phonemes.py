"""Splitting text into utterances, and phonemes with and without hibari."""

from __future__ import annotations

import pytest

from outrider.speech import phonemes as module
from outrider.speech.phonemes import (
    COUNT,
    EDGE,
    IDS,
    MAX_LENGTH,
    TextError,
    by_spelling,
    ids,
    phonemes,
    split_utterances,
)


def test_every_symbol_is_one_character_with_its_own_id() -> None:
    assert sorted(IDS.values()) == list(range(1, COUNT)) and EDGE not in IDS.values()


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "text is empty"), ("  \n", "text is empty"), ("... ?!", "nothing to speak"), ("a" * 20_001, "20,001")],
)
def test_unspeakable_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        split_utterances(text)
    with pytest.raises(TextError, match="give a string"):
        split_utterances(3)  # type: ignore[arg-type]


def test_long_text_is_split_without_loss() -> None:
    text = ("The harbour was quiet, and nobody had seen the ship. " * 190)[:9_990] + " " + "x" * 300
    utterances = split_utterances(text)
    assert len(utterances) > 40 and max(map(len, utterances)) <= MAX_LENGTH
    assert "".join(utterances).replace(" ", "") == text.replace(" ", "")
    assert split_utterances("Yes. No. Perhaps.") == ["Yes. No. Perhaps."]
    assert split_utterances("It’s one.\n\nAnd two!") == ["It's one.", "And two!"]
    assert split_utterances("no full stop at the end") == ["no full stop at the end"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("See www.site.net/a-page?x=1.", "See w w w dot site dot net slash a dash page question mark x equals 1."),
        ("(https://docs.site.org:80/3/)", "(docs dot site dot org colon 80 slash 3 slash)"),
        ("Mail joe_b@site.co.uk, or site.io!", "Mail joe underscore b at site dot co dot uk, or site dot io!"),
        ("e.g. 3.14 at 5 a.m., v2.0 of node.js @home", "e.g. 3.14 at 5 a.m., v2.0 of node.js @home"),
    ],
)
def test_addresses_are_said_sign_by_sign(text: str, said: str) -> None:
    assert split_utterances(text) == [said]


@pytest.mark.timeout(20)  # a search that begins at each letter of these takes longer
@pytest.mark.parametrize("part", ["a", "a.", "a-", "a@", "www.", "a@a.", "http://", "com/"])
def test_no_text_takes_long_to_search_for_addresses(part: str) -> None:
    for _ in range(10):
        split_utterances("b" + part * (19_999 // len(part)))


@pytest.mark.parametrize("word", ["你好", "Привет", "λόγος", "Pоst"])  # the last with a Cyrillic letter
def test_other_letters_than_latin_ones_are_named(word: str) -> None:
    with pytest.raises(TextError, match=f"'{word}' is not in Latin letters"):
        split_utterances(f"hello {word}, world")
    text = "Łódź, Dvořák, ʻOkina: 5 µm, π and straße"
    assert split_utterances(text) == [text.replace("µ", "μ")]


def test_hibari_converts_english() -> None:
    pytest.importorskip("hibari")
    assert phonemes("Good morning.") == "ɡˈʊd mˈɔɹnɪŋ."
    assert "fˈɔɹTi tˈu" in phonemes("It costs 42 dollars.")
    assert ids("a?") == [EDGE, IDS["a"], IDS["?"], EDGE]
    with pytest.raises(TextError, match="English"):
        phonemes("—")


def test_without_hibari_spelling_rules_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hibari", lambda: None)
    assert phonemes("A cake, she phoned 2 chicks!") == "ˈA kˈAk, ʃˈi fˈɑnɛd twˈO ʧˈɪks!"
    assert set(by_spelling("The 7 dwarves' rhythm, isn't it? Quixotic…")) <= set(IDS)
