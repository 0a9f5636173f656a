"""Compiled rules decide, draft by draft, what their references decide from the same uniforms."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import LogitsPipeline, Sampling, to_distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import SampledTree
from outrider.core.drafters.parallel_decoding.jacobi import RENEWALS, Jacobi
from outrider.core.methods import make_rule
from outrider.core.protocol import Rule, Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules import native_walk
from outrider.core.rules.acceptance import Acceptance, GreedyAcceptance
from outrider.core.rules.chain import along_chain
from outrider.core.rules.codebook import Annealed
from outrider.core.rules.exact import Exact, Token
from outrider.core.rules.neighbours import Tolerance
from outrider.core.rules.tree_walk import down_tree
from outrider.core.testing.conformance import FeedCounter
from outrider.core.testing.table_target import TableTarget
from outrider.core.tree import Tree

SAMPLINGS = {"whole": Sampling(), "top-k": Sampling(top_k=4), "top-p": Sampling(top_p=0.7)}
needs_compiler = pytest.mark.skipif(native_walk.library() is None, reason="there is no compiler")
END = (1,)


def logits(choose: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Logits with ties, tokens excluded, near-certainties and equal distributions."""
    generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
    values = torch.randn(shape, generator=generator, dtype=dtype)
    kind = choose.choice(["plain", "ties", "excluded", "one-hot", "flat"])
    if kind == "ties":
        return values.round()
    if kind == "excluded":
        values[torch.rand(shape, generator=generator) < 0.5] = -torch.inf
        values[..., 0] = 0.0
    if kind == "one-hot":
        return torch.where(values == values.amax(-1, keepdim=True), 0.0, -torch.inf).to(dtype)
    return values * 0 if kind == "flat" else values


def tree(choose: random.Random, rows: int, shape: str, size: int) -> Tree:
    if shape == "chain":
        return Tree.chain(size)
    if shape == "tree":
        return Tree.of(tuple(choose.randint(-1, node - 1) for node in range(size)))
    return Tree(torch.tensor([[choose.randint(-1, node - 1) for node in range(size)] for _ in range(rows)]))


def draft(choose: random.Random, rows: int, vocabulary: int, dtype: torch.dtype, shape: str) -> Draft:
    """Nodes drawn, fixed or both, some dead, some not to be tried, in rows of any length."""
    size, generator = choose.randint(1, 7), torch.Generator().manual_seed(choose.randrange(1 << 30))
    forest = tree(choose, rows, shape, size)
    tokens = torch.randint(vocabulary, (rows, size), generator=generator)
    live = (torch.rand(rows, size, generator=generator) < 0.85)[:, None] | ~forest.ancestors
    live, probe = live.all(-1), torch.rand(rows, size, generator=generator) < choose.choice([0.0, 0.1])
    kind = choose.choice(["drawn", "fixed", "mixed"])
    probes = probe if choose.random() < 0.5 else None
    if kind == "fixed":
        return Draft(tokens, forest, live, probe=probes, mixed=choose.random() < 0.5)
    origins = choose.randint(1, size)
    sampling = Sampling(top_k=choose.choice([0, 0, 3]), top_p=choose.choice([1.0, 0.7]))
    distributions = to_distribution(logits(choose, (rows, origins, vocabulary), dtype), sampling)
    source = forest.parents.expand(rows, -1).clamp(min=-1) + 1
    source = source % origins  # siblings share a distribution
    if kind == "mixed":
        source = torch.where(torch.rand(rows, size, generator=generator) < 0.6, source, -1)
    replacement = choose.random() < 0.5
    return Draft(
        tokens, forest, live, distributions, source, replacement=replacement, probe=probes, mixed=kind == "mixed"
    )


def same(one: Verdict, other: Verdict, tolerance: float) -> None:
    for field in ("path", "accepted", "token", "resampled", "tried"):
        assert torch.equal(getattr(one, field), getattr(other, field)), field
    for field in ("chance", "p", "q"):
        mine, yours = (torch.where(one.tried, getattr(each, field).double(), 0) for each in (one, other))
        torch.testing.assert_close(mine, yours, atol=tolerance, rtol=tolerance, msg=field)
    assert (one.total_variation is None) == (other.total_variation is None)
    if one.total_variation is not None:
        torch.testing.assert_close(one.total_variation, other.total_variation, atol=tolerance, rtol=0)
        assert one.relaxed is not None and torch.equal(one.relaxed, other.relaxed)


def both(
    rule: str, drafted: Draft, scores: Callable[[], Scores], seed: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Verdict, Verdict, int]:
    verdicts, fed = [], 0
    for compiled in (True, False):
        rng = FeedCounter(CounterRNG.of(seed, drafted.rows).seeds)
        rng.at(0)
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(native_walk, "library", lambda: None)
            verdicts.append(make_rule(rule)(drafted, scores(), rng))
        fed += rng.fed
    return verdicts[0], verdicts[1], fed


@needs_compiler
@pytest.mark.parametrize("lazily", [False, True], ids=["at once", "level by level"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
@pytest.mark.parametrize("shape", ["chain", "tree", "forest"])
@pytest.mark.parametrize(
    "rule", ["token", "exact", "sample-match", "lenience", "tolerance", "annealed", "trust", "additive-beta", "bild"]
)
def test_compiled_rules_decide_as_their_references(
    rule: str, shape: str, dtype: torch.dtype, lazily: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, decided, accepted = random.Random(f"{rule} {shape} {dtype}"), 0, 0
    monkeypatch.setattr(native_walk, "_AT_ONCE", 0 if lazily else 1 << 17)
    monkeypatch.setattr(native_walk, "_STRETCH", 2)
    for seed in range(40):
        rows, vocabulary = choose.choice([1, 1, 3, 12]), choose.choice([2, 5, 17])
        drafted = draft(choose, rows, vocabulary, dtype, shape)
        options = {"top_k": choose.choice([0, 0, 3]), "top_p": choose.choice([1.0, 0.7])}
        sampling = Sampling(temperature=choose.choice([0.0, 0.6, 1.0, 1.0]), end=END, **options)
        raw = logits(choose, (rows, drafted.size + 1, vocabulary), dtype)

        def scores(drafted: Draft = drafted, raw: Tensor = raw, sampling: Sampling = sampling) -> Scores:
            pipeline = LogitsPipeline(sampling, [[0]] * drafted.rows, raw.shape[-1], raw.device)
            return Scores(drafted, pipeline, torch.full((drafted.rows,), 5), raw)

        compiled, reference, fed = both(rule, drafted, scores, seed, monkeypatch)
        same(compiled, reference, 1e-5 if dtype == torch.float32 else 1e-12)
        decided, accepted = decided + fed, accepted + int(compiled.accepted.sum())
    assert accepted and (decided or (rule not in ("token", "exact") and shape != "chain"))


@pytest.mark.parametrize(
    ("acceptance", "greedy"),
    [(None, None), (Tolerance().accept, None), (Annealed().accept, None), (Annealed().accept, Annealed().greedy)],
)
def test_a_chain_is_a_tree_to_the_references(acceptance: Acceptance | None, greedy: GreedyAcceptance | None) -> None:
    choose, accepted = random.Random(9), 0
    for seed in range(60):
        rows, vocabulary = choose.choice([1, 3, 12]), choose.choice([2, 5, 17])
        drafted = draft(choose, rows, vocabulary, torch.float64, "chain")
        raw = logits(choose, (rows, drafted.size + 1, vocabulary), torch.float64)
        sampling = Sampling(top_k=choose.choice([0, 3]), end=END, temperature=1.0 if greedy is None else 0.0)
        pipeline = LogitsPipeline(sampling, [[0]] * rows, vocabulary, raw.device)
        scores = Scores(drafted, pipeline, torch.full((rows,), 5), raw)
        chain = along_chain(drafted, scores, CounterRNG.of(seed, rows), acceptance, greedy)
        same(chain, down_tree(drafted, scores, CounterRNG.of(seed, rows), acceptance, None, greedy), 1e-12)
        assert not any(part[~chain.tried].any() for part in (chain.chance, chain.p, chain.q))
        accepted += int(chain.accepted.sum())
    assert accepted


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
@pytest.mark.parametrize("rule", ["block", "exact"])
def test_compiled_block_verification_decides_as_its_reference(
    rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, accepted = random.Random(f"{rule} {dtype}"), 0
    for seed in range(60):
        rows, vocabulary, size = choose.choice([1, 1, 3, 12]), choose.choice([2, 5, 17]), choose.randint(1, 7)
        sampling = Sampling(top_k=choose.choice([0, 3]), top_p=choose.choice([1.0, 0.7]))
        distributions = to_distribution(logits(choose, (rows, size, vocabulary), dtype), sampling)
        draw = CounterRNG.of(seed + 1000, rows)
        tokens = draw.sample(distributions, torch.arange(size).expand(rows, -1), 0)  # type: ignore[arg-type]
        live = torch.arange(size) < torch.tensor([[choose.randint(0, size)] for _ in range(rows)])
        drafted = Draft.drawn(tokens, distributions, live)
        raw = logits(choose, (rows, size + 1, vocabulary), dtype)

        def scores(drafted: Draft = drafted, raw: Tensor = raw, sampling: Sampling = sampling) -> Scores:
            pipeline = LogitsPipeline(sampling, [[0]] * drafted.rows, raw.shape[-1], raw.device)
            return Scores(drafted, pipeline, torch.full((drafted.rows,), 5), raw)

        compiled, reference, fed = both(rule, drafted, scores, seed, monkeypatch)
        same(compiled, reference, 1e-4 if dtype == torch.float32 else 1e-11)
        assert fed
        accepted += int(compiled.accepted.sum())
    assert accepted


@needs_compiler
@pytest.mark.parametrize("renew", RENEWALS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("window", [1, 3, 9])
def test_windows_are_renewed_alike(renew: str, sampling: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[tuple[int, ...]]:
        drafter, prompts = Jacobi(window=window, renew=renew), [[1], [2, 3], [4]]
        steps = decode(
            TableTarget(11, seed=3), drafter, Exact(), prompts, sampling=SAMPLINGS[sampling], max_new_tokens=30, seed=8
        )
        return [(step.row, *step.drafted, *step.emitted) for step in steps]

    compiled = run()
    monkeypatch.setattr(native_walk, "library", lambda: None)
    assert compiled == run()
    assert len(compiled) < 90 or window == 1


def test_a_relaxed_rule_may_answer_in_another_kind_of_number(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(4)
    drafted = draft(choose, 16, 7, torch.float32, "chain")
    raw = logits(choose, (16, drafted.size + 1, 7), torch.float32)
    pipeline = LogitsPipeline(Sampling(), [[0]] * 16, 7, raw.device)
    scores, accept = Scores(drafted, pipeline, torch.full((16,), 5), raw), Tolerance.accept
    usual = Tolerance()(drafted, scores, CounterRNG.of(6, 16))
    monkeypatch.setattr(Tolerance, "accept", lambda *given: accept(*given).double())
    same(Tolerance()(drafted, scores, CounterRNG.of(6, 16)), usual, 1e-6)
    assert usual.accepted.any()


@pytest.mark.parametrize("hindrance", ["no compiler", "switched off"])
def test_without_compiled_code_the_references_decide(
    hindrance: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(rule: Rule) -> list[int]:
        drafter = SampledTree(TableTarget(11, seed=3, blur=0.3), tree=(-1, -1, 0, 0, 1))
        steps = decode(TableTarget(11, seed=3), drafter, rule, [[1, 2]], max_new_tokens=40, seed=2)
        return [token for step in steps for token in step.emitted]

    usual = [run(rule) for rule in (Exact(), Token())]
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setenv(*(("CXX", str(tmp_path / "none")) if hindrance == "no compiler" else ("OUTRIDER_NATIVE", "0")))
    native_walk.library.cache_clear()
    try:
        assert native_walk.library() is None and not native_walk.usable(CounterRNG([0]), torch.device("cpu"))
        assert [run(rule) for rule in (Exact(), Token())] == usual
    finally:
        native_walk.library.cache_clear()
