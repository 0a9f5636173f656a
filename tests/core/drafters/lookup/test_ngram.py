"""N-grams: counts against counting by hand; bigrams against the target."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.lookup.ngram import ANPD, Counts, NGrammys, bigram_table
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.testing.table_target import TableTarget

CONFIG = Config(vocabulary=61, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 4))
def test_the_longest_known_context_decides_by_count(text: list[int], levels: int) -> None:
    counts = Counts(levels)
    for start in range(0, len(text), 3):
        counts.add(text[start : start + 3])
    wanted = None
    for length in range(1, min(levels, len(text)) + 1):
        end = text[len(text) - length :]
        places = [place for place in range(len(text) - length) if text[place : place + length] == end]
        seen = Counter(text[place + length] for place in places)
        if seen:
            most = max(seen.values())
            wanted = {token for token, count in seen.items() if count == most}
    found = counts.after(text)
    assert found is None if wanted is None else found in wanted


def test_a_chain_continues_from_its_own_guesses(say: Any) -> None:
    text = [3, 9, 4, 8, 5] * 4
    (steps,) = say(ANPD(length=6), [[30]], [text])
    assert max(len(step.drafted) for step in steps) == 6 and len(steps) <= 5 + 1 + 3


def test_bigrams_are_the_targets_likeliest_successors() -> None:
    model = Decoder.random(CONFIG, seed=1, dtype=torch.float64)
    table = bigram_table(model, 4, prefix=(7, 3), chunk=16)
    for token in (0, 15, 16, 60):
        model.begin([[7, 3, token]], Sampling())
        wanted = model.score(Draft.empty(1)).logits()[0, 0].topk(4).indices
        assert torch.equal(table[token], wanted)


def test_progress_counts_tokens() -> None:
    told: list[int] = []
    bigram_table(TableTarget(50), 4, chunk=20, progress=told.append)
    assert told == [20, 20, 10]


def test_bigrams_fill_up_after_the_texts_continuations(say: Any) -> None:
    bigrams = torch.tensor([[(token + 1) % 64, (token + 2) % 64] for token in range(64)])
    drafter = NGrammys(TableTarget(64), bigrams=bigrams, drafts=2, length=3)
    (steps,) = say(drafter, [[1, 9, 8, 7, 1]], [[2, 3, 4, 9, 1, 2, 3]])
    first = steps[0]
    assert first.drafted == (9, 8, 7, 2, 3, 4) and first.parents == (-1, 0, 1, -1, 3, 4)
    assert first.emitted == (2, 3, 4, 9), "a chain of bigrams was right"


def test_a_table_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(Incompatible, match=r"\[61, K\]"):
        NGrammys(Decoder.random(CONFIG), bigrams=torch.zeros(60, 4, dtype=torch.long))


@pytest.mark.parametrize("make", [lambda: ANPD(length=0), lambda: ANPD(max_ngram=0)])
def test_options_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(InvalidOption, match="must be 1"):
        make()
    with pytest.raises(InvalidOption, match="must be 1"):
        NGrammys(TableTarget(8), drafts=0)
