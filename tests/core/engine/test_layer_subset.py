"""Reading once more what was read: what a view would have said, what each sublayer does; nothing is disturbed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible
from outrider.core.testing.cache_audit import emitted, random_draft, random_verdict, reference
from outrider.core.testing.table_target import TableTarget

SHAPE = Config(vocabulary=31, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)


@pytest.mark.parametrize("rows", [1, 3])
def test_recall_is_what_the_view_would_have_said(rows: int) -> None:
    rng = random.Random(rows)
    model = Decoder.random(SHAPE, dtype=torch.float64)
    whole, less = model.view(), model.view(skip={"mlp.1", "attention.2"})
    texts = [[rng.randrange(31) for _ in range(rng.randint(1, 9))] for _ in range(rows)]
    for one in (model, whole, less):
        one.begin(texts, Sampling())
    for _ in range(4):
        draft, parents = random_draft(rng, rows, 31, 5)
        before = less.score(draft).logits()
        recalled, skipped = whole.recall(texts, 4), less.recall(texts, 4)
        torch.testing.assert_close(less.score(draft).logits(), before, atol=1e-10, rtol=0)
        for row, text in enumerate(texts):
            count = min(4, len(text) - 1)
            wanted = reference(model.network, text)[len(text) - 1 - count : len(text) - 1]
            torch.testing.assert_close(recalled[row, :count], wanted, atol=1e-10, rtol=0)
            if count:
                assert (skipped[row, :count] - wanted).abs().max() > 1e-3
        model.score(draft)
        verdict, count_kept = random_verdict(rng, draft, parents, 31)
        model.keep(draft, verdict, count_kept)
        for view in (whole, less):
            view.keep(draft, verdict, count_kept)
        texts = [[*text, *emitted(draft, verdict, row, int(count_kept[row]))] for row, text in enumerate(texts)]
        logits = model.score(Draft.empty(rows)).logits()
        for row, text in enumerate(texts):
            torch.testing.assert_close(logits[row, 0], reference(model.network, text)[-1], atol=1e-10, rtol=0)


def test_a_window_does_not_look_back() -> None:
    model = Decoder.random(SHAPE)
    view = model.view(window=(1, 4))
    model.begin([[1, 2, 3]], Sampling())
    view.begin([[1, 2, 3]], Sampling())
    with pytest.raises(Incompatible, match="whole cache"):
        view.recall([[1, 2, 3]], 2)


def test_similarity_is_the_cosine_around_each_sublayer() -> None:
    """Against states tapped while reading: layers whose MLP is gone leave behind what their attention did."""
    text = [5, 9, 3, 7, 1, 12, 4]
    model = Decoder.random(SHAPE, dtype=torch.float64)
    taps = frozenset(model.taps) - {"last"}
    prefill = model.begin([text, text[:3]], Sampling(), taps)
    assert prefill.self_draftable is model
    found = model.similarity([text, text[:3]], 4)
    assert found.shape == (2, 6)
    assert model.sublayers == ("attention.0", "mlp.0", "attention.1", "mlp.1", "attention.2", "mlp.2")
    alone = Decoder.random(SHAPE, dtype=torch.float64)
    alone.begin([text[:3]], Sampling())
    torch.testing.assert_close(alone.similarity([text[:3]], 4)[0], found[1], atol=1e-6, rtol=0)
    network = model.network
    half = Decoder(network.map_linears(lambda linear: linear, [replace(network.layers[0], use_mlp=False)]))
    middle = half.begin([text], Sampling(), frozenset({"layer.0"})).hidden["layer.0"][0, 2:6]
    before, after = (prefill.hidden[tap][0, 2:6] for tap in ("embedding", "layer.0"))
    for place, pair in enumerate(((before, middle), (middle, after))):
        wanted = torch.nn.functional.cosine_similarity(*(part.float() for part in pair), dim=-1).mean()
        assert float(found[0, place]) == pytest.approx(float(wanted), abs=1e-5)


def test_a_table_recalls_as_it_scores() -> None:
    table = TableTarget(5, seed=2)
    view = table.view(skip=("mlp.0", "attention.1"))
    text = [1, 4, 2, 3]
    recalled = view.recall([text], 3)[0]
    for place in range(1, 4):
        table.begin([text[:place]], Sampling())
        view.begin([text[:place]], Sampling())
        torch.testing.assert_close(recalled[place - 1], view.score(Draft.empty(1)).logits()[0, 0])
