"""Draft trees of a given shape that a model draws in one call a row (outrider.core.protocol.TreeDrawing).

Drawn level by level through torch, the calls would take longer than the model's passes. Independent of models."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft
from outrider.core.protocol import DrawnTree, Target, TreeDrawing
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.tree import Tree


def drawn_at_once(
    model: Target, parents: tuple[int, ...], left: Tensor, rng: CounterRNG, *, sampled: bool
) -> tuple[Draft, Tensor] | None:
    """The draft with these parents for `left` [B] tokens in each row, and the probability [B, N] of each node given its
    parent: nodes drawn without replacement if `sampled`, else the likeliest tokens. None where the model can't."""
    if rng.device.type != "cpu" or not rng.has_tables or not isinstance(model, TreeDrawing) or not parents:
        return None
    rng.reserve(len(parents))
    numbers = rng.table(Purpose.DRAW)[:, : len(parents)].numpy() if sampled else None
    trees: list[DrawnTree] = []
    for row in range(len(left)):
        drawn = model.draw_tree(row, parents, None if numbers is None else numbers[row])
        if drawn is None:
            return None
        trees.append(drawn)
    tree, first = Tree.of(parents), trees[0]

    def rows(parts: list[Tensor]) -> Tensor:
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)

    tokens, live = rows([each.tokens for each in trees]), rows([each.live for each in trees])
    probs = rows([each.probs for each in trees])
    if int(left.min()) < tree.depth:
        live = live & (tree.depths < left[:, None])
    if not sampled:
        return Draft.guess(tokens, tree, live), probs
    every = rows([each.distributions for each in trees])
    ids = None if first.ids is None else first.ids.expand_as(every)
    draft = Draft(
        tokens,
        tree,
        live,
        Distribution(every, ids, model.vocabulary),
        first.source.expand(len(left), -1),
        mixed=False,
    )
    return draft, probs
