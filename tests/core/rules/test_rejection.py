"""Rejection along a chain, all levels at once, decides and records what the walk down the levels does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core.distribution import LogitsPipeline, Sampling, to_law
from outrider.core.draft import Draft, Verdict
from outrider.core.kernels import native
from outrider.core.methods import RULES, make_rule
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules import rejection, small_batch
from outrider.core.rules.neighbours import Tolerance
from outrider.core.tree import Tree

_ROWS, _SIZE, _WORDS, _END = 64, 4, 7, (3,)
_OTHERS = ("exact", "block", "sample-match", "gumbel-match")  # these decide by other walks


def _chain(kind: str, top_k: int, seed: int) -> Draft:
    """Guesses drawn, fixed or both, in rows of every length, with one that is scored and never tried."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(_WORDS, (_ROWS, _SIZE), generator=generator)
    live = torch.arange(_SIZE) < torch.randint(_SIZE + 1, (_ROWS, 1), generator=generator)
    probe = torch.zeros_like(live)
    probe[:8, 2] = True
    draft = Draft(tokens, Tree.chain(_SIZE), live, probe=probe, mixed=kind == "mixed")
    if kind == "fixed":
        return draft
    distributions = to_law(torch.randn(_ROWS, _SIZE, _WORDS, generator=generator), Sampling(top_k=top_k))
    source = torch.arange(_SIZE).expand(_ROWS, -1)
    if kind == "mixed":
        source = torch.where(torch.rand(_ROWS, _SIZE, generator=generator) < 0.5, source, -1)
    return Draft(tokens, draft.tree, live, distributions, source, probe=probe, mixed=kind == "mixed")


def _verdict(name: str, draft: Draft, top_k: int, seed: int) -> Verdict:
    sampling = Sampling(top_k=top_k, end=_END)
    logits = torch.randn(_ROWS, _SIZE + 1, _WORDS, generator=torch.Generator().manual_seed(seed + 1))
    lengths = torch.full((_ROWS,), 5)
    scores = Scores(draft, LogitsPipeline(sampling, [[0]] * _ROWS, _WORDS, logits.device), lengths, logits)
    rng = CounterRNG.of(seed, _ROWS)
    rng.at(0)
    verdict: Verdict = make_rule(name)(draft, scores, rng)
    return verdict


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("kind", ["drawn", "fixed", "mixed"])
@pytest.mark.parametrize("name", [name for name in RULES if name not in _OTHERS])
def test_a_chain_at_once_is_the_walk(name: str, kind: str, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = _chain(kind, top_k, seed=11)
    monkeypatch.setattr(rejection, "_STRETCH", 3)
    once = _verdict(name, draft, top_k, seed=5)
    monkeypatch.setattr(rejection, "_AT_ONCE", 0)
    walked = _verdict(name, draft, top_k, seed=5)
    for field in ("path", "accepted", "token", "resampled", "tried"):
        assert torch.equal(getattr(once, field), getattr(walked, field)), field
    for field in ("chance", "p", "q"):
        torch.testing.assert_close(getattr(once, field), getattr(walked, field))
    assert (once.total_variation is None) == (walked.total_variation is None) == bool(RULES[name].lossless)
    if once.total_variation is not None and walked.total_variation is not None:
        torch.testing.assert_close(once.total_variation, walked.total_variation, atol=1e-6, rtol=0)
        assert once.relaxed is not None and walked.relaxed is not None and torch.equal(once.relaxed, walked.relaxed)
    assert once.tried.any() and (kind == "fixed" or once.accepted.any())


def test_an_end_token_is_tried_strictly_at_every_level() -> None:
    draft = _chain("fixed", 0, seed=3)
    verdict = _verdict("trust", draft, 0, seed=9)
    ends = verdict.tried & (draft.tokens == _END[0])
    assert ends.any() and torch.equal(verdict.chance[ends], verdict.p[ends])


@pytest.mark.parametrize("kind", ["drawn", "fixed", "mixed"])
@pytest.mark.parametrize("name", ["token", "tolerance", "annealed", "grouped", "trust"])
def test_a_few_rows_on_the_host_are_judged_alike(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = _chain(kind, 0, seed=12)
    monkeypatch.setattr(rejection, "_STRETCH", 2)
    monkeypatch.setattr(small_batch, "_FEW", 0)
    together = _verdict(name, draft, 0, seed=6)
    monkeypatch.setattr(small_batch, "_FEW", _ROWS)
    alone = _verdict(name, draft, 0, seed=6)
    for field in ("path", "accepted", "token", "resampled", "tried"):
        assert torch.equal(getattr(alone, field), getattr(together, field)), field
    for field in ("chance", "p", "q"):
        torch.testing.assert_close(getattr(alone, field), getattr(together, field))
    if RULES[name].lossless:
        assert alone.total_variation is None and alone.relaxed is None
        return
    torch.testing.assert_close(alone.total_variation, together.total_variation, atol=1e-6, rtol=0)
    assert alone.relaxed is not None and together.relaxed is not None and torch.equal(alone.relaxed, together.relaxed)


def test_a_few_rows_walk_in_machine_code_whatever_kind_of_number_a_rule_answers_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if native.library() is None:
        pytest.skip("there is no machine code here")
    draft, walked, walk = _chain("mixed", 0, seed=4), list[Verdict](), small_batch.walk
    monkeypatch.setattr(small_batch, "_FEW", _ROWS)
    monkeypatch.setattr(small_batch, "walk", lambda *given: walked.append(walk(*given)) or walked[-1])
    usual = _verdict("tolerance", draft, 0, seed=6)
    accept = Tolerance.accept
    monkeypatch.setattr(Tolerance, "accept", lambda *given: accept(*given).double())
    double = _verdict("tolerance", draft, 0, seed=6)
    assert [id(one) for one in walked] == [id(usual), id(double)] and usual.accepted.any()
    assert torch.equal(usual.accepted, double.accepted) and torch.equal(usual.token, double.token)


def test_blocks_of_a_few_rows_are_judged_alike_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        draft = _chain("drawn", 0, seed)
        draft = replace(draft, fresh=torch.ones(_ROWS, dtype=torch.bool), probe=None)
        monkeypatch.setattr(small_batch, "_FEW", 0)
        together = _verdict("block", draft, 0, seed)
        monkeypatch.setattr(small_batch, "_FEW", _ROWS)
        alone = _verdict("block", draft, 0, seed)
        for field in ("path", "accepted", "token", "resampled", "tried"):
            assert torch.equal(getattr(alone, field), getattr(together, field)), field
        for field in ("chance", "p", "q"):
            torch.testing.assert_close(getattr(alone, field), getattr(together, field), atol=1e-6, rtol=1e-6)
