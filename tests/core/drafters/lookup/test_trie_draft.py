"""Drafts of tries on a device have few shapes, so that few passes are recorded, and each row's guesses come first."""

from __future__ import annotations

import random

import torch

from outrider.core.device import fetch
from outrider.core.drafters.lookup.trie import Trie, bucket, to_draft
from outrider.core.testing.shadow.device import shadow_device
from outrider.core.tree import Tree


def test_drafts_of_tries_have_few_shapes() -> None:
    draws, shapes = random.Random(1), set[tuple[int, ...]]()
    with shadow_device():
        for _ in range(50):
            tries = [Trie() for _ in range(draws.randrange(1, 3))]
            for trie in tries:
                for _ in range(draws.randrange(4)):
                    trie.add([draws.randrange(5) for _ in range(draws.randrange(1, 5))], 0.1)
            draft = to_draft(tries, torch.device("cuda"))
            size, depth = draft.size, draft.tree.depth
            shapes.add((size, depth, 0) if draft.tree.is_chain else (size, depth, 1))
            for trie, tokens, parents, live in zip(
                tries,
                *(part.tolist() for part in fetch(draft.tokens, draft.tree.parents.expand(draft.rows, -1), draft.live)),
                strict=True,
            ):
                assert tokens[: len(trie)] == trie.tokens and parents[: len(trie)] == trie.parents
                assert live == [place < len(trie) for place in range(size)]
                assert Tree.of(tuple(parents)).depth <= depth
    assert bucket(5) == 16 and bucket(17) == 32 and len(shapes) <= 8, shapes
