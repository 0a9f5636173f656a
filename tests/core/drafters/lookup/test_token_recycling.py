"""Token recycling: the table has the target's latest successors, and trees come from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.lookup.token_recycling import TokenRecycling
from outrider.core.drafters.tree_shapes import depths
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import InvalidOption
from outrider.core.rules.exact import Exact

CONFIG = Config(vocabulary=61, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)


def test_the_table_has_the_latest_successors_of_each_token() -> None:
    """Compared with the target's scores afterwards, for accepted and rejected nodes."""
    model = Decoder.random(CONFIG, seed=1, dtype=torch.float64)
    drafter = TokenRecycling(nodes=6, successors=3)
    prompt = [4, 9, 4, 9, 17]
    text, wanted = list(prompt), dict[int, list[int]]()
    for step in decode(model, drafter, Exact(), [prompt], sampling=Sampling(temperature=0), max_new_tokens=40):
        if not step.emitted:
            continue
        paths = {-1: list[int]()}
        for node, (parent, token) in enumerate(zip(step.parents, step.drafted, strict=True)):
            paths[node] = [*paths[parent], token]
        order = [*range(len(step.drafted)), -1, *step.path]  # what was accepted has the last word
        for node in order:
            last = paths[node][-1] if node >= 0 else text[-1]
            wanted[last] = successors([*text, *paths[node]], 3)
        known = drafter._rows[0] if drafter._rows else drafter.table
        for token, after in wanted.items():
            assert known[token][0] == after
        text += step.emitted
    assert len(wanted) > 5


def successors(text: list[int], count: int) -> list[int]:
    model = Decoder.random(CONFIG, seed=1, dtype=torch.float64)
    from outrider.core.draft import Draft

    model.begin([text], Sampling(temperature=0))
    found: list[int] = model.score(Draft.empty(1)).logits()[0, 0].topk(count).indices.tolist()
    return found


def test_the_static_tree_is_followed_rank_by_rank() -> None:
    table = {1: ([2, 3], [0.6, 0.4]), 2: ([4, 5], [0.9, 0.1]), 3: ([6], [1.0])}
    drafter = TokenRecycling(tree=(-1, -1, 0, 0, 1, 1), initial_table=table)
    trie = drafter._fill({}, 1, 5)
    assert trie.tokens == [2, 3, 4, 5, 6] and trie.parents == [-1, -1, 0, 0, 1]
    assert drafter._fill({}, 1, 1).tokens == [2, 3], "no deeper than there is room"


def test_the_static_tree_is_the_best_for_its_size() -> None:
    shape = TokenRecycling(tree="static", nodes=12).tree
    assert shape is not None and len(shape) == 12 and max(depths(shape)) >= 2
    with pytest.raises(InvalidOption, match="static"):
        TokenRecycling(tree="statc")


def test_the_growing_tree_takes_the_likeliest() -> None:
    table = {1: ([2, 3], [0.6, 0.4]), 2: ([4, 5], [0.9, 0.1]), 3: ([6], [1.0])}
    trie = TokenRecycling(nodes=4, initial_table=table)._grow({}, 1, 5)
    assert trie.tokens == [2, 4, 3, 6] and trie.weights == pytest.approx([0.6, 0.54, 0.4, 0.4])


def test_repetition_is_picked_up_and_kept_for_the_next_generation(say: Any) -> None:
    text = [3, 9, 4, 8, 5] * 4
    drafter = TokenRecycling()
    (first,) = say(drafter, [[30]], [text])
    (second,) = say(drafter, [[30]], [text])
    assert len(second) < len(first) < len(text)
    (fresh,) = say(TokenRecycling(remember=False), [[30]], [text])
    assert [step.drafted for step in fresh] == [step.drafted for step in first]


def test_rows_of_a_batch_have_tables_of_their_own(say: Any) -> None:
    one, two = [3, 9, 4, 8, 5] * 3, [11, 12, *[3, 9, 4, 8, 5] * 2]
    _, found = say(TokenRecycling(), [[30], [31]], [one, two])
    alone = say(TokenRecycling(), [[31]], [two])[0]
    assert [step.drafted for step in found] == [step.drafted for step in alone]


@pytest.mark.parametrize(
    "options", [{"nodes": 0}, {"depth": 0}, {"successors": 0}, {"min_probability": 2}, {"tree": (0,)}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        TokenRecycling(**options)
