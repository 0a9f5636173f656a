"""Which sentences there are, and that nobody learns from what is held out."""

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
from outrider.speech.training.sentences import KINDS, SentenceError, held, learned, plain, spelled


@pytest.mark.parametrize(
    ("raw", "said"),
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
def test_only_what_can_be_read_out_is_kept(raw: str, said: str | None) -> None:
    assert plain(raw) == said


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (13, "thirteen"), (90, "ninety"), (305, "three hundred five"), (-21, "minus twenty-one")],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert spelled(number) == words
    assert spelled(2_000_017) == "two million seventeen"


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three sources in small, packed as they come."""
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
def test_nobody_learns_from_what_is_held_out() -> None:
    said = list(itertools.islice(learned(), 1500))
    texts = {one.text for one in said}
    assert len(texts) == len(said) and {one.kind for one in said} == set(KINDS) - {"novel"}
    assert said[:50] == list(itertools.islice(learned(), 50))
    for kind in KINDS:
        kept = held(kind, 8)
        assert len({one.text for one in kept}) == 8 and not {one.text for one in kept} & texts
    with pytest.raises(SentenceError, match="held-out sentences of the kind novel"):
        held("novel", 60)
    with pytest.raises(InvalidOption, match="kind of sentence"):
        held("poems", 1)


def test_what_is_made_can_be_read_out() -> None:
    for kind in ("everyday", "numbers"):
        for text in itertools.islice(sentences._endless(kind), 300):
            assert text[0].isupper() and text[-1] in ".!?" and "{" not in text
