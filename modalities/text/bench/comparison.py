"""Comparison of the text benchmark's outputs with plain decoding's, and detection of loops.

In 16 bits, scoring a draft in one pass and scoring its tokens one by one round differently, so outputs can differ where
two tokens are about equally likely. Such an output counts as a near-tie if each of its tokens, teacher-forced, is the
likeliest or nearly so; any other difference is reported as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from outrider.core.bench.runner import PLAIN, Bench, Contender, Item, Run, Same
from outrider.core.constraint import Constraint, PathMasks
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.kernels.bit_mask import masked
from outrider.core.methods import RULES
from outrider.core.protocol import Target
from outrider.core.tree import Tree
from outrider.text.model import TextModel
from outrider.text.options import Options

if TYPE_CHECKING:
    from outrider.text.bench.run import Settings

NEAR = {
    "float64": 1e-9,
    "float32": 1e-3,
}  # largest logit gap of a near-tie, by dtype; for 16 bits and fewer _NEAR
_NEAR = 0.5
_GRAM, _DISTINCT = 4, 0.7  # an output with a smaller share of distinct 4-grams counts as looping
_LOGITS = 1 << 23  # logits computed at once in teacher-forcing


def distinct(tokens: Sequence[int]) -> float:
    """Return the share of distinct 4-grams of an output, 1 if it has none."""
    grams = list(zip(*(tokens[start:] for start in range(_GRAM)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def loops(tokens: Sequence[int]) -> bool:
    return distinct(tokens) < _DISTINCT


def gaps(
    target: Target, prompt: Sequence[int], tokens: Sequence[int], constraint: Constraint | None = None
) -> list[float]:
    """Return how far each token's logit is below the largest one that the constraint allows."""
    return ratings(target, prompt, tokens, constraint)[0]


@torch.no_grad()
def ratings(
    target: Target, prompt: Sequence[int], tokens: Sequence[int], constraint: Constraint | None = None
) -> tuple[list[float], list[float]]:
    """Return how far each token's logit is below the largest one that the constraint allows, and its log-probability,
    with all tokens scored in one pass."""
    if not tokens:
        return [], []
    size, masks = len(tokens) - 1, None if constraint is None else PathMasks.of(constraint, [prompt])
    guess = torch.tensor([tokens[:-1]], dtype=torch.long, device=target.device)
    target.begin([prompt], Sampling(temperature=0), frozenset())
    try:
        draft = Draft.guess(guess, Tree.chain(size, target.device), torch.ones_like(guess, dtype=torch.bool))
        scores = target.score(draft)
        gaps_so_far, log_probs = list[float](), list[float]()
        chunk = max(_LOGITS // target.vocabulary, 1)
        for start in range(0, size + 1, chunk):
            rows = torch.arange(start, min(start + chunk, size + 1), device=target.device)[None]
            logits = scores.logits(rows)[0]
            if masks is not None:
                bits = masks.bits([[tokens[:place] for place in rows[0].tolist()]], target.vocabulary)[0]
                logits = masked(logits, bits.to(logits.device))
            logits = logits.double()
            chosen = torch.tensor(tokens[start : start + chunk], device=target.device)
            own = logits.gather(-1, chosen[:, None])[:, 0]
            gaps_so_far += (logits.amax(-1) - own).tolist()
            log_probs += (own - logits.logsumexp(-1)).tolist()
        return gaps_so_far, log_probs
    finally:
        target.end()


def near_tie(dtype: str) -> float:
    """The largest gap between the logits of two tokens that rounding may exchange."""
    return NEAR.get(dtype, _NEAR)


def compare(
    plain: Sequence[int], tokens: Sequence[int], *, worst: Callable[[Sequence[int]], float], near: float, end: set[int]
) -> Same:
    """Compare a greedy lossless output with plain decoding's. A truncated output, or one that continues after an end
    token, is never a near-tie."""
    if list(plain) == list(tokens):
        return "same"
    short = min(len(plain), len(tokens))
    if list(plain[:short]) == list(tokens[:short]) or end & set(tokens[:-1]):
        return "wrong"
    return "near" if worst(tokens) <= near else "wrong"


class Judge:
    """Compares complete outputs, scoring them with the target."""

    def __init__(self, lm: TextModel, settings: Settings) -> None:
        self.lm, self.settings = lm, settings
        self.near = near_tie(lm.dtype)
        self._rated: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}
        self._target: Target | None = None
        self._relaxed = not all(RULES[name].lossless for name in settings.rules)

    def worst(self, item: Item, tokens: Sequence[int]) -> float:
        """Return the largest logit gap of an output."""
        return self._ratings(item, tokens)[0]

    def _ratings(self, item: Item, tokens: Sequence[int]) -> tuple[float, float]:
        """The largest logit gap of an output, and the negative log-likelihood of all its tokens."""
        key = item.id, tuple(tokens)
        if key not in self._rated:
            self._target = self._target or self.lm.target()
            sampling = self.lm.sampling(Options.of(self.settings.format_of(item)), self._target.vocabulary)
            found, log_probs = ratings(self._target, self.lm.encode(item.content), tokens, sampling.constraint)
            self._rated[key] = max(found, default=0.0), -sum(log_probs)
        return self._rated[key]

    def same(self, bench: Bench, contender: Contender) -> dict[str, Same] | None:
        """Compare a contender's outputs with plain decoding's, by item; None if they need not be equal."""
        greedy = self.settings.temperature == 0
        if not greedy and not RULES[contender.rule].same_tokens:
            return None
        plain, end = bench.first(PLAIN), set(self.lm.end)
        result: dict[str, Same] = {}
        for name, run in bench.first(contender.name).items():
            if name not in plain:
                continue
            base, tokens = plain[name].outcome.tokens, run.outcome.tokens
            if greedy and contender.lossless and contender.engine == bench.contenders[0].engine:
                worst = partial(self.worst, run.item)
                result[name] = compare(base, tokens, worst=worst, near=self.near, end=end)
            else:
                result[name] = "same" if base == tokens else "other"
        return result

    def quality(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Return statistics of a row's outputs; `worst_gap` is only given for greedy decoding, and `nll` (nats per
        token) beside relaxed rules."""
        outputs = {run.item.id: run for run in reversed(runs)}.values()
        if not outputs:
            return {}
        statistics: dict[str, Any] = {
            "distinct_4": mean(distinct(run.outcome.tokens) for run in outputs),
            "looping": mean(loops(run.outcome.tokens) for run in outputs),
        }
        if self.settings.temperature == 0 and all(run.outcome.steps for run in runs):
            statistics["worst_gap"] = max(self.worst(run.item, run.outcome.tokens) for run in outputs)
        if self._relaxed:
            tokens = sum(len(run.outcome.tokens) for run in outputs)
            nll = sum(self._ratings(run.item, run.outcome.tokens)[1] for run in outputs)
            statistics["nll"] = nll / max(tokens, 1)
        return statistics
