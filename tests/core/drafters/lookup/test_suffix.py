"""Suffix automata against naive counting; the memory of past outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.drafters.lookup.suffix import Automaton, Suffix, _Row
from outrider.core.errors import InvalidOption

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def occurrences(text: list[int], part: list[int]) -> int:
    return sum(text[place : place + len(part)] == part for place in range(len(text) - len(part) + 1))


def built(text: list[int]) -> Automaton:
    automaton = Automaton()
    for token in text:
        automaton.extend(token)
    return automaton


@given(texts, st.integers(0, 39), st.integers(1, 6))
def test_a_substring_is_counted_as_often_as_it_occurs(text: list[int], start: int, length: int) -> None:
    part = text[start % len(text) :][:length]
    automaton, state = built(text), 0
    for token in part:
        state = automaton.next[state][token]
    assert automaton.count[state] == occurrences(text, part)


@given(texts)
def test_the_link_of_the_last_state_is_the_longest_repeated_suffix(text: list[int]) -> None:
    automaton = built(text)
    longest = max(
        (length for length in range(len(text)) if occurrences(text, text[len(text) - length :]) > 1), default=0
    )
    assert automaton.length[max(automaton.link[automaton.last], 0)] == (longest if len(text) > 1 else 0)


@given(texts, texts)
def test_a_match_follows_another_text(text: list[int], other: list[int]) -> None:
    automaton, place = built(text), (0, 0)
    for end in range(1, len(other) + 1):
        place = automaton.step(*place, other[end - 1])
        ends = [length for length in range(1, end + 1) if occurrences(text, other[end - length : end])]
        assert place[1] == max(ends, default=0)


def test_there_are_at_most_twice_as_many_states_as_tokens() -> None:
    random = np.random.default_rng(0)
    for text in ([0] * 500, random.integers(0, 2, 500).tolist(), [0, 1] * 250):
        assert len(built(text).next) <= 2 * len(text)


def test_longer_matches_draft_further() -> None:
    def drafted(shared: int) -> int:
        """Guesses behind a match of so many tokens."""
        text = [*range(20, 40), *range(40, 60)]
        return max(_Row(Automaton(), [*text, 61, 62, *text[20 - shared : 20]]).guess(64, 32, 0.05).depths, default=0)

    depths = [drafted(shared) for shared in (1, 2, 4, 8, 16)]
    assert depths == sorted(depths) and depths[-1] > depths[0] >= 1


def test_the_more_frequent_comes_first() -> None:
    row = _Row(Automaton(), [5, 1, 9, 5, 2, 9, 5, 2, 9, 5])
    trie = row.guess(2, 1, 0.0001)
    assert trie.tokens == [2, 1] and trie.weights[0] > trie.weights[1]


def test_probabilities_do_not_grow_with_depth_and_siblings_sum_below_one() -> None:
    random = np.random.default_rng(1)
    row = _Row(Automaton(), random.integers(0, 4, 300).tolist())
    for _ in range(50):
        trie = row.guess(32, 8, 0.01)
        children: dict[int, float] = {}
        for parent, weight in zip(trie.parents, trie.weights, strict=True):
            children[parent] = children.get(parent, 0.0) + weight
        for parent, total in children.items():
            assert total <= (trie.weights[parent] if parent >= 0 else 1.0) + 1e-9
        row.add(random.integers(0, 4, 3).tolist())


SAID = [7, 3, 9, 4, 8, 5, 6, 2, 1, 10, 14, 12]


def test_outputs_are_remembered_from_one_generation_to_the_next(say: Any) -> None:
    drafter = Suffix()
    (first,) = say(drafter, [[30, 7]], [SAID])
    (second,) = say(drafter, [[31, 7]], [SAID])
    assert len(first) == len(SAID), "nothing to go by"
    assert len(second) < len(SAID) / 2
    (forgetful,) = say(Suffix(memory=0), [[31, 7]], [SAID])
    assert len(forgetful) == len(SAID)


def test_rows_of_a_batch_do_not_see_each_other(say: Any) -> None:
    late = [20, 21, 22, 23, *SAID]
    one, two = say(Suffix(), [[30, 7], [31, 7]], [SAID, late])
    alone = say(Suffix(), [[31, 7]], [late])[0]
    assert [step.drafted for step in two] == [step.drafted for step in alone]
    assert len(one) == len(SAID)


def test_tokens_after_the_end_are_not_remembered(say: Any) -> None:
    drafter = Suffix()
    prompt = [30, 9, 4, 8, 31, 9]
    say(drafter, [prompt], [[4, 8, 31, 9, 4, 8, 50]], end=(8,))
    assert drafter._outputs == [[4, 8]]


def test_the_oldest_outputs_are_dropped_beyond_the_memory(say: Any) -> None:
    drafter = Suffix(memory=40)
    for start in range(1, 50, 4):
        say(drafter, [[60]], [list(range(start, start + 10))])
    assert drafter.past.size <= 40 + len(drafter._outputs) and drafter._outputs[-1] == list(range(49, 59))


@pytest.mark.parametrize(
    "options", [{"nodes": 0}, {"depth": 0}, {"min_probability": 0.0}, {"min_probability": 2.0}, {"memory": -1}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="must be"):
        Suffix(**options)
