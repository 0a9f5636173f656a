"""Constraints: masks belong to paths, and exact rules keep the constrained distribution, by enumeration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.constraint import Automaton, Constraint, PathMasks, Positions, Walker
from outrider.core.decode import decode
from outrider.core.distribution import Distribution, LogitsPipeline, Sampling, to_distribution
from outrider.core.draft import Draft
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.kernels import native
from outrider.core.kernels.bit_mask import masked
from outrider.core.methods import DRAFTERS, RULES, Method
from outrider.core.protocol import Scores
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import (
    KINDS,
    Case,
    SequenceDistribution,
    enumerate_output,
    total_variation,
    trial_drafter,
)
from outrider.core.testing.table_target import TableTarget
from outrider.core.tree import Tree

PROMPTS = ((0, 1), (2, 1, 0, 1))
LIMITS = (3, 2)
# what may follow depends on the path: 2 after 0 0 but not after 1 0, and only 1 after 1 2
WALK = Automaton({0: {0: 1, 1: 2}, 1: {0: 3, 1: 0, 2: 2}, 2: {0: 0, 2: 4}, 3: {2: 0, 0: 3}, 4: {1: 1}})
ENDING = Automaton({0: {0: 1, 1: 0}, 1: {0: 0, 1: 1, 2: 2}}, frozenset({2}))
SAMPLINGS = {
    "T=1": Sampling(constraint=WALK),
    "T=0.7, top-k 2": Sampling(temperature=0.7, top_k=2, constraint=WALK),
    "top-p 0.9": Sampling(top_p=0.9, constraint=WALK),
    "min-p 0.3": Sampling(min_p=0.3, constraint=WALK),
    "greedy": Sampling(temperature=0, constraint=WALK),
    "penalties, end": Sampling(
        repetition_penalty=1.3, frequency_penalty=0.25, temperature=1.2, end=(2,), constraint=ENDING
    ),
    "positions": Sampling(constraint=Positions([None, (0, 2), (1,)])),
}
EXACT = [rule for rule in RULES.values() if rule.lossless]


def target() -> TableTarget:
    return TableTarget(3, seed=1, sharpness=0.7)


def model() -> TableTarget:
    return TableTarget(3, seed=1, sharpness=0.7, blur=0.4)


def allowed(constraint: Constraint | None, output: Sequence[int]) -> list[int]:
    """The ids that may follow, worked out from the constraint's own tables."""
    if isinstance(constraint, Positions):
        ids = constraint.allowed[len(output)] if len(output) < len(constraint.allowed) else None
        return [0, 1, 2] if ids is None else list(ids)
    if constraint is None:
        return [0, 1, 2]
    assert isinstance(constraint, Automaton)
    state = 0
    for token in output:
        state = constraint.moves[state][token]
    return list(constraint.moves[state])


def defined_distribution(prompt: Sequence[int], sampling: Sampling, length: int) -> SequenceDistribution:
    """The law by definition: logits, penalties, processors, -inf for what may not follow, then temperature and cuts.
    Independent of PathMasks and of drafts."""
    table = target()
    table.begin([prompt], Sampling())
    distribution, done = {(): 1.0}, SequenceDistribution()
    for _ in range(length):
        longer = SequenceDistribution()
        for output, weight in distribution.items():
            draft = Draft.guess(torch.tensor([output]).long().view(1, -1), Tree.chain(len(output)), torch.ones(1, 0))
            logits = table.score(draft).logits()[0, -1]
            for token in {*prompt, *output}:
                logits[token] *= 1 / sampling.repetition_penalty if logits[token] > 0 else sampling.repetition_penalty
            for token in output:
                logits[token] -= sampling.frequency_penalty
            for token in {*output}:
                logits[token] -= sampling.presence_penalty
            row = logits[None]
            for processor in sampling.processors:
                row = processor(torch.tensor([[*prompt, *output]]), row)
            mask = torch.full((3,), -torch.inf, dtype=row.dtype)
            mask[allowed(sampling.constraint, output)] = 0
            probs = to_distribution(row + mask, sampling).dense().probs[0]
            for token in np.flatnonzero(probs > 0).tolist():
                (done if token in sampling.end else longer)[(*output, token)] = weight * float(probs[token])
        distribution = longer
    return done | distribution


def distance(method: Method, options: Any, rule: Any, sampling: Sampling, **how: Any) -> float:
    case = Case(
        target=target,
        drafter=partial(trial_drafter, method, options, model),
        rule=rule,
        prompts=PROMPTS,
        sampling=sampling,
        limits=LIMITS,
    )
    pairs = zip(enumerate_output(case, **how), PROMPTS, LIMITS, strict=True)
    return max(total_variation(one, defined_distribution(p, sampling, limit)) for one, p, limit in pairs)


def settings() -> Iterator[Any]:
    """Every kind of draft under every exact rule and sampling; the fast part has each kind, rule and sampling."""
    for name in KINDS:
        for rule in EXACT:
            if rule.name == "block" and name != "draft-model":
                continue
            for sampling in SAMPLINGS:
                quick = rule.name == "exact" and (sampling == "T=1" or name == "sampled-tree")
                quick = quick or (sampling == "T=1" and name == "draft-model")
                marks = [] if quick else [pytest.mark.slow]
                yield pytest.param(name, rule, sampling, id=f"{name}-{rule.name}-{sampling}", marks=marks)


@pytest.mark.parametrize(("name", "rule", "sampling"), [*settings()])
def test_exact_rules_keep_the_defined_distribution(name: str, rule: Method, sampling: str, measured: Any) -> None:
    found = distance(DRAFTERS[name], DRAFTERS[name].test_options[0], rule.make(), SAMPLINGS[sampling])
    measured("enumeration: total variation from the constrained target, exact rules", name=rule.name, value=found)
    assert found < 1e-12


# ---- negative controls


@contextmanager
def masked_by_position() -> Iterator[None]:
    """The mask of the first node at a depth serves all nodes of that depth."""
    true = Draft.host_paths.func  # type: ignore[attr-defined]

    def paths(self: Draft) -> list[list[list[int]]]:
        rows = true(self)
        return [[next(p for p in row if len(p) == len(path)) for path in row] for row in rows]

    with patch.object(Draft, "host_paths", property(paths)):
        yield


@contextmanager
def masked_after_the_cut() -> Iterator[None]:
    """Top-p first; then the mask, renormalised where anything is left."""

    def distribution(
        self: LogitsPipeline, logits: Tensor, path: Tensor | None = None, bits: Tensor | None = None, **_: Any
    ) -> Distribution:
        cut = to_distribution(logits, self.sampling).dense().probs
        if bits is None:
            return Distribution(cut, None, self.vocabulary)
        inside = torch.isfinite(masked(torch.zeros_like(logits), bits))
        left = cut * inside
        probs = torch.where(left.sum(-1, keepdim=True) > 0, left, torch.softmax(masked(logits, bits), -1))
        return Distribution(probs / probs.sum(-1, keepdim=True), None, self.vocabulary)

    with patch.object(LogitsPipeline, "distribution", distribution):
        yield


@pytest.mark.parametrize(
    ("mistake", "sampling"),
    [(masked_by_position, SAMPLINGS["T=1"]), (masked_after_the_cut, Sampling(top_p=0.9, constraint=WALK))],
    ids=["mask by position", "mask after top-p"],
)
def test_negative_controls_are_caught(mistake: Callable[[], Any], sampling: Sampling, measured: Any) -> None:
    with mistake(), patch("outrider.core.decode.constrained", lambda drafter, _: drafter):  # which would refuse as well
        found = distance(DRAFTERS["sampled-tree"], {"tree": (-1, -1, 0, 1)}, Exact(), sampling)
    measured("enumeration: negative controls, which must differ", name=f"constraint: {mistake.__name__}", value=found)
    assert found > 0.01


def test_relaxed_rules_are_refused() -> None:
    with pytest.raises(Incompatible, match="may accept tokens that the constraint forbids"):
        decode(target(), None, RULES["typical"].make(), [[0]], sampling=SAMPLINGS["T=1"], max_new_tokens=2)


# ---- the parts


def follows(constraint: Constraint, output: Sequence[int]) -> bool:
    return Walker(constraint).reach(list(output))


QUICK = (*KINDS, "suffix", "lookahead", "pearl", "eagle3", "medusa", "layer-skip", "adaptive")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in DRAFTERS]
)
def test_every_drafter_stays_within_the_constraint_and_says_what_plain_decoding_says(name: str) -> None:
    """In batches with sampled and greedy tokens; under gumbel-match token for token."""
    method = DRAFTERS[name]
    table = partial(TableTarget, 11, seed=3, sharpness=0.8)
    loops = Automaton({state: {(3 * state + k) % 11: (state + k) % 5 for k in range(1 + state)} for state in range(5)})
    for rule, sampling in (
        ("exact", Sampling(temperature=0, constraint=loops)),
        ("gumbel-match", Sampling(constraint=loops)),
    ):
        outputs = []
        for drafter in (None, trial_drafter(method, method.test_options[0], partial(table, blur=0.3))):
            rows: list[list[int]] = [[], []]
            steps = decode(
                table(), drafter, RULES[rule].make(), [[1, 2, 3], [4, 5]], sampling=sampling, max_new_tokens=24, seed=5
            )
            for step in steps:
                rows[step.row] += step.emitted
            outputs.append(rows)
        assert outputs[0] == outputs[1]
        assert all(follows(loops, row) and len(row) == 24 for row in outputs[0])


def test_a_walker_reaches_outputs_in_any_order() -> None:
    walker = Walker(WALK)
    for output in ([0, 0, 2], [0, 1], [1, 2, 1, 2], [], [0, 0, 2, 1]):
        assert walker.reach(output)
    assert not walker.reach([0, 0, 1])
    assert walker.reach([0, 0], [2])


def test_bits_are_those_of_each_path() -> None:
    masks = PathMasks.of(WALK, [[], []]).committed([[0], [1, -1]])
    bits = masks.bits([[[], [0], [1], [2], [2, 2]], [[], [0], [1]]], 40)
    assert bits.shape == (2, 5, 2)
    found = [[[i for i in range(32) if word[0] >> i & 1] for word in row] for row in bits.tolist()]
    assert found[0] == [[0, 1, 2], [0, 2], [0, 1], [0, 2], [1]]
    assert found[1][:2] == [[0, 2], [0, 1]]
    assert bits[1, 2].tolist() == [-1, -1], "a forbidden path is not masked"


def test_high_ids_have_bits_too() -> None:
    bits = PathMasks.of(Positions([(31, 32, 63, 70)]), [[]]).bits([[[]]], 71)
    logits = masked(torch.zeros(1, 1, 71), bits)
    assert torch.isfinite(logits)[0, 0].nonzero().flatten().tolist() == [31, 32, 63, 70]


def test_corrections_are_the_bits_where_a_token_is_forbidden() -> None:
    masks = PathMasks.of(WALK, [[], []]).committed([[0], [1, -1]])
    paths = [[[], [0], [1], [2], [2, 2]], [[], [0], [1], [2, -1], [2, 1]]]
    allowed = [[[0, 1, 2], [0, 2], [0, 1], [0, 2], [1]], [[0, 2], [0, 1], None, [1], [0, 1, 2]]]  # None: not the path
    every = masks.bits(paths, 40)
    for token in range(3):
        wrong = torch.tensor([[ids is not None and token not in ids for ids in row] for row in allowed])
        places, bits = masks.corrections(paths, [[token] * 5] * 2, 40)
        assert places == wrong.any(0).nonzero().flatten().tolist()
        assert bits.equal(torch.where(wrong[..., None], every, -1)[:, places])


@pytest.mark.parametrize("size", [5, 32, 71, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masked_logits_are_the_same_whoever_masks_them(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In compiled code, by numpy and by torch; a row that a mask would leave nothing of stays."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(2, 3, 2 * size, generator=generator).to(dtype)[..., :size]  # not contiguous
    single = torch.rand(2, 3, size, generator=generator) < 0.5
    single[0, 1], single[1, 2] = False, True
    logits[1, 0] = torch.where(single[1, 0], -torch.inf, logits[1, 0])
    ids = torch.nn.functional.pad(single, (0, -size % 32)).unflatten(-1, (-1, 32)).long() << torch.arange(32)
    bits = ids.sum(-1).to(torch.int32)
    wanted = torch.where(single, logits, -torch.inf)
    wanted[0, 1], wanted[1, 0] = logits[0, 1], logits[1, 0]
    assert masked(logits, bits).equal(wanted)
    monkeypatch.setattr(native, "library", lambda: None)
    assert masked(logits, bits).equal(wanted)
    monkeypatch.setattr("sys.byteorder", "big")
    assert masked(logits, bits).equal(wanted)


def test_scores_are_of_the_state_before_the_verdict() -> None:
    table = target()
    table.begin([[0, 1]], SAMPLINGS["T=1"])
    scores: Scores = table.score(Draft.empty(1))
    before = scores.distributions().probs.clone()
    table._pipeline.commit(torch.tensor([[1]]))
    assert torch.equal(scores.distributions(torch.zeros(1, 1, dtype=torch.long)).probs, before)


@pytest.mark.parametrize("ids", [(), (-1,)])
def test_a_position_that_allows_nothing_is_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidOption, match="position 1 allows"):
        Positions([None, ids])
