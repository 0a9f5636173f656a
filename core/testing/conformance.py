"""What every drafter and rule must stand up to, as functions anyone can call on a method of their own.

Distributions by enumeration: `Enumerator` takes the place of the random generator and, run by run, walks down every
branch that chance could take, one branch a row of the batch, so that the loop, the drafter and the rule are the real
ones and the distribution of the output comes out exactly. Distributions by sampling: a chi-square of many rows against
the enumerated distribution."""

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

# one drafter for each kind of draft: drawn chains and trees, fixed ones, windows, and mixtures
KINDS = tuple(
    method.name for method in (DRAFT_MODEL, SAMPLED_TREE, TOP_K_TREE, JACOBI, PROMPT_LOOKUP, ENSEMBLE, SPECINFER)
)

_ROUNDING = 1e-13  # of a chance: what is likelier may come about
_MARGIN = 1e-10  # between a uniform that is fed and the end of its interval

Outcome = tuple[int, ...]
SequenceDistribution = dict[Outcome, float]
Tape = tuple[int, ...]


class Enumerator(CounterRNG):
    """Dice that follow a tape of decisions a row, and note what could be decided where the tape ends.

    A decision that only one outcome can have takes no place on the tape; what rounding alone makes possible, in one
    batch and not in another, is no outcome. Past its end a row does anything at all: its run does not count, and
    `branches` says by which tapes to replace it.
    """

    rolls = feeds_native = False

    def __init__(self, tapes: Sequence[Tape]) -> None:
        super().__init__([0] * len(tapes))
        self.tapes = list(tapes)
        self.weight = np.ones(len(tapes))
        self.branches: list[list[Tape]] = [[] for _ in tapes]
        self._read = np.zeros(len(tapes), dtype=int)
        self._length = np.array([len(tape) for tape in tapes])
        longest = max(self._length, default=0)
        self._tape = np.array([[*tape, *[0] * (longest - len(tape))] for tape in tapes], dtype=int)
        self._lost = np.zeros(len(tapes), dtype=bool)
        self._going = np.ones(len(tapes), dtype=bool)

    def at(self, step: int | Sequence[int], going: Sequence[bool] = ()) -> None:
        super().at(step, going)
        self._going = np.array(going)

    def fork(self, label: int) -> CounterRNG:
        return self  # one tape for all

    def _decide(self, probs: np.ndarray, where: np.ndarray) -> np.ndarray:
        """One decision a row among outcomes with probabilities [B, S] -> [B]."""
        chosen: np.ndarray = probs.argmax(1)
        free = where & self._going & ~self._lost & ((probs > _ROUNDING).sum(1) > 1)
        on_tape = free & (self._read < self._length)
        rows = np.flatnonzero(on_tape)
        chosen[rows] = self._tape[rows, self._read[rows]]
        self.weight[rows] *= probs[rows, chosen[rows]]
        self._read[rows] += 1
        for row in np.flatnonzero(free & ~on_tape):
            self.branches[row] = [
                (*self.tapes[row], int(outcome)) for outcome in np.flatnonzero(probs[row] > _ROUNDING)
            ]
            self._lost[row] = True
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
        return chance >= 1  # how often a strict rule would have agreed is no part of the distribution

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
            purpose: torch.full((len(self.tapes), self._width), 0.5, dtype=torch.float64) for purpose in purposes
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


def equip(method: Method, options: Mapping[str, Any], model: Callable[[], Target]) -> Drafter:
    """A drafter of the method table with these options, given a draft model if it needs one, or a draft head with
    random weights."""
    models = (Input.DRAFT_MODEL, Input.FOREIGN_MODEL, Input.TARGET)
    inputs: dict[Input, Provider] = {kind: lambda request: model() for kind in models}
    inputs[Input.DRAFT_HEAD] = lambda request: untaught(request.method, model())
    drafter: Drafter = Catalogue(inputs=inputs).build(method, options)
    return drafter


def untaught(method: Method, target: Any, seed: int = 0, **config: Any) -> Any:
    """A draft head of the method table with random weights, ready to draft: for a decoder, or for a table, whose states
    it reads, with the words of a small decoder."""
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
        draft_head = method.draft_head(target, **{**method.small, **config})
        with torch.no_grad():  # what begins at 0 shall matter too
            for weight in draft_head.parameters():
                weight.add_(torch.randn(weight.shape) * 0.3)
    return draft_head.drafts(target)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is put to the test: how to make each part afresh, and on which rows. Limits may differ row by row."""

    target: Callable[[], Target]
    drafter: Callable[[], Drafter | None]
    rule: Rule
    prompts: Sequence[Sequence[int]]
    sampling: Sampling = Sampling()
    limits: Sequence[int] = (3,)

    def run(self, rows: Sequence[int], rng: CounterRNG | Sequence[int]) -> list[Outcome]:
        """Decode the given prompts (by number, repeats welcome) side by side -> each row's output."""
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
    """The exact distribution of each prompt's output, by walking down every branch of chance: side by side, or one run
    after another, for what decides in other steps (not by other distributions) where the rows of a batch draft
    differently."""
    distributions: list[SequenceDistribution] = [defaultdict(float) for _ in case.prompts]
    waiting: list[tuple[int, Tape]] = [(row, ()) for row in range(len(case.prompts))]
    while waiting:
        now, waiting = (waiting, []) if together else (waiting[-1:], waiting[:-1])
        enumerator = rng([tape for _, tape in now])
        outputs = case.run([row for row, _ in now], enumerator)
        for (row, _), output, weight, branches in zip(
            now, outputs, enumerator.weight, enumerator.branches, strict=True
        ):
            if branches:
                waiting += [(row, tape) for tape in branches]
            else:
                distributions[row][output] += float(weight)
    return [dict(distribution) for distribution in distributions]


def target_law(target: Target, prompt: Sequence[int], sampling: Sampling, length: int) -> SequenceDistribution:
    """The distribution of a target's own output, multiplied out token by token, with no loop, no rule and no chance."""
    distribution: SequenceDistribution = {(): 1.0}
    done: SequenceDistribution = {}
    for place in range(length):
        prefixes = torch.tensor(list(distribution), dtype=torch.long).view(len(distribution), place)
        target.begin([prompt] * len(distribution), sampling, frozenset())
        given = Draft.guess(prefixes, Tree.chain(place), torch.ones_like(prefixes, dtype=torch.bool))
        rows = target.score(given).distribution(torch.full((len(distribution),), place)).dense().probs.double().numpy()
        grown: SequenceDistribution = {}
        for (prefix, weight), row in zip(distribution.items(), rows, strict=True):
            for token in np.flatnonzero(row > 0).tolist():
                (done if token in sampling.end else grown)[(*prefix, token)] = weight * float(row[token])
        distribution = grown
        if not distribution:
            break
    return done | distribution


def total_variation(one: Mapping[Outcome, float], other: Mapping[Outcome, float]) -> float:
    """Half the summed difference: 0 for the same distribution, 1 for distributions with nothing in common."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) / 2


def surprise(counts: Mapping[Outcome, int], distribution: Mapping[Outcome, float]) -> float:
    """How many standard deviations the chi-square of sampled outputs lies above what the distribution makes it: about 0
    for the right distribution, in the tens for a wrong one, infinite where something came out that cannot."""
    total = sum(counts.values())
    if any(distribution.get(key, 0.0) <= 0 for key in counts):
        return math.inf
    expected = sorted(((distribution[key] * total, counts.get(key, 0)) for key in distribution), reverse=True)
    while len(expected) > 2 and expected[-1][0] < 5:  # too rare to count alone
        (mean, seen), (mean2, seen2) = expected.pop(), expected.pop()
        expected.append((mean + mean2, seen + seen2))
        expected.sort(reverse=True)
    chi = sum((seen - mean) ** 2 / mean for mean, seen in expected)
    freedom = len(expected) - 1
    return (chi - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


def sample_output(
    case: Case, draws: int, seed: int = 0, rng: Callable[[Sequence[int]], CounterRNG] | None = None
) -> list[dict[Outcome, int]]:
    """Output counts of each prompt over many independently seeded rows, all in one batch; `rng` makes the random
    generator of their seeds."""
    rows = [row for row in range(len(case.prompts)) for _ in range(draws)]
    counts: list[dict[Outcome, int]] = [defaultdict(int) for _ in case.prompts]
    seeds = list(itertools.islice(itertools.count(seed), len(rows)))
    for row, output in zip(rows, case.run(rows, seeds if rng is None else rng(seeds)), strict=True):
        counts[row][output] += 1
    return [dict(count) for count in counts]
