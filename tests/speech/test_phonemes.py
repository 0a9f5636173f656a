"""What can be spoken, in which pieces, and as which phonemes."""

from __future__ import annotations

import pytest

from outrider.speech import phonemes as spoken
from outrider.speech.phonemes import COUNT, EDGE, IDS, LONGEST, TextError, ids, phonemes, pieces, spelled_out


def test_every_symbol_is_one_sign_with_an_id_of_its_own() -> None:
    assert sorted(IDS.values()) == list(range(1, COUNT)) and EDGE not in IDS.values()


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "no text"), ("  \n", "no text"), ("... ?!", "nothing that can be spoken"), ("a" * 20_001, "20,001")],
)
def test_what_cannot_be_spoken_is_said(text: str, said: str) -> None:
    with pytest.raises(TextError, match=said):
        pieces(text)
    with pytest.raises(TextError, match="give a string"):
        pieces(3)  # type: ignore[arg-type]


def test_long_text_is_parted_and_nothing_is_lost() -> None:
    text = ("The harbour was quiet, and nobody had seen the ship. " * 190)[:9_990] + " " + "x" * 300
    found = pieces(text)
    assert len(found) > 40 and max(map(len, found)) <= LONGEST
    assert "".join(found).replace(" ", "") == text.replace(" ", "")
    assert pieces("Yes. No. Perhaps.") == ["Yes. No. Perhaps."]
    assert pieces("It’s one.\n\nAnd two!") == ["It's one.", "And two!"]
    assert pieces("no full stop at the end") == ["no full stop at the end"]


def test_the_package_reads_english() -> None:
    pytest.importorskip("hibari")
    assert phonemes("Good morning.") == "ɡˈʊd mˈɔɹnɪŋ."
    assert "fˈɔɹTi tˈu" in phonemes("It costs 42 dollars.")
    assert ids("a?") == [EDGE, IDS["a"], IDS["?"], EDGE]
    with pytest.raises(TextError, match="English"):
        phonemes("—")


def test_without_it_words_are_read_by_their_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spoken, "reader", lambda: None)
    assert phonemes("A cake, she phoned 2 chicks!") == "ˈA kˈAk, ʃˈi fˈɑnɛd twˈO ʧˈɪks!"
    assert set(spelled_out("The 7 dwarves' rhythm, isn't it? Quixotic…")) <= set(IDS)
