"""Rung 5 of the ladder: whatever was accepted, kept, cut or rewound, scores equal those of a fresh pass."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.engine.kv_cache import mapped
from outrider.core.engine.kv_cache.buckets import bucket, larger
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.rows import full_mask, live_tokens, prefilled_rows
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Scores
from outrider.core.testing.cache_audit import emitted, paths, random_draft, random_verdict, reference
from outrider.core.tree import Tree

SHAPE = Config(
    vocabulary=31,
    hidden_size=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    intermediate_size=40,
    qk_norm=True,
    attention_bias=True,
)
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4}  # logits spread over +-15


def expected(model: Decoder, texts: Sequence[Sequence[int]], draft: Draft, parents: list[list[int]]) -> Tensor:
    """[B, N + 1, V]"""
    found = torch.zeros(len(texts), draft.size + 1, model.vocabulary, dtype=model.network.dtype)
    for row, text in enumerate(texts):
        for path in sorted([[], *paths(parents[row])], key=len):
            if not path or path[-1] not in parents[row]:  # a leaf's pass answers for all above it
                tokens = [int(draft.tokens[row, node]) for node in path]
                behind = reference(model.network, [*text, *tokens])[-len(path) - 1 :]
                found[row, [0, *(node + 1 for node in path)]] = behind
    return found


def grown(draft: Draft, size: int) -> Draft:
    parents = draft.tree.parents[:, :size]
    tree = draft.tree if size == draft.size else Tree(parents)
    return Draft.guess(draft.tokens[:, :size], tree, draft.live[:, :size])


def in_pieces(rng: random.Random, model: Decoder, draft: Draft) -> list[Scores]:
    """Score a draft as it grows; the last nodes may never be scored."""
    size = rng.randint(0, draft.size)
    found = [model.score(grown(draft, size))]
    while size < draft.size and rng.random() < 0.8:
        more = rng.randint(size + 1, draft.size)
        found.append(model.score(grown(draft, more), size))
        size = more
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(25))
def test_audit(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    rows = rng.choice([1, 1, 2, 3])
    model = Decoder.random(SHAPE, seed, dtype=dtype)
    even = rng.random() < 0.3
    texts = [[rng.randrange(31) for _ in range(4 if even else rng.randint(1, 9))] for _ in range(rows)]
    model.begin(texts, Sampling())
    marks: list[tuple[object, list[list[int]]]] = []
    for _ in range(8):
        draft, parents = random_draft(rng, rows, 31, 7)
        act = rng.random()
        if act < 0.15:
            marks.append((model.mark(), copy.deepcopy(texts)))
        elif act < 0.3 and marks:
            mark, texts = marks.pop()
            model.rewind(mark)
        wanted = expected(model, texts, draft, parents)
        whole = [] if rng.random() < 0.15 else in_pieces(rng, model, draft) if rng.random() < 0.5 else None
        for scores in [model.score(draft)] if whole is None else whole:
            last = scores.draft.size + 1
            assert scores.lengths.tolist() == [len(text) for text in texts]
            torch.testing.assert_close(scores.logits(), wanted[:, scores.first : last], atol=CLOSE[dtype], rtol=0)
        verdict, count = random_verdict(rng, draft, parents, 31)
        model.keep(draft, verdict, count)
        texts = [[*text, *emitted(draft, verdict, row, int(count[row]))] for row, text in enumerate(texts)]
    model.end()


@pytest.mark.parametrize("lazy", [False, True])
def test_rows_asked_for_one_by_one(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if lazy:
        monkeypatch.setattr("outrider.core.engine.self_draft_views._MAX_LOGITS", 0)
    model = Decoder.random(SHAPE, dtype=torch.float64)
    model.begin([[1, 2], [3, 4, 5]], Sampling())
    draft = Draft.guess(torch.tensor([[7, 8, 9]] * 2), Tree.of((-1, -1, 0)), torch.ones(2, 3, dtype=torch.bool))
    scores = model.score(draft)
    asked = scores.logits(torch.tensor([[0, 3], [2, 1]]))
    torch.testing.assert_close(asked[0], scores.logits()[0, [0, 3]])
    torch.testing.assert_close(asked[1], scores.logits()[1, [2, 1]])


def test_a_row_in_company_scores_as_alone() -> None:
    model = Decoder.random(SHAPE, dtype=torch.float64)
    prompts = [[1], [2, 3, 4, 5, 6, 7], [8, 9, 10]]
    draft = Draft.guess(torch.tensor([[7, 8, 9]] * 3), Tree.of((-1, -1, 0)), torch.ones(3, 3, dtype=torch.bool))
    model.begin(prompts, Sampling())
    together = model.score(draft).logits()
    for row, prompt in enumerate(prompts):
        model.begin([prompt], Sampling())
        one = Draft.guess(draft.tokens[:1], draft.tree, draft.live[:1])
        torch.testing.assert_close(model.score(one).logits()[0], together[row], atol=1e-12, rtol=0)


def test_impossible_tokens_are_harmless() -> None:
    model = Decoder.random(SHAPE, dtype=torch.float64)
    model.begin([[1, 2]], Sampling())
    draft = Draft.guess(torch.tensor([[-5, 31, 2**40]]), Tree.of((-1, -1, -1)), torch.ones(1, 3, dtype=torch.bool))
    logits = model.score(draft).logits()
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:, 0], model.score(Draft.empty(1)).logits()[:, 0], atol=1e-12, rtol=0)


def test_finished_rows_take_no_room() -> None:
    model = Decoder.random(SHAPE, dtype=torch.float64)
    model.begin([[1, 2], [3]], Sampling())
    rng = random.Random(0)
    texts = [[1, 2], [3]]
    for _ in range(60):
        draft, parents = random_draft(rng, 2, 31, 5)
        model.score(draft)
        verdict, count = random_verdict(rng, draft, parents, 31)
        count[0] = 0
        model.keep(draft, verdict, count)
        texts[1] += emitted(draft, verdict, 1, int(count[1]))
    assert model.cache.rows.committed.tolist() == [2, len(texts[1])]
    logits = model.score(Draft.empty(2)).logits()
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row, 0], reference(model.network, text)[-1], atol=1e-10, rtol=0)


def test_positions_are_the_drafts_to_choose() -> None:
    model = Decoder.random(SHAPE, dtype=torch.float64)
    model.begin([[1, 2, 3]], Sampling())
    live = torch.ones(1, 1, dtype=torch.bool)
    far = Draft(torch.tensor([[4]]), Tree.chain(1), live, positions=torch.tensor([[300]]))
    near = Draft.guess(torch.tensor([[4]]), Tree.chain(1), live)
    assert not torch.allclose(model.score(far).logits()[:, 1], model.score(near).logits()[:, 1])


def test_hidden_states_are_those_asked_for() -> None:
    model = Decoder.random(SHAPE, dtype=torch.float64)
    needs = frozenset({"embedding", "layer.0", "layer.1", "last"})
    prefill = model.begin([[1, 2, 3, 4], [5, 6]], Sampling(), needs)
    draft = Draft.guess(torch.tensor([[7, 8], [9, 10]]), Tree.chain(2), torch.ones(2, 2, dtype=torch.bool))
    scores = model.score(draft)
    assert {*prefill.hidden} == {*scores.hidden} == needs
    assert all(states.shape == (2, 3, 24) for states in prefill.hidden.values())
    assert all(states.shape == (2, 3, 24) for states in scores.hidden.values())
    torch.testing.assert_close(model.network.logits(scores.hidden["last"]), scores.logits())
    torch.testing.assert_close(scores.hidden["embedding"][0, 1:], model.network.embedding[[7, 8]])
    torch.testing.assert_close(prefill.hidden["embedding"][0], model.network.embedding[[1, 2, 3]])
    after = model.network.logits(prefill.hidden["last"])[0]
    wanted = reference(model.network, [1, 2, 3])
    torch.testing.assert_close(after, wanted, atol=1e-10, rtol=0)


def test_long_prompts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.core.engine.transformer.PREFILL_CHUNK", 4)
    model = Decoder.random(SHAPE, dtype=torch.float64)
    texts = [[i % 31 for i in range(19)], [3, 4], [i % 7 for i in range(11)]]
    prefill = model.begin(texts, Sampling(), frozenset({"last"}))
    assert prefill.hidden["last"].shape == (3, 18, 24)
    logits = model.score(Draft.empty(3)).logits()
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row, 0], reference(model.network, text)[-1], atol=1e-10, rtol=0)


def test_what_cannot_be_done_is_said() -> None:
    model = Decoder.random(SHAPE)
    with pytest.raises(InvalidOption, match=r"Known: embedding, last, layer\.0"):
        model.begin([[1]], Sampling(), frozenset({"layer.9"}))
    with pytest.raises(InvalidOption, match=r"context is 2048"):
        model.begin([[1] * 2049], Sampling())


def test_an_empty_row_has_one_token_pending_and_nothing_scored() -> None:
    cache = Cache((1, 2, 4), torch.float32, torch.device("cpu"))
    cache.open()
    cache.arrange([-1], 64)
    cache.set_row(0, 3, 9)
    cache.scored = 2
    cache.arrange([0, -1], 64)
    rows = cache.rows
    assert (rows.host, rows.host_pending, cache.scored) == ((3, 0), (1, 1), -1)
    assert rows.entries.tolist() == [3, 0] and rows.pending_count.tolist() == [1, 1]
    assert rows.pending.tolist() == [[9], [0]]


def test_a_row_that_stays_has_no_pending_tokens_of_those_that_leave() -> None:
    """A compiled chain reads all of them; it drew from another distribution, and cached what is not in the text."""
    cache = Cache((1, 2, 4), torch.float32, torch.device("cpu"))
    cache.open()
    cache.arrange([-1, -1], 64)
    pending, count = torch.tensor([[2, 3], [6, 0]]), torch.tensor([2, 1])
    cache.rows = replace(cache.rows, pending=pending, pending_count=count, host_pending=(2, 1))
    cache.arrange([1, 0], 64)
    assert cache.rows.pending.tolist() == [[6, 0], [2, 3]]
    cache.arrange([0], 64)
    assert cache.rows.pending.tolist() == [[6]] and cache.rows.host_pending == (1,)


@pytest.mark.skipif(not mapped.available(), reason="rows' memory can't be mapped here")
@pytest.mark.parametrize(("dim", "slots"), [(4, 256), (128, 64), (1024, 64)])
def test_a_page_is_whole_pages_of_memory_and_64_slots_or_more(dim: int, slots: int) -> None:
    assert Cache((1, 2, dim), torch.float32, torch.device("cpu")).page == slots


def test_nothing_is_packed_where_all_tokens_are_live() -> None:
    rows = prefilled_rows([[1, 2], [3, 4]], torch.device("cpu"), True)
    draft = Draft.guess(torch.tensor([[5], [6]]), Tree.chain(1), torch.tensor([[True], [True]]))
    assert live_tokens(rows, draft) is None
    fewer = replace(rows, pending=torch.tensor([[2, 3], [4, 0]]), pending_count=torch.tensor([2, 1]))
    found = live_tokens(replace(fewer, host_pending=(2, 1)), draft)
    assert found is not None and found.tolist() == [[True, True, True], [True, False, True]]


def test_a_mask_off_the_host_has_its_gap() -> None:
    scratch = torch.ones(1, 2, 4, dtype=torch.bool)
    wanted = [[[True] * 2 + [False] * 3 + [True] * 4] * 2]
    assert full_mask(2, 3, scratch).tolist() == wanted
    assert full_mask(2, 3, scratch.to("meta")).shape == (1, 2, 9)


def test_a_plan_has_room_for_the_scratch_of_another_owner() -> None:
    model = Decoder.random(SHAPE, 1)
    model.begin([[1, 2, 3]], Sampling())
    cache = model.cache
    cache.store = cache.store[:, :, :, :8].contiguous()
    draft, _ = random_draft(random.Random(1), 1, 31, 0)
    _, layout = cache.plan(draft, None, gap=6)
    assert layout.columns == 2 + 6 + 1 <= cache.store.shape[3]


def test_a_plan_says_which_position_each_slot_has() -> None:
    model = Decoder.random(SHAPE, 1)
    model.begin([[1, 2, 3]], Sampling())
    model.cache.with_keys = True
    tree = Tree.of((-1, -1, 1), torch.device("cpu"))
    tokens = torch.tensor([[4, 5, 6]])
    _, layout = model.cache.plan(Draft.guess(tokens, tree, torch.ones_like(tokens, dtype=torch.bool)), None)
    assert layout.keys is not None and layout.keys.tolist() == [[0, 1, 2, 3, 3, 4]]
    _, layout = model.cache.plan(Draft.guess(tokens, tree, torch.ones_like(tokens, dtype=torch.bool)), None, gap=2)
    assert layout.keys is not None and layout.keys[0, [0, 1, 4, 5, 6, 7]].tolist() == [0, 1, 2, 3, 3, 4]
    _, layout = model.cache.device_plan(model.cache.rows, Draft.guess(tokens, tree, torch.ones_like(tokens) > 0), 6)
    assert layout.keys is not None and layout.keys.tolist() == [[0, 1, 2, 3, 3, 4]]


def test_a_pass_reads_all_slots_a_quarter_or_a_16th() -> None:
    sizes = [bucket(needed, 8192) for needed in (1, 512, 513, 2048, 2049, 8192)]
    assert sizes == [512, 512, 2048, 2048, 8192, 8192] and {type(size) for size in sizes} == {int}
    assert bucket(1, 300) == 300 and bucket(600, 9000) == 2250
    assert larger(512, 8192) == [2048, 8192] and larger(2048, 9000) == [8192, 9000] and larger(9000, 9000) == []
