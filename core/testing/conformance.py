"""Conformance tests of drafters and acceptance rules, as functions to call on your own.

By enumeration: an `Enumerator` replaces the random generator and follows every branch of random decisions, one branch a
batch row, through the real loop, drafter and rule; the result is the exact distribution of the output. By sampling: a
chi-square test of many rows against the enumerated distribution."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Distribution, Sampling
from outrider.core.draft import Draft
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.methods import Input, Method
from outrider.core.methods.combined import ENSEMBLE
from outrider.core.methods.draft_model import DRAFT_MODEL, SAMPLED_TREE, SPECINFER, TOP_K_TREE
from outrider.core.methods.lookup import PROMPT_LOOKUP
from outrider.core.methods.parallel_decoding import JACOBI
from outrider.core.methods.resolve import Catalogue, Provider
from outrider.core.protocol import Drafter, Rule, Target
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.step_recorder import Record
from outrider.core.testing.table_target import TableTarget
from outrider.core.tree import Tree

# one drafter for each kind of draft: drawn chains and trees, fixed ones, windows and mixtures
KINDS = tuple(
    method.name for method in (DRAFT_MODEL, SAMPLED_TREE, TOP_K_TREE, JACOBI, PROMPT_LOOKUP, ENSEMBLE, SPECINFER)
)

_ROUNDING = 1e-13  # outcomes of a smaller probability are rounding errors
_MARGIN = 1e-10  # between a uniform that is fed and the end of its interval

Outcome = tuple[int, ...]
SequenceDistribution = dict[Outcome, float]
Tape = tuple[int, ...]


class Enumerator(CounterRNG):
    """A generator that follows one tape of decisions a row, and records the possible outcomes where a tape ends.

    A decision with a single possible outcome takes no place on the tape, and an outcome that only rounding makes
    possible is none. The decisions past a tape's end are arbitrary: that run is discarded, and `branches` has the tapes
    that replace it.
    """

    has_tables = feeds_native = False

    def __init__(self, tapes: Sequence[Tape]) -> None:
        super().__init__([0] * len(tapes))
        self.tapes = list(tapes)
        self.weight = np.ones(len(tapes))
        self.branches: list[list[Tape]] = [[] for _ in tapes]
        self._read = np.zeros(len(tapes), dtype=int)
        self._length = np.array([len(tape) for tape in tapes])
        longest = max(self._length, default=0)
        self._tape = np.array([[*tape, *[0] * (longest - len(tape))] for tape in tapes], dtype=int)
        self._past_end = np.zeros(len(tapes), dtype=bool)
        self._active = np.ones(len(tapes), dtype=bool)
        self._tape_of = np.arange(len(tapes))  # of each row that is left

    def arrange(self, order: Sequence[int]) -> None:
        super().arrange(order)
        self._tape_of = self._tape_of[list(order)]

    def at(self, step: int | Sequence[int], going: Sequence[bool] = ()) -> None:
        super().at(step, going)
        self._active = np.array(going)

    def fork(self, label: int) -> CounterRNG:
        return self  # one tape for all

    def _decide(self, probs: np.ndarray, where: np.ndarray) -> np.ndarray:
        """One decision a row among outcomes of probabilities [B, S] -> [B]."""
        chosen: np.ndarray = probs.argmax(1)
        tapes = self._tape_of
        free = where & self._active & ~self._past_end[tapes] & ((probs > _ROUNDING).sum(1) > 1)
        on_tape = free & (self._read[tapes] < self._length[tapes])
        rows, read = np.flatnonzero(on_tape), tapes[on_tape]
        chosen[rows] = self._tape[read, self._read[read]]
        self.weight[read] *= probs[rows, chosen[rows]]
        self._read[read] += 1
        for row in np.flatnonzero(free & ~on_tape):
            tape = tapes[row]
            outcomes = np.flatnonzero(probs[row] > _ROUNDING)
            self.branches[tape] = [(*self.tapes[tape], int(outcome)) for outcome in outcomes]
            self._past_end[tape] = True
        return chosen

    def _decide_all(self, probs: Tensor, where: Tensor | None) -> Tensor:
        """Decisions [B, ..., S], column by column -> [B, ...]."""
        flat = probs.double().reshape(len(probs), -1, probs.shape[-1]).numpy()
        wanted = np.ones(flat.shape[:2], dtype=bool) if where is None else where.reshape(flat.shape[:2]).numpy()
        columns = [self._decide(flat[:, i], wanted[:, i]) for i in range(flat.shape[1])]
        return torch.from_numpy(np.stack(columns, 1)).view(probs.shape[:-1]) if columns else probs[..., 0].long()

    def accept(
        self, chance: Tensor, node: Tensor | int, purpose: Purpose = Purpose.ACCEPT, where: Tensor | None = None
    ) -> Tensor:
        sure = chance.double().clamp(0, 1)
        return self._decide_all(torch.stack([1 - sure, sure], -1), where) > 0

    def descend(self, chance: Tensor, tried: Tensor) -> Tensor:
        active, passed = torch.ones_like(tried[:, 0]), list[Tensor]()
        for level in range(tried.shape[1]):
            active = active & tried[:, level]
            active = active & self.accept(chance[:, level], level, where=active)
            passed.append(active)
        return torch.stack(passed, 1)

    def strictly(self, chance: Tensor, node: Tensor) -> Tensor:
        return chance >= 1  # only for the record, so that no branch is needed

    def sample(
        self, distribution: Distribution, node: Tensor | int, purpose: Purpose, where: Tensor | None = None
    ) -> Tensor:
        total = distribution.probs.double().sum(-1, keepdim=True)
        return distribution.name(self._decide_all(distribution.probs.double() / total.clamp(min=1e-300), where))

    def gumbel_argmax(self, distribution: Distribution, position: Tensor, where: Tensor | None = None) -> Tensor:
        return self.sample(distribution, 0, Purpose.MATCH, where)


class NativeEnumerator(Enumerator):
    """The same for compiled rules. The reference decides by the tape; compiled code is fed uniforms just inside one end
    of the interval that leads to the same decision. Compiled code compares a uniform with thresholds, so code that
    agrees with the reference at the `low` and at the `high` ends emits the reference's distribution, and other code
    does not."""

    feeds_native = True
    end: Literal["low", "high"] = "low"

    def __init__(self, tapes: Sequence[Tape]) -> None:
        super().__init__(tapes)
        self.fed = 0  # how often compiled code decided
        self._uniforms: dict[Purpose, Tensor] = {}

    def feed(self, reference: Callable[[CounterRNG], object], *purposes: Purpose) -> list[Tensor]:
        self.fed += 1
        self._uniforms = {
            purpose: torch.full((len(self._tape_of), self._width), 0.5, dtype=torch.float64) for purpose in purposes
        }
        reference(self)
        tables, self._uniforms = list(self._uniforms.values()), {}
        return tables

    def _note(self, purpose: Purpose, node: Tensor | int, where: Tensor | None, low: Tensor, high: Tensor) -> None:
        """Uniforms of `node` [B, ...] between `low` and `high` lead to the decision just made."""
        if purpose not in self._uniforms:
            return
        margin = torch.minimum((high - low) / 2, torch.full_like(low, _MARGIN))
        uniform = low + margin if self.end == "low" else high - margin
        nodes = torch.full_like(low, node, dtype=torch.long) if isinstance(node, int) else node.expand_as(low)
        table, nodes, uniform = self._uniforms[purpose], nodes.reshape(len(low), -1), uniform.reshape(len(low), -1)
        wanted = torch.ones_like(nodes, dtype=torch.bool) if where is None else where.reshape(nodes.shape)
        table.scatter_(1, nodes, torch.where(wanted, uniform, table.gather(1, nodes)))

    def accept(
        self, chance: Tensor, node: Tensor | int, purpose: Purpose = Purpose.ACCEPT, where: Tensor | None = None
    ) -> Tensor:
        passed, sure = super().accept(chance, node, purpose, where), chance.double().clamp(0, 1)
        self._note(purpose, node, where, torch.where(passed, 0, sure), torch.where(passed, sure, 1))
        return passed

    def sample(
        self, distribution: Distribution, node: Tensor | int, purpose: Purpose, where: Tensor | None = None
    ) -> Tensor:
        probs = distribution.probs.double()
        probs = probs / probs.sum(-1, keepdim=True).clamp(min=1e-300)
        place, high = self._decide_all(probs, where), probs.cumsum(-1)
        at, low = place[..., None], high - probs
        self._note(purpose, node, where, low.gather(-1, at)[..., 0], high.gather(-1, at)[..., 0])
        return distribution.name(place)


class HighEnd(NativeEnumerator):
    """Uniforms at the other end of each interval."""

    end = "high"


class FeedCounter(CounterRNG):
    """The usual random numbers; counts how often compiled code decided by them."""

    fed = 0

    def feed(self, reference: Callable[[CounterRNG], object], *purposes: Purpose) -> list[Tensor]:
        self.fed += 1
        return super().feed(reference, *purposes)


def trial_drafter(method: Method, options: Mapping[str, Any], model: Callable[[], Target]) -> Drafter:
    """A drafter of the method table with these options, and with a draft model or a random draft head if it needs
    one."""
    models = (Input.DRAFT_MODEL, Input.FOREIGN_MODEL, Input.TARGET)
    inputs: dict[Input, Provider] = {kind: lambda request: model() for kind in models}
    inputs[Input.DRAFT_HEAD] = lambda request: random_draft_head(request.method, model())
    drafter: Drafter = Catalogue(inputs=inputs).build(method, options)
    return drafter


def random_draft_head(method: Method, target: Any, seed: int = 0, **config: Any) -> Any:
    """A draft head of the method table with random weights, for a decoder, or for a table target, whose hidden states
    it reads with the embeddings of a small decoder."""
    assert method.draft_head is not None
    if isinstance(target, TableTarget):
        small = Config(
            vocabulary=target.vocabulary,
            hidden_size=target.width,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=4,
            intermediate_size=12,
        )
        target = Decoder.random(small, seed, dtype=target.dtype, device=target.device, gain=1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft_head = method.draft_head(target, **{**method.test_head_options, **config})
        with torch.no_grad():  # weights that are initialised to 0 take part too
            for weight in draft_head.parameters():
                weight.add_(torch.randn(weight.shape) * 0.3)
    return draft_head.drafts(target)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test case: how to make each part, and the prompts. Row i has limit i, modulo their number."""

    target: Callable[[], Target]
    drafter: Callable[[], Drafter | None]
    rule: Rule
    prompts: Sequence[Sequence[int]]
    sampling: Sampling = Sampling()
    limits: Sequence[int] = (3,)

    def run(self, rows: Sequence[int], rng: CounterRNG | Sequence[int]) -> list[Outcome]:
        """Decode prompts, given by index and possibly repeated, in one batch -> each row's output."""
        emitted: list[list[int]] = [[] for _ in rows]
        steps = decode(
            self.target(),
            self.drafter(),
            self.rule,
            [self.prompts[row] for row in rows],
            sampling=self.sampling,
            max_new_tokens=[self.limits[row % len(self.limits)] for row in rows],
            seed=rng,
            record=Record(nodes=False),
        )
        for step in steps:
            emitted[step.row] += step.emitted
        return [tuple(row) for row in emitted]


def enumerate_output(
    case: Case, rng: Callable[[Sequence[Tape]], Enumerator] = Enumerator, *, together: bool = True
) -> list[SequenceDistribution]:
    """The exact distribution of each prompt's output, over every branch of random decisions. The branches share
    batches, or run one by one if not `together`: for drafters whose decisions fall in other rounds in other batches."""
    distributions: list[SequenceDistribution] = [defaultdict(float) for _ in case.prompts]
    open_tapes: list[tuple[int, Tape]] = [(row, ()) for row in range(len(case.prompts))]
    while open_tapes:
        batch, open_tapes = (open_tapes, []) if together else (open_tapes[-1:], open_tapes[:-1])
        enumerator = rng([tape for _, tape in batch])
        outputs = case.run([row for row, _ in batch], enumerator)
        for (row, _), output, weight, branches in zip(
            batch, outputs, enumerator.weight, enumerator.branches, strict=True
        ):
            if branches:
                open_tapes += [(row, tape) for tape in branches]
            else:
                distributions[row][output] += float(weight)
    return [dict(distribution) for distribution in distributions]


def target_distribution(target: Target, prompt: Sequence[int], sampling: Sampling, length: int) -> SequenceDistribution:
    """The distribution of a target's own output: the product of its conditional distributions, without the loop."""
    distribution: SequenceDistribution = {(): 1.0}
    done: SequenceDistribution = {}
    for place in range(length):
        prefixes = torch.tensor(list(distribution), dtype=torch.long).view(len(distribution), place)
        target.begin([prompt] * len(distribution), sampling, frozenset())
        given = Draft.guess(prefixes, Tree.chain(place), torch.ones_like(prefixes, dtype=torch.bool))
        rows = target.score(given).distribution(torch.full((len(distribution),), place)).dense().probs.double().numpy()
        longer: SequenceDistribution = {}
        for (prefix, weight), row in zip(distribution.items(), rows, strict=True):
            for token in np.flatnonzero(row > 0).tolist():
                (done if token in sampling.end else longer)[(*prefix, token)] = weight * float(row[token])
        distribution = longer
        if not distribution:
            break
    return done | distribution


def total_variation(one: Mapping[Outcome, float], other: Mapping[Outcome, float]) -> float:
    """Half the summed absolute difference: 0 for equal distributions, 1 for disjoint ones."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) / 2


def chi_square_z(counts: Mapping[Outcome, int], distribution: Mapping[Outcome, float]) -> float:
    """The chi-square of sampled outputs, in standard deviations above its mean: about 0 for the right distribution,
    tens for a wrong one, infinite if an output has probability 0."""
    total = sum(counts.values())
    if any(distribution.get(key, 0.0) <= 0 for key in counts):
        return math.inf
    expected = sorted(((distribution[key] * total, counts.get(key, 0)) for key in distribution), reverse=True)
    while len(expected) > 2 and expected[-1][0] < 5:  # pool rare outputs
        (mean, count), (mean2, count2) = expected.pop(), expected.pop()
        expected.append((mean + mean2, count + count2))
        expected.sort(reverse=True)
    chi_square = sum((count - mean) ** 2 / mean for mean, count in expected)
    freedom = len(expected) - 1
    return (chi_square - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


def sample_output(
    case: Case, draws: int, seed: int = 0, rng: Callable[[Sequence[int]], CounterRNG] | None = None
) -> list[dict[Outcome, int]]:
    """Output counts of each prompt over many rows with seeds of their own, all in one batch; `rng` makes the random
    generator from the seeds."""
    rows = [row for row in range(len(case.prompts)) for _ in range(draws)]
    counts: list[dict[Outcome, int]] = [defaultdict(int) for _ in case.prompts]
    seeds = list(itertools.islice(itertools.count(seed), len(rows)))
    for row, output in zip(rows, case.run(rows, seeds if rng is None else rng(seeds)), strict=True):
        counts[row][output] += 1
    return [dict(count) for count in counts]
