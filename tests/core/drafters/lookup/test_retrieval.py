"""The datastore against a naive search; damaged files."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.drafters.lookup.retrieval import REST, Datastore, DatastoreError, _Row
from outrider.core.errors import InvalidOption

texts = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=4)


def places(corpus: list[list[int]], query: list[int]) -> list[tuple[int, int]]:
    return [
        (number, start)
        for number, text in enumerate(corpus)
        for start in range(len(text) - len(query) + 1)
        if text[start : start + len(query)] == query
    ]


@given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_the_longest_suffix_in_the_corpus_is_found(corpus: list[list[int]], query: list[int]) -> None:
    store = Datastore.build(corpus)
    length, first, last = store.find(query, 6, 1)
    wanted = max((size for size in range(1, min(len(query), 6) + 1) if places(corpus, query[-size:])), default=0)
    assert length == wanted
    if length:
        found = places(corpus, query[-length:])
        assert last - first == len(found)
        after = sorted(corpus[number][start + length :][:3] for number, start in found)
        assert sorted(store.continuations((length, first, last), 1000, 3)) == after


def test_positions_are_sorted_by_their_suffixes() -> None:
    random = np.random.default_rng(0)
    store = Datastore.build([random.integers(0, 3, 400).tolist(), [1] * 100])
    suffixes = [store.tokens[place : place + 32].tolist() for place in store.order]
    assert suffixes == sorted(suffixes) and sorted(store.order.tolist()) == list(range(len(store)))


def test_the_tree_has_the_heaviest_continuations() -> None:
    corpus = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [7, 2, 8]]
    row = _Row([0, 1, 2])
    trie = REST(store=corpus, nodes=2, min_probability=0)._guess(row, 5)
    assert trie.tokens == [3, 6] and trie.weights[0] == pytest.approx(2 * trie.weights[1])
    assert trie.weights[0] == pytest.approx(2 / 3 * row.reliability(2))
    assert REST(store=corpus, min_probability=0)._guess(row, 5).tokens == [3, 4, 5, 6]
    assert REST(store=corpus, min_probability=0)._guess(row, 1).tokens == [3, 6], "no deeper than there is room"
    assert len(REST(store=corpus, min_ngram=3)._guess(_Row([0, 9, 2]), 5)) == 0


def test_reliability_rises_while_the_store_is_right(say: Any) -> None:
    text = [int(token) for token in np.random.default_rng(3).integers(0, 60, 80)]
    (steps,) = say(REST(store=[text]), [[61]], [text])
    sizes = [len(step.drafted) for step in steps if step.drafted]
    assert max(sizes[-4:]) > sizes[0] and len(steps) < 30


def test_a_text_of_the_corpus_is_copied(say: Any) -> None:
    text = [5, 9, 3, 3, 8, 1, 7, 2, 6, 4, 12, 11]
    (steps,) = say(REST(store=[[50, 51, *text, 52], [5, 8, 9]]), [[50, 51]], [text])
    assert len(steps) <= 4


def test_a_store_is_saved_and_mapped_again(tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    store = Datastore.build([[1, 2, 3], [], [2, 3, 4]], {"tokenizer": "x"})
    store.save(path)
    again = Datastore.load(path, 5)
    assert isinstance(again.tokens.base, np.memmap) and again.about["tokenizer"] == "x"
    assert again.tokens.tolist() == store.tokens.tolist() == [1, 2, 3, -1, 2, 3, 4, -1]
    assert again.order.tolist() == store.order.tolist()
    assert [one.name for one in tmp_path.iterdir()] == ["a.store"], "nothing is left beside it"
    assert REST(store=path)._guess(_Row([2, 3]), 4).tokens == [4]
    with pytest.raises(DatastoreError, match="another model's tokenizer"):
        Datastore.load(path, 4)
    Datastore.build([]).save(path)
    assert len(Datastore.load(path)) == 0 and len(REST(store=path)._guess(_Row([2, 3]), 4)) == 0


def whole(tmp_path: Path) -> tuple[Path, bytes, dict[str, Any]]:
    path = tmp_path / "a.store"
    Datastore.build([[1, 2, 3], [2, 3, 4]]).save(path)
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return path, data[8 + size :], json.loads(data[8 : 8 + size])


def put(path: Path, header: object, body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


HEADERS: dict[str, Any] = {
    "no object": lambda header: [],
    "null": lambda header: None,
    "no metadata": lambda header: {key: header[key] for key in ("tokens", "order")},
    "another kind": lambda header: header | {"__metadata__": {"kind": "weights"}},
    "no order": lambda header: {key: header[key] for key in ("tokens", "__metadata__")},
    "another type": lambda header: header | {"order": header["order"] | {"dtype": "F32"}},
    "negative": lambda header: header | {"tokens": header["tokens"] | {"shape": [-8]}},
    "huge": lambda header: header | {"tokens": header["tokens"] | {"shape": [1 << 60]}},
    "a fraction": lambda header: header | {"tokens": header["tokens"] | {"shape": [8.0]}},
    "true": lambda header: header | {"tokens": header["tokens"] | {"shape": [True]}},
    "two dimensions": lambda header: header | {"tokens": header["tokens"] | {"shape": [4, 2]}},
    "overlapping": lambda header: header | {"order": header["order"] | {"data_offsets": [0, 32]}},
    "a string for a size": lambda header: header | {"tokens": header["tokens"] | {"shape": "8"}},
    "a list for a part": lambda header: header | {"tokens": [1, 2]},
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_raise_one_error(tmp_path: Path, name: str) -> None:
    path, body, header = whole(tmp_path)
    put(path, HEADERS[name](header), body)
    with pytest.raises(DatastoreError):
        Datastore.load(path)


def test_hostile_contents_raise_one_error(tmp_path: Path) -> None:
    path, body, header = whole(tmp_path)
    numbers = np.frombuffer(body, "<i4")
    for place, value in ((0, -2), (8, -1), (8, 8), (15, 1 << 30)):
        bent = numbers.copy()
        bent[place] = value
        put(path, header, bent.tobytes())
        with pytest.raises(DatastoreError, match="outside"):
            Datastore.load(path)


def test_torn_files_raise_one_error(tmp_path: Path) -> None:
    path, _, _ = whole(tmp_path)
    data = path.read_bytes()
    random = np.random.default_rng(0)
    for cut in (0, 4, 8, 20, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(DatastoreError):
            Datastore.load(path)
    path.write_bytes(struct.pack("<Q", 1 << 62) + data[8:])
    with pytest.raises(DatastoreError):
        Datastore.load(path)
    path.write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000)
    with pytest.raises(DatastoreError):
        Datastore.load(path)
    for _ in range(200):
        bent = bytearray(data)
        for place in random.integers(0, len(data), 3):
            bent[place] = random.integers(0, 256)
        path.write_bytes(bytes(bent))
        with suppress(DatastoreError):
            REST(store=path)._guess(_Row([2, 3]), 4)
    with pytest.raises(DatastoreError, match="can't be read"):
        Datastore.load(tmp_path / "none")
    with pytest.raises(DatastoreError, match="can't be read"):
        Datastore.load(tmp_path)


@pytest.mark.parametrize("options", [{"nodes": 0}, {"length": 0}, {"min_ngram": 4, "max_ngram": 3}, {"max_ngram": 33}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        REST(store=(), **options)
