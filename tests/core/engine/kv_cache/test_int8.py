"""A cache of 8 bits: near the exact one, and among its own kind as exact: whatever was accepted, kept, cut, moved or
rewound, scores are those of a fresh pass over such a cache, and drafting changes no token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outrider.core.batching import ContinuousBatch
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.engine.captured_passes import Graphs
from outrider.core.engine.kv_cache.int8 import pack, slot_size, unpack
from outrider.core.engine.linear import Dense
from outrider.core.engine.network import Network, random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import InvalidOption
from outrider.core.kernels import native
from outrider.core.methods import make_drafter, make_rule
from outrider.core.protocol import Drafter
from outrider.core.testing.cache_audit import emitted, paths, random_draft, random_verdict
from outrider.core.tree import Tree

SHAPE = Config(
    vocabulary=31, hidden_size=24, layers=2, heads=4, kv_heads=2, head_dim=6, intermediate_size=40, qk_norm=True
)
WIDE = Config(vocabulary=61, hidden_size=64, layers=3, heads=6, kv_heads=2, head_dim=32, intermediate_size=96)
GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 3], [4, 1, 2, 4, 1, 2, 4] * 3]


def model(config: Config = SHAPE, dtype: torch.dtype = torch.float64, bits: int | None = 8) -> Decoder:
    return Decoder(random_network(config, 1, dtype=dtype), cache_bits=bits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [6, 64])
def test_numbers_are_rounded_to_a_127th_of_the_largest(dtype: torch.dtype, dim: int) -> None:
    x = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    x[0, 0, 0] = 0
    slots = pack(x)
    assert slots.shape == (2, 3, 5, slot_size(dim)) and slots.dtype == torch.int8
    assert torch.equal(slots, pack(x.double() if dtype == torch.float64 else x.float())), "rounded once, from all bits"
    found, most = unpack(slots, dim, dtype), x.abs().amax(-1, keepdim=True)
    allowed = most / 254 * (1.001 if dtype != torch.bfloat16 else 2.1)  # in 16 bits it is rounded once more
    assert ((found - x).abs() <= allowed).all()
    assert torch.equal(found[0, 0, 0], x[0, 0, 0])
    if dtype != torch.bfloat16:
        assert torch.equal(pack(found), slots), "what was rounded stays what it is"
    part = slots.transpose(1, 2)[:, 1:3]  # as a store is read
    assert torch.equal(unpack(part, dim, dtype), found.transpose(1, 2)[:, 1:3])


def fresh(text: list[int], draft: Draft, parents: list[int], row: int) -> torch.Tensor:
    """[N + 1, V] after a text, by a model that has read nothing else."""
    one = model()
    one.begin([text], GREEDY)
    found = torch.zeros(draft.size + 1, one.vocabulary, dtype=torch.float64)
    for path in sorted([[], *paths(parents)], key=len):
        if not path or path[-1] not in parents:
            chain = draft.tokens[row : row + 1, path]
            live = torch.ones_like(chain, dtype=torch.bool)
            said = one.score(Draft.guess(chain, Tree.chain(len(path)), live)).logits()[0]
            found[[0, *(node + 1 for node in path)]] = said
    one.end()
    return found


@pytest.mark.parametrize("seed", range(6))
def test_audit(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.choice([1, 2, 3])
    target = model()
    texts = [[rng.randrange(31) for _ in range(rng.randint(1, 9))] for _ in range(rows)]
    target.begin(texts, Sampling())
    mark, then = target.mark(), texts
    for turn in range(7):
        draft, parents = random_draft(rng, rows, 31, 6)
        if turn == 3:
            mark, then = target.mark(), texts
        if turn == 5:
            target.rewind(mark)
            texts = then
        found = target.score(draft).logits()
        for row, text in enumerate(texts):
            torch.testing.assert_close(found[row], fresh(text, draft, parents[row], row), atol=1e-9, rtol=0)
        verdict, count = random_verdict(rng, draft, parents, 31)
        target.keep(draft, verdict, count)
        texts = [[*text, *emitted(draft, verdict, row, int(count[row]))] for row, text in enumerate(texts)]
    target.end()


def tokens(target: Decoder, drafter: Drafter | None, sampling: Sampling = GREEDY) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in PROMPTS]
    for step in decode(
        target, drafter, make_rule("gumbel-match"), PROMPTS, sampling=sampling, max_new_tokens=40, seed=3
    ):
        found[step.row] += step.emitted
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "drawn"])
def test_drafting_changes_nothing(sampling: Sampling) -> None:
    network = random_network(SHAPE, 1, dtype=torch.float64)
    plain = tokens(Decoder(network, cache_bits=8), None, sampling)
    small = random_network(replace(SHAPE, norm_eps=0.3), 1, dtype=torch.float64)
    drafters = [
        make_drafter("prompt-lookup"),
        make_drafter("token-recycling"),
        make_drafter("sparse-cache", sinks=1, window=6),
        make_drafter("triforce", sinks=1, window=3, chunks=2, chunk=2),
        make_drafter("qspec", bits=8),
        make_drafter("draft-verify", skip="attention.1"),
        DraftModel(Decoder(small, cache_bits=8), length=3),
    ]
    for drafter in drafters:
        assert tokens(Decoder(network, cache_bits=8), drafter, sampling) == plain


@pytest.mark.parametrize("config", [SHAPE, WIDE], ids=["narrow", "wide"])
def test_it_is_near_the_exact_cache_and_smaller(config: Config) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(config.vocabulary) for _ in range(200)]
    exact, rounded = (model(config, torch.float32, bits) for bits in (None, 8))
    distributions = []
    for one in (exact, rounded):
        one.begin([prompt], Sampling())
        distributions.append(one.score(Draft.empty(1)).logits()[0, 0].softmax(-1))
        assert one.cache.bytes >= 200 * one.slot_bytes
    assert 0 < (distributions[0] - distributions[1]).abs().sum() < 0.1
    assert rounded.slot_bytes == config.layers * 2 * config.kv_heads * slot_size(config.head_dim)
    assert rounded.cache.bytes / exact.cache.bytes == slot_size(config.head_dim) / (4 * config.head_dim)


def test_rows_come_and_go() -> None:
    network = random_network(SHAPE, 1, dtype=torch.float64)
    rng = random.Random(4)
    asked = [([rng.randrange(31) for _ in range(rng.randint(1, 30))], rng.randint(1, 25)) for _ in range(9)]
    batch = ContinuousBatch(
        Decoder(network, cache_bits=8), lambda: make_drafter("prompt-lookup"), make_rule(), sampling=GREEDY, rows=3
    )
    found: dict[int, list[int]] = {batch.add(prompt, limit): [] for prompt, limit in asked}
    gone = 4
    for number, step in enumerate(batch):
        found[step.row] += step.emitted
        if number == 2:
            batch.cancel(gone)
    for number, (prompt, limit) in enumerate(asked):
        if number != gone:
            steps = decode(
                Decoder(network, cache_bits=8), None, make_rule(), [prompt], sampling=GREEDY, max_new_tokens=limit
            )
            assert found[number] == [token for step in steps for token in step.emitted]
    batch.close()


def test_buffers_that_stay_change_nothing() -> None:
    said = []
    for still in (False, True):
        network = random_network(SHAPE, 1, dtype=torch.float64)
        network.graphs = Graphs(network) if still else None
        target = Decoder(network, cache_bits=8)
        target.cache.exact = False  # bounds, as on a device
        said.append([tokens(target, make_drafter("prompt-lookup")) for _ in range(2)])
    assert said[0] == said[1]


@pytest.mark.skipif(native.library() is None, reason="no compiler, or no AVX-512 with 16-bit products")
@pytest.mark.parametrize("tiles", [True, False], ids=["tiles", "vectors"])
def test_machine_code_reads_what_it_rounded(tiles: bool) -> None:
    code = native.library()
    assert code is not None
    if code.outrider_ready(tiles) != 1 + tiles:
        pytest.skip("this processor has no tile unit")
    ours = Decoder.random(WIDE, 1, dtype=torch.bfloat16).network
    assert ours._native is not None
    layers = ours.map_linears(lambda one: Dense(one.weight.float(), None))
    theirs = Network(WIDE, ours.embedding.float(), layers.layers, ours.norm.float(), layers.head)
    draft = Draft.guess(torch.arange(10).view(2, 5), Tree.of((-1, -1, 0, 2, 1)), torch.ones(2, 5).bool())
    said, apart = [], []
    for bits in (None, 8):
        said = []
        for network in (ours, theirs):
            target = Decoder(network, cache_bits=bits)
            target.begin([[1, 2, 3, 4], list(range(50))], Sampling())
            said.append(target.score(draft).logits().float())
        apart.append((said[0] - said[1]).abs().mean())
    assert apart[1] < 3 * apart[0] < 0.2, "16 bits apart, and what is then rounded differently"
    one = Decoder(ours, cache_bits=8)  # a token's numbers do not depend on who shares its pass
    one.begin([list(range(50))], Sampling())
    for path in ([0, 2], [1, 4]):
        chain = Draft.guess(draft.tokens[1:, path], Tree.chain(2), torch.ones(1, 2).bool())
        assert torch.equal(one.score(chain).logits()[0, 1:], said[0][1, [node + 1 for node in path]])
    plain = tokens(Decoder(ours, cache_bits=8), None)
    for name in ("prompt-lookup", "token-recycling"):
        assert tokens(Decoder(ours, cache_bits=8), make_drafter(name)) == plain
    code.outrider_ready(1)


@pytest.mark.gpu
def test_on_a_device_as_on_the_host() -> None:
    said = []
    for device in ("cpu", "cuda"):
        network = random_network(SHAPE, 1, dtype=torch.float64, device=device)
        network.graphs = Graphs(network) if device == "cuda" else None
        said.append(tokens(Decoder(network, cache_bits=8), make_drafter("prompt-lookup")))
    assert said[0] == said[1]


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(InvalidOption, match="cache of 4 bits"):
        model(bits=4)
