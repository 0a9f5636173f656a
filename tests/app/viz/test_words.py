"""The words of the page are the first ten of the glossary."""

from __future__ import annotations

from pathlib import Path

from outrider.app.viz.words import WORDS, words

GLOSSARY = Path(__file__).parents[3] / "docs" / "glossary.md"


def test_the_glossary_begins_with_the_words_of_the_page() -> None:
    first = " ".join(GLOSSARY.read_text().split("## Further terms")[0].split())
    assert len(WORDS) <= 10
    for word, meaning in WORDS.items():
        assert f"{word} : {meaning}" in first and f"<dt>{word}</dt>" in words()
