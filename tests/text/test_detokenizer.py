"""Incremental detokenisation: the pieces joined are the whole text, and nothing after a stop string is returned."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.text.detokenizer import Detokenizer


def characters(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def read(ids: Sequence[int], cuts: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], Detokenizer]:
    """Feed bytes in portions and return the pieces."""
    reader = Detokenizer(characters, stop)
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        reader.feed(ids[start:end])
        parts.append(reader.take(last=end == len(ids) or reader.cut is not None))
    return parts, reader


def portions(size: int, seed: int) -> list[int]:
    return sorted({(seed * 7 + 13 * k) % (size + 1) for k in range(seed % 5)})


def test_a_character_of_several_tokens_appears_when_complete() -> None:
    reader = Detokenizer(characters)
    shown = []
    for byte in "a€😀".encode():
        reader.feed([byte])
        shown.append(reader.take())
    assert shown == ["a", "", "", "€", "", "", "", "😀"]


def test_an_incomplete_character_is_returned_at_the_end() -> None:
    parts, _ = read(list(b"ab\xe2\x82"), [1, 3])
    assert parts == ["a", "b", "\ufffd"]


@pytest.mark.slow
@settings(max_examples=300)
@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode), st.integers(0, 50))
def test_pieces_joined_are_the_whole_text(data: bytes, seed: int) -> None:
    parts, reader = read(list(data), portions(len(data), seed))
    assert "".join(parts) == reader.text == characters(data)


@settings(max_examples=500)
@given(
    st.text("ab€ \n", max_size=30),
    st.lists(st.text("ab€ ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 50),
)
def test_nothing_after_a_stop_string_is_returned(text: str, stops: list[str], seed: int) -> None:
    data = text.encode()
    parts, reader = read(list(data), portions(len(data), seed), stops)
    # the stop string that is completed first counts; of several, the one that begins first
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        assert "".join(parts) == text
        assert reader.cut is None
        return
    end, _ = min(ends)
    begin = min(start for one, start in ends if one == end)
    assert "".join(parts) == text[:begin]
    assert reader.cut == len(text[:end].encode()), "the tokens stay up to the stop string's last"
    for place in range(len(parts)):
        assert text[:begin].startswith("".join(parts[: place + 1])), "nothing was taken back"


@pytest.mark.parametrize("one_by_one", [True, False])
def test_the_cut_does_not_depend_on_how_tokens_arrive(one_by_one: bool) -> None:
    ids = list(b"one two END three")
    reader = Detokenizer(characters, ["END"])
    for portion in [[token] for token in ids] if one_by_one else [ids]:
        reader.feed(portion)
    assert reader.cut == 11
    assert reader.text == "one two "


def test_a_possible_stop_string_is_held_back(tiny: SimpleNamespace) -> None:
    reader = Detokenizer(characters, ["<end>"])
    reader.feed(list(b"ok <en"))
    assert reader.take() == "ok "
    reader.feed(list(b"vy>"))
    assert reader.take() == "<envy>"
