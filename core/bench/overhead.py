"""Measures the overhead of the decoding loop, without model passes, on a vocabulary of realistic size.

The target's logits come from a precomputed bank, so that scoring takes almost no time; the trace's times are then those
of drafts, distributions, rule, commit and trace. Needs no real model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from statistics import median

import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import DraftModel, SampledTree, TopKTree
from outrider.core.protocol import Drafter, Prefill, Prompts, Scores, committed
from outrider.core.rules.exact import Exact
from outrider.core.step_recorder import Record

TREE = (-1, -1, -1, -1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 10, 10)  # 16 nodes, 5 deep


class Bank:
    """A target whose logits depend only on the position, and are as peaked as a language model's."""

    rollback = True
    weight_bytes = 0

    def __init__(self, logits: Tensor) -> None:
        self.vocabulary, self.device = logits.shape[1], torch.device("cpu")
        self._bank = logits  # [positions, V], used cyclically

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts])
        return Prefill()

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        first = 0 if since is None else since + 1
        offsets = torch.nn.functional.pad(draft.offsets, (1, 0))[:, first:]
        rows = (self._lengths[:, None] + offsets) % len(self._bank)
        logits = self._bank.index_select(0, rows.flatten()).view(*rows.shape, self.vocabulary)
        return Scores(draft, self._pipeline, self._lengths, logits, first=first)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        self._lengths = self._lengths + count
        self._pipeline.commit(committed(draft, verdict, count))

    def mark(self) -> object:
        return self._lengths

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, Tensor)
        self._lengths = mark

    def end(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True)
class Overhead:
    """Median milliseconds per step; `loop` is rule and rest together."""

    draft: str
    sampling: str
    drafting: float
    scoring: float
    loop: float
    loop_untraced: float
    accepted: float


def measure_loop(vocabulary: int = 49_152, steps: int = 200) -> list[Overhead]:
    """The overhead for one row and 16-node drafts, per kind of draft and sampling; traced and untraced runs
    alternate."""
    ranks = torch.rand(64, vocabulary, generator=torch.Generator().manual_seed(0)).argsort(-1)
    logits = -1.6 * torch.log1p(ranks.float())  # Zipf's distribution: a perplexity of about 8
    flatter = 0.8 * logits
    drafters: dict[str, Callable[[], Drafter]] = {
        "fixed tree": lambda: TopKTree(Bank(flatter), tree=TREE),
        "drawn tree": lambda: SampledTree(Bank(flatter), tree=TREE),
        "drawn chain": lambda: DraftModel(Bank(flatter), length=16),
    }
    samplings = {"T=0": Sampling(temperature=0), "T=1": Sampling(), "top-p 0.9": Sampling(top_p=0.9)}
    results = []
    for kind, make in drafters.items():
        for name, sampling in samplings.items():
            runs = [
                decode(
                    Bank(logits), make(), Exact(), [[1]], sampling=sampling, max_new_tokens=10**9, seed=1, record=record
                )
                for record in (Record(), Record(nodes=False))
            ]
            traced, untraced = zip(*islice(zip(*runs, strict=True), steps // 10, steps), strict=True)
            results.append(
                Overhead(
                    kind,
                    name,
                    1e3 * median(step.times.draft for step in traced),
                    1e3 * median(step.times.score for step in traced),
                    1e3 * median(step.times.rule + step.times.rest for step in traced),
                    1e3 * median(step.times.rule + step.times.rest for step in untraced),
                    sum(step.accepted for step in traced) / len(traced),
                )
            )
    return results
