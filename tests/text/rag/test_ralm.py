"""Speculative lookups: the same tokens and documents as without speculation, whatever the cache guesses; fewer calls of
the store; the scheduler."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.core.errors import InvalidOption
from outrider.text import load
from outrider.text.model import TextModel
from outrider.text.rag.ralm import Speculation, Stride, Writer
from outrider.text.rag.retrievers import BM25, Dense, Numbers, Retriever, retriever, vectors
from tests.text.tiny import write

WORDS = ("cat", "dog", "rain", "mat", "log", "plain", "fox", "hens", "wizards", "violins", "moonlight", "lazy", "fell")
PASSAGES = [f"{one} and {other}" for one in WORDS for other in WORDS if one != other]
QUESTIONS = ("the cat sat on the mat", "seven wizards play")


def embed(texts: Sequence[str]) -> Numbers:
    """Embed texts by their letter counts."""
    result = np.zeros((len(texts), 32), np.float32)
    for row, text in enumerate(texts):
        for place in range(len(text) - 1):
            digest = hashlib.sha256(text[place : place + 2].encode()).digest()
            result[row] += np.frombuffer(digest, np.uint8).astype(np.float32) - 127.5
    result /= np.linalg.norm(result, axis=1, keepdims=True) + 1e-6
    return result


STORES: dict[str, Any] = {
    "dense": lambda: Dense(PASSAGES, embed=embed),
    "dense-approximate": lambda: Dense(PASSAGES, embed=embed, approximate=True),
    "bm25": lambda: BM25(PASSAGES),
}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load(write(tmp_path_factory.mktemp("tiny"), eos_token_id=None), dtype="float32")


@pytest.fixture(scope="module", params=list(STORES))
def store(request: pytest.FixtureRequest) -> Retriever:
    result: Retriever = STORES[request.param]()
    return result


HOWS = (
    Speculation(ahead=1, prefetch=1),
    Speculation(ahead=3, prefetch=4),
    Speculation(ahead=4, prefetch=2, overlap=True),
    Speculation(prefetch=3),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"drafter": "prompt-lookup"}, marks=pytest.mark.slow),
        {"temperature": 1.0, "seed": 7},
    ],
    ids=str,
)
def test_speculation_changes_neither_tokens_nor_documents(
    options: dict[str, Any], lm: TextModel, store: Retriever
) -> None:
    writer = Writer(lm, store, stride=3, window=8, max_new_tokens=22, **options)
    taken_back = 0
    for question in QUESTIONS:
        plain = writer.plain(question)
        assert len(plain.tokens) == 22 and plain.finish_reason == "length"
        assert plain.lookups.calls == plain.lookups.queries == len(plain.documents) == 8
        for how in HOWS:
            result = writer.speculative(question, how)
            assert (result.tokens, result.documents, result.text) == (plain.tokens, plain.documents, plain.text)
            assert result.trace.tokens() == plain.tokens
            looked = result.lookups
            assert looked.right <= looked.guesses and looked.calls <= 8
            taken_back += looked.taken_back
            assert (looked.taken_back > 0) == (looked.rollbacks > 0)
    assert taken_back or store.name == "dense", "the tests want guesses that fail"
    assert len(set(plain.documents)) > 1


def test_right_guesses_save_calls(lm: TextModel) -> None:
    """With two passages, both are cached after the first lookup, so every guess is right."""
    writer = Writer(lm, Dense(PASSAGES[:2], embed=embed), stride=2, window=8, max_new_tokens=26)
    plain = writer.plain(QUESTIONS[0])
    result = writer.speculative(QUESTIONS[0], Speculation(ahead=4))
    assert result.tokens == plain.tokens
    assert plain.lookups.calls == 13 and result.lookups.calls == 4
    assert result.lookups.right == result.lookups.guesses == 12 and result.lookups.rollbacks == 0


def test_drafters_work_with_speculative_lookups(lm: TextModel) -> None:
    writer = Writer(lm, STORES["bm25"](), stride=6, window=8, max_new_tokens=30, drafter="prompt-lookup")
    result = writer.speculative("the cat sat on the mat and the cat sat on", Speculation(ahead=2))
    assert result.trace.summary().drafted
    assert [step.index for step in result.trace.steps] == list(range(len(result.trace.steps)))
    assert [step.finish for step in result.trace.steps][-2:] == [None, "limit"]


@pytest.mark.parametrize("name", ["bm25", "dense", "dense-approximate"])
def test_a_subset_is_scored_like_all_passages(name: str) -> None:
    made: Retriever = STORES[name]()
    for query in ("lazy wizards fell", "the moonlight", "nothing of the kind"):
        one = made.encode(query)
        (best,) = made.search([one], 9)
        scores = made.score(one, best)
        assert len(set(best)) == len(best) == 9
        assert np.all(np.diff(scores) <= 1e-6)
        everything = made.score(one, range(len(PASSAGES)))
        if name != "dense-approximate":
            assert everything.max() == pytest.approx(scores[0]) and best[0] == int(everything.argmax())
        assert np.allclose(everything[best], scores)
        assert made.search([one, one], 9) == [best, best]


def test_vectors_are_cached_only_for_a_named_embedder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert vectors(embed, PASSAGES).shape == (len(PASSAGES), 32)
    assert not list(tmp_path.rglob("*.npy"))
    named = type("Named", (), {"name": "letters", "__call__": lambda self, texts: embed(texts)})()
    first = vectors(named, PASSAGES)
    (path,) = tmp_path.rglob("*.npy")
    before = path.stat().st_mtime_ns
    assert np.array_equal(vectors(named, PASSAGES), first) and path.stat().st_mtime_ns == before
    assert len(vectors(named, PASSAGES[:3])) == 3


def test_the_scheduler_speculates_more_with_more_hits() -> None:
    def best(right: int, of: int, write: float, verify: float, *, overlap: bool = False) -> int:
        stride = Stride(overlap)
        assert stride.best() == 1
        stride.wrote(write)
        for _ in range(5):
            stride.verified(right, of, verify)
        return stride.best()

    assert best(8, 8, 1.0, 1.0) == 8
    assert best(0, 1, 1.0, 1.0) == 1
    assert best(3, 4, 1.0, 0.1) < best(3, 4, 1.0, 4.0) < best(8, 8, 1.0, 4.0) + 1
    assert best(1, 2, 1.0, 0.9, overlap=True) == 1  # verification is hidden behind generation


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda lm, store: Writer(lm, store, stride=0), "1 token or more"),
        (lambda lm, store: Writer(lm, store, prompt="{question}"), "must contain"),
        (lambda lm, store: Writer(lm, store, stop=["x"]), "stop strings"),
        (lambda lm, store: Writer(lm, store, tempreature=1), "option"),
        (lambda lm, store: Speculation(ahead=0), "1 lookup or more"),
        (lambda lm, store: Speculation(prefetch=0), "1 document or more"),
        (lambda lm, store: Writer(lm, store).plain("the cat " * 400), "leave"),
        (lambda lm, store: retriever("grep", PASSAGES), "retriever"),
        (lambda lm, store: BM25(["the", "a b"]), "no passage has a word"),
    ],
)
def test_invalid_options_raise(wrong: Any, words: str, lm: TextModel) -> None:
    with pytest.raises(InvalidOption, match=words):
        wrong(lm, STORES["bm25"]())
