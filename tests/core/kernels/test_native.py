"""Compiled passes compute the same for a token whoever shares its pass, and agree with torch's; without the kernels
everything runs as well. Their products are in test_products.py."""

from __future__ import annotations

import math
import mmap
import random
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import DynamicTree
from outrider.core.drafters.lookup.trie import Trie
from outrider.core.drafters.trained.eagle import Eagle3Head, EagleHead
from outrider.core.drafters.trained.head_runner import HeadRunner, ready
from outrider.core.engine.linear import Dense, Packed, Widened, fastest
from outrider.core.engine.network import Network, random_network
from outrider.core.engine.quantization.quantize import quantize
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.kernels import native
from outrider.core.methods import make_drafter, make_rule
from outrider.core.tree import Tree
from tests.core.kernels.test_products import needs_code, noise

SHAPE = Config(
    vocabulary=96,
    hidden_size=64,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=32,
    intermediate_size=96,
    attention_bias=True,
    qk_norm=True,
)
WIDE = Config(
    vocabulary=96,
    hidden_size=96,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=64,
    intermediate_size=320,
    mlp_bias=True,
    out_bias=True,
)


def laid_out(network: Network, bits: int | None) -> Network:
    return network.map_linears(fastest) if bits is None else quantize(network, bits)


def dense(network: Network) -> Network:
    """The same weights in 32 bits, through torch."""
    layers = network.map_linears(lambda one: Dense(one.weight.float(), None if one.bias is None else one.bias.float()))
    return Network(network.config, network.embedding.float(), layers.layers, network.norm.float(), layers.head)


@needs_code
@pytest.mark.parametrize("shape", [SHAPE, WIDE])
@pytest.mark.parametrize("kind", [EagleHead, Eagle3Head])
def test_blocks_that_draft_agree_with_torch(ways: str, kind: type[EagleHead | Eagle3Head], shape: Config) -> None:
    """What EAGLE's layer foresees, of rows of different lengths, behind prompts and on the levels of a tree."""
    target = Decoder(random_network(shape, 3, dtype=torch.bfloat16))
    torch.manual_seed(0)
    learned = kind(Decoder(random_network(shape, 3)))
    prompts = [[(7 * place + row) % shape.vocabulary for place in range(length)] for row, length in ((0, 21), (1, 38))]
    found = []
    for native_too in (True, False):
        head = HeadRunner(ready(learned, target))
        assert head.draft_head.block.runner is not None
        if not native_too:
            head.draft_head.block.runner = None
        head.set_hidden(target.begin(prompts, Sampling(), learned.needs).hidden)
        head.begin(prompts, Sampling())
        distributions = [head.score(Draft.empty(2)).logits()]
        for size, since in ((3, 0), (5, 3)):
            tree = Tree.of((-1, -1, -1, 0, 2)[:size])
            tokens = torch.tensor([[5, 9, 11, 2, 3], [8, 1, 4, 4, 6]])[:, :size]
            distributions.append(head.score(Draft.guess(tokens, tree, tokens >= 0), since).logits())
        found.append(torch.cat(distributions, 1).float())
    assert (found[0] - found[1]).abs().mean() < 0.02 * found[1].abs().mean()


@needs_code
@pytest.mark.parametrize("least", [0.0, 0.02])
@pytest.mark.parametrize("vocabulary", [0, 64])
def test_trees_in_one_call_agree_with_scores(ways: str, vocabulary: int, least: float) -> None:
    """The likeliest tokens behind the nodes of each level, and the probabilities of their paths; with one token that
    waits and with several."""
    target = Decoder(laid_out(random_network(SHAPE, 3, dtype=torch.bfloat16), None))
    torch.manual_seed(0)
    head = HeadRunner(ready(Eagle3Head(Decoder(random_network(SHAPE, 3)), vocabulary=vocabulary), target))
    prompt = [7 * place % SHAPE.vocabulary for place in range(21)]
    prefill = target.begin([prompt], Sampling(), head.draft_head.needs)
    head.set_hidden(prefill.hidden)
    drafter = DynamicTree(head, nodes=400, width=3, depth=4, min_probability=least)
    drafter.begin(prefill, [prompt], Sampling(temperature=0))
    for _ in range(3):
        assert head.grow_tree(0, 1, 3, -math.inf) is not None
        head.rewind(head.mark())
        (quick,) = drafter._row_by_row([9]) or []
        slow = Trie()
        slow.weights = [math.exp(one) for one in drafter._scored(slow, 4)]
        head.rewind(head.mark())
        sizes = [quick.depths.count(level) for level in (1, 2, 3, 4)]
        assert sizes == [3, 9, 9, 9] if not least else 3 <= len(quick) < 30
        found = [{path(trie, node): trie.weights[node] for node in range(len(trie))} for trie in (quick, slow)]
        both = found[0].keys() & found[1].keys()
        assert len(both) > 0.6 * max(map(len, found))  # of near equals either may come first
        off = [abs(math.log(found[0][one] / found[1][one])) for one in both]
        assert sum(off) < 0.06 * len(off) and max(off) < 0.25  # logarithms, of 16 bits
        draft = Draft.guess(torch.tensor([[7, 9]]), Tree.chain(2), torch.ones(1, 2, dtype=torch.bool))
        head.set_hidden(target.score(draft).hidden)  # two are accepted, and three wait
        nothing, none = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool)
        taken = torch.tensor([[0, 1]]), torch.tensor([2]), torch.tensor([5]), torch.tensor([False])
        verdict = Verdict(*taken, none, nothing, nothing, nothing)
        for model in (head, target):
            model.keep(draft, verdict, torch.tensor([3]))


def path(trie: Trie, node: int) -> tuple[int, ...]:
    return (*path(trie, trie.parents[node]), trie.tokens[node]) if node >= 0 else ()


@needs_code
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("shape", [SHAPE, WIDE], ids=["normed", "wide"])
def test_whole_passes_agree_with_torch(ways: str, shape: Config, bits: int | None) -> None:
    network = laid_out(random_network(shape, dtype=torch.bfloat16), bits)
    ours, theirs = Decoder(network), Decoder(dense(network))
    draft = Draft.guess(torch.arange(10).view(2, 5), Tree.of((-1, -1, 0, 2, 1)), torch.ones(2, 5).bool())
    taps = frozenset(("embedding", "layer.0", f"layer.{shape.layers - 1}", "last"))
    said, hidden = [], []
    for model in (ours, theirs):
        start = model.begin([[1, 2, 3, 4], list(range(40))], Sampling(), taps)
        scores = model.score(draft)
        said.append(scores.logits().double())
        hidden.append({tap: (start.hidden[tap].double(), scores.hidden[tap].double()) for tap in sorted(taps)})
    assert ours.network._native is not None and theirs.network._native is None
    near = 0.05 if bits == 4 else 0.03
    assert (said[0] - said[1]).abs().mean() < near * said[1].abs().mean()
    for tap, (prefilled, scored) in hidden[1].items():
        for found, wanted in zip(hidden[0][tap], (prefilled, scored), strict=True):
            keep = wanted.abs().sum(-1) > 0  # padding of shorter prompts says nothing
            assert (found - wanted)[keep].abs().mean() < near * wanted[keep].abs().mean()


@needs_code
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_token_is_computed_the_same_wherever_it_stands(ways: str, bits: int | None) -> None:
    """In a chain, in a tree among others, in a batch, or one by one: bit for bit."""
    network = laid_out(random_network(SHAPE, dtype=torch.bfloat16), bits)

    def after(prompts: list[list[int]], drafts: list[Draft], row: int) -> Tensor:
        model = Decoder(network)
        model.begin(prompts, Sampling())
        return torch.cat([model.score(draft).logits()[row] for draft in drafts])

    def guess(rows: list[list[int]], parents: tuple[int, ...]) -> Draft:
        return Draft.guess(
            torch.tensor(rows, dtype=torch.long), Tree.of(parents), torch.ones(len(rows), len(parents)).bool()
        )

    prompt, path = list(range(20)), [5, 6, 7]
    chain = after([prompt], [guess([path], (-1, 0, 1))], 0)
    tree = after([prompt], [guess([[9, 5, 8, 6, 1, 2, 7]], (-1, -1, 0, 1, 1, 3, 3))], 0)
    assert torch.equal(tree[[0, 2, 4, 7]], chain)
    batch = after([[3, 1], prompt], [guess([[9, 5, 8, 6, 1, 2, 7]] * 2, (-1, -1, 0, 1, 1, 3, 3))], 1)
    assert torch.equal(batch[[0, 2, 4, 7]], chain)
    longer = Decoder(network)
    longer.begin([prompt], Sampling())
    one_by_one = [
        longer.score(guess([path[:count]], tuple(range(-1, count - 1)))).logits()[0, -1] for count in range(4)
    ]
    assert torch.equal(torch.stack(one_by_one), chain)


@needs_code
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_prompt_is_read_the_same_whatever_follows(ways: str, bits: int | None) -> None:
    """Where there are tiles, inputs of weights of 4 bits are not rounded to integers in reading a prompt."""
    network, prompt = laid_out(random_network(WIDE, dtype=torch.bfloat16), bits), list(range(70))
    read = [
        Decoder(network).begin([prompt[:count], [3, 1]], Sampling(), frozenset(["last"])).hidden["last"][0, :11]
        for count in (12, 29, 45, 70)
    ]
    assert all(torch.equal(states, read[0]) for states in read)
    model = Decoder(network)
    model.begin([prompt[:1]], Sampling(), frozenset(["last"]))
    draft = Draft.guess(torch.tensor([prompt[1:11]]), Tree.chain(10), torch.ones(1, 10).bool())
    scored = model.score(draft).hidden["last"][0]
    assert torch.equal(scored, read[0]) == (bits != 4 or ways != "tiles")


@pytest.mark.slow
@needs_code
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_drafting_changes_no_token_in_few_bits(bits: int | None) -> None:
    """Greedy output of chains and trees, alone and in a batch, is plain decoding's, without a tolerance for ties."""
    network = laid_out(random_network(SHAPE, dtype=torch.bfloat16, gain=1.0), bits)
    draw = random.Random(3)
    prompts = [[draw.randrange(96) for _ in range(draw.randint(2, 30))] for _ in range(6)]

    def run(name: str | None, asked: list[list[int]], **options: object) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in asked]
        drafter = make_drafter(name, **options)
        for step in decode(
            Decoder(network), drafter, make_rule(), asked, sampling=Sampling(temperature=0), max_new_tokens=40
        ):
            found[step.row] += step.emitted
        return found

    plain = [run(None, [prompt])[0] for prompt in prompts]
    small = Decoder(laid_out(random_network(SHAPE, seed=0, dtype=torch.bfloat16, gain=1.0), 4))
    assert run(None, prompts) == plain
    assert run("prompt-lookup", prompts, length=5) == plain
    assert run("top-k-tree", prompts, model=small, tree=(-1, -1, 0, 0, 1, 2)) == plain
    assert [run("dynamic-tree", [prompt], model=small, nodes=8, width=3, depth=3)[0] for prompt in prompts] == plain


def test_without_it_everything_runs_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    laid = fastest(Dense(noise(48, 96)))
    assert isinstance(laid, Packed | Widened)
    assert laid.weight.dtype == torch.bfloat16 and laid(noise(2, 96)).dtype == torch.bfloat16
    network = laid_out(random_network(SHAPE, dtype=torch.bfloat16), 4)
    assert network._native is None
    model = Decoder(network)
    model.begin([[1, 2, 3]], Sampling())
    assert model.score(Draft.empty(1)).logits().isfinite().all()


def test_no_compiler_or_a_broken_one_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert native._compiled("native") is None
    assert not list((tmp_path / "native").glob("*"))
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert native._compiled("native") is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert native._compiled("native") is None


def test_what_hinders_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_processor", lambda: "flags : sse avx2 fma")
    monkeypatch.setattr(native.sys, "platform", "linux")
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "_compiler", lambda: "g++")
    assert native.hindrance() is None
    monkeypatch.setattr(native, "_compiler", lambda: None)
    assert native.hindrance() == ("no C++ compiler", "install g++, with the system's package manager")
    monkeypatch.setattr(native, "_processor", lambda: "flags : sse avx")
    assert "AVX2" in (native.hindrance() or ("",))[0]
    monkeypatch.setattr(native.sys, "platform", "darwin")
    assert "Linux" in (native.hindrance() or ("",))[0]
    monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    assert "OUTRIDER_NATIVE=0" in (native.hindrance() or ("",))[0]


@pytest.mark.slow
@needs_code
@pytest.mark.parametrize("size", [0, 20, 5000, -1])
def test_a_library_cut_short_is_compiled_again(size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    made = native._compiled("pooling")
    assert made is not None
    whole = made.read_bytes()
    made.write_bytes(whole[:size] if size >= 0 else whole[:-100] + bytes(100))
    assert native._compiled("pooling") == made
    assert native._intact(made)
    assert native.opened("pooling") is not None


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if native.library() is None:
        pytest.skip("no compiler here")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    made = native._compiled("native")
    assert made is not None and made.exists()

    def forbidden(*args: object, **options: object) -> None:
        raise AssertionError("compiled a second time")

    monkeypatch.setattr(subprocess, "run", forbidden)
    assert native._compiled("native") == made


@needs_code
def test_what_was_timed_belongs_to_the_code_that_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    try:
        for way in ("1", "avx2", "0"):
            monkeypatch.setenv("OUTRIDER_NATIVE", way)
            native.library.cache_clear()
            found.append(native.build_id())
    finally:
        native.library.cache_clear()
    assert len(set(found)) == 3 and found.index("torch") == 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages are asked for on Linux")
def test_weights_lie_side_by_side_in_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_local", threading.local())  # nothing was laid before
    weights = [torch.randn(96, 64).bfloat16() for _ in range(3)]
    laid = [native.Tiled(one, None, None, None) for one in weights]
    for one, tiled in zip(weights, laid, strict=True):
        assert torch.equal(tiled.weight, one)
    starts = [one._tiles.data_ptr() for one in laid]
    assert all(start % 64 == 0 for start in starts)
    assert starts[2] - starts[1] == laid[1].weight_bytes
    large = native.Tiled(torch.zeros(16 << 10, 1 << 11).bfloat16(), None, None, None)  # more than is taken at a time
    assert large.weight.shape == large.shape
