"""SAM Decoding: the longest match decides between the text, the corpus and Token Recycling."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.core.distribution import Sampling
from outrider.core.drafters.lookup.retrieval import Datastore
from outrider.core.drafters.lookup.sam import SamDecoding
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill

CORPUS = [[*range(30, 50)], [9, 8, *range(33, 37), 60, 61], [8, *range(33, 37), 60, 62]]


def drafted(drafter: SamDecoding, prompt: list[int], room: int = 20) -> tuple[str, list[int]]:
    """Where the first draft comes from, and its tokens."""
    drafter.begin(Prefill(), [prompt], Sampling())
    (trie,) = drafter.tries([room])
    drafter.end()
    return drafter.sources[0], trie.tokens


def test_the_text_is_copied_after_a_long_match() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]
    assert drafted(SamDecoding(length=3), prompt) == ("text", [6, 7, 1])
    source, tokens = drafted(SamDecoding(length=3, threshold=6), prompt)
    assert source == "recycling" and tokens[0] == 6


@pytest.mark.parametrize("bias", [0, 2, 3])
def test_the_corpus_is_copied_if_its_match_is_longer_by_more_than_the_bias(bias: int) -> None:
    prompt = [34, 35, 36, 50, 32, 33, 34, 35, 36]  # three tokens in the text, five in the corpus; there followed by 37
    found = drafted(SamDecoding(corpus=CORPUS, length=3, threshold=3, bias=bias), prompt)
    assert found == (("corpus", [37, 38, 39]) if bias < 2 else ("text", [50, 32, 33]))


def test_what_followed_most_often_in_the_corpus_is_drafted() -> None:
    found = drafted(SamDecoding(corpus=CORPUS, length=3, threshold=4, bias=0), [20, 33, 34, 35, 36])
    assert found[0] == "corpus" and found[1][0] == 60


def test_a_corpus_can_be_a_file_and_the_room_is_kept(tmp_path: Path) -> None:
    Datastore.build(CORPUS).save(tmp_path / "a.store")
    drafter = SamDecoding(corpus=tmp_path / "a.store", threshold=3, bias=0)
    assert drafted(drafter, [30, 31, 32], room=2) == ("corpus", [33, 34])
    assert drafted(drafter, [30, 31, 32], room=0)[1] == []
    with pytest.raises(InvalidOption, match="bias must be 0 or more"):
        SamDecoding(bias=-1)
