"""Training sentences, held-out sentences, and numbers in words."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from pathlib import Path

import pytest

from outrider.core.assets import archives as held_archives
from outrider.core.errors import InvalidOption
from outrider.speech.training import sentences
from outrider.speech.training.sentences import KINDS, SentenceError, clean, held_out, spelled, training_sentences


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("  the chimney exhales\n a thick smoke ", "The chimney exhales a thick smoke."),
        ("Call me Ishmael!", "Call me Ishmael!"),
        ("too short", None),
        ("It was signed by Mr. Smith on that day.", None),
        ("There were 3 of them in the boat.", None),
        ("The NATO treaty was signed that day.", None),
        ("naïve people lived in that town", None),
        (" ".join(["word"] * 40), None),
    ],
)
def test_only_readable_sentences_are_kept(raw: str, sentence: str | None) -> None:
    assert clean(raw) == sentence


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (13, "thirteen"), (90, "ninety"), (305, "three hundred five"), (-21, "minus twenty-one")],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert spelled(number) == words
    assert spelled(2_000_017) == "two million seventeen"


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small versions of the three sources, packed as published."""
    verbs = "".join(f'{n:08} 29 v 01 go 0 | move; "they went to town number {spelled(n)}"\n' for n in range(400))
    speech = " ".join(f"We have {spelled(n)} duties to the nation." for n in range(300))
    novel = " ".join(f"The whale came up {spelled(n)} times." for n in range(50))
    for name, path, text in (
        ("wordnet", "package/dict/data.verb", verbs),
        ("speeches", "package/data/1790_nobody_n.json", json.dumps({"text": speech})),
        ("moby-dick", "package/data/chapter_1.json", json.dumps({"text": novel})),
    ):
        (tmp_path / name).mkdir()
        with tarfile.open(tmp_path / name / f"{name}.tgz", "w:gz") as archive:
            member = tarfile.TarInfo(path)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setattr(held_archives, "fetch", lambda name, table: tmp_path / name)


@pytest.mark.usefixtures("archives")
def test_held_out_sentences_are_not_in_training() -> None:
    training = list(itertools.islice(training_sentences(), 1500))
    texts = {sentence.text for sentence in training}
    assert len(texts) == len(training) and {sentence.kind for sentence in training} == set(KINDS) - {"novel"}
    assert training[:50] == list(itertools.islice(training_sentences(), 50))
    for kind in KINDS:
        held_out_texts = {sentence.text for sentence in held_out(kind, 8)}
        assert len(held_out_texts) == 8 and not held_out_texts & texts
    with pytest.raises(SentenceError, match="held-out sentences of the kind novel"):
        held_out("novel", 60)
    with pytest.raises(InvalidOption, match="kind of sentence"):
        held_out("poems", 1)


def test_generated_sentences_are_readable() -> None:
    for kind in ("everyday", "numbers"):
        for text in itertools.islice(sentences._all_of(kind), 300):
            assert text[0].isupper() and text[-1] in ".!?" and "{" not in text
