"""Which sublayers a model can do without: searches for sets of them, by how much of the model's own text each set would
have guessed.

`search` is Draft & Verify's Bayesian optimisation beforehand (arXiv 2309.08168), by Optuna; a `LayerSearch` is one
row of SWIFT's search on the running text (arXiv 2410.06916). Knows names of sublayers and token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from outrider.core.cost.theory import speedup
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.errors import Incompatible, InvalidOption, OutriderError
from outrider.core.protocol import Prefill, Prompts, SelfDraftable, Target
from outrider.core.rules.exact import Exact

GREEDY = Sampling(temperature=0)
_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the sublayers, left out to begin with


def self_draftable(prefill: Prefill, name: str) -> SelfDraftable:
    """The target, if it has views of itself."""
    if prefill.self_draftable is None:
        raise Incompatible(
            f"the drafter '{name}' drafts with the target's own layers, and this target can't skip layers (it is a "
            "transformers model); take a model of Llama's or Qwen's family, or another drafter"
        )
    return prefill.self_draftable


@dataclass(frozen=True)
class Found:
    """A set of sublayers, and what leaving it out was predicted to do on the samples."""

    skip: tuple[str, ...]
    acceptance: float  # share of tokens that the view would have guessed
    cost: float  # of a pass of the view, in passes of the whole
    length: int  # the draft length at which that pays most
    speedup: float

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Found:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            numbers = {name: float(data[name]) for name in ("acceptance", "cost", "speedup")}
            return cls(tuple(str(one) for one in data["skip"]), length=int(data["length"]), **numbers)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidOption(
                f"{path} holds no skipped sublayers ({type(error).__name__}); give a file that Found.save wrote"
            ) from None


def search(
    target: Target, prompts: Prompts, *, tokens: int = 64, trials: int = 100, seed: int = 0, max_length: int = 12
) -> Iterator[Found]:
    """Draft & Verify's Bayesian optimisation, by Optuna: which sublayers to leave out. Yields the best set so far after
    each trial. Where the paper times each set on samples, ours has each set guess the target's own greedy answers in
    one pass and predicts the speedup from that and from the bytes it reads, so that a seed finds the same set again. It
    begins with few sublayers to many of those that change least what passes through them: of sets at random most guess
    nothing right in a small model, and then it is the least of a drafter that looks best."""
    optuna = searcher()
    texts = [list(prompt) for prompt in prompts]
    for step in decode(target, None, Exact(), prompts, sampling=GREEDY, max_new_tokens=tokens):
        texts[step.row] += step.emitted
    counts = [len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)]
    whole = self_draftable(target.begin(texts, GREEDY, frozenset()), "draft-verify")
    best: Found | None = None
    try:
        starts = list(_starts(whole, texts, tokens))
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=2 * len(starts))
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for start in starts:
            study.enqueue_trial({name: name in start for name in whole.sublayers})
        for _ in range(trials):
            trial = study.ask()
            skip = [name for name in whole.sublayers if trial.suggest_categorical(name, [False, True])]
            view = whole.view(skip=skip)
            view.begin(texts, GREEDY, frozenset())
            rate = agreement(view.recall(texts, max(counts)), texts, counts).sum() / sum(counts)
            cost = view.weight_bytes / max(whole.weight_bytes, 1)
            gains = {length: speedup(float(rate), length, cost) for length in range(1, max_length + 1)}
            length = max(gains, key=lambda one: gains[one])
            study.tell(trial, gains[length])
            if best is None or gains[length] > best.speedup:
                best = Found(tuple(skip), float(rate), cost, length, gains[length])
            yield best
    finally:
        target.end()


def _starts(whole: SelfDraftable, texts: Prompts, tokens: int) -> Iterator[set[str]]:
    """Sets to begin with: every third sublayer, as in the paper, and those most alike before and behind."""
    middle = inner(whole.sublayers)
    yield set(middle[::3])
    alike = dict(zip(whole.sublayers, whole.likeness(texts, tokens).mean(0).tolist(), strict=True))
    order = sorted(middle, key=lambda name: -alike[name])
    for share in _SHARES:
        yield set(order[: max(round(share * len(order)), 1)])


def agreement(logits: Tensor, texts: Prompts, counts: Sequence[int]) -> np.ndarray:
    """[B] how many of the last counts[b] tokens of each text are what logits [B, count, V] say is likeliest."""
    said = logits.argmax(-1).tolist()
    most = logits.shape[1]
    found = []
    for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
        there = min(most, len(text) - 1)
        wanted = min(count, there)
        pairs = zip(said[row][there - wanted : there], text[len(text) - wanted :], strict=True)
        found.append(sum(one == other for one, other in pairs))
    return np.array(found)


def searcher() -> Any:
    """Optuna, which only those who search need."""
    try:
        import optuna
    except ImportError:
        raise OutriderError("searching for layers to skip needs Optuna: pip install 'outrider[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def inner(names: Sequence[str]) -> Sequence[str]:
    """All but the first and the last layer's, where there are more than two: those are never worth leaving out."""
    return names[2:-2] if len(names) > 4 else names


class LayerSearch:
    """One row's search: which sets were tried, and how much of the row's own text each would have guessed."""

    def __init__(self, names: Sequence[str], count: int, bayes_interval: int, seed: int) -> None:
        self.names, self.count, self.bayes_interval = names, count, bayes_interval
        self.random = np.random.default_rng(seed)
        self.tried: list[tuple[np.ndarray, float]] = []
        self.best, self.match = self._set(np.arange(len(names)) % 2 + np.arange(len(names)) / (2 * len(names))), -1.0
        self.study: Any = None
        if bayes_interval:
            optuna = searcher()
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)
            self.study = optuna.create_study(direction="maximize", sampler=sampler)
            self.space = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in names}
            self.trial = optuna.trial.create_trial

    def _set(self, weights: np.ndarray) -> frozenset[str]:
        """The sublayers that weigh most."""
        return frozenset(self.names[place] for place in np.argsort(-weights, kind="stable")[: self.count])

    def suggest(self) -> frozenset[str]:
        """The first guess, then random ones, every so often one of the optimiser's."""
        number = len(self.tried)
        if not number:
            self.weights = np.array([float(name in self.best) for name in self.names])
        elif self.bayes_interval and number % self.bayes_interval == 0:
            asked = self.study.ask(self.space)
            self.weights = np.array([asked.params[name] for name in self.names])
        else:
            self.weights = self.random.random(len(self.names))
        return self._set(self.weights)

    def tell(self, match: float) -> None:
        self.tried.append((self.weights, match))
        if self.bayes_interval:
            params = dict(zip(self.names, self.weights.tolist(), strict=True))
            self.study.add_trial(self.trial(params=params, distributions=self.space, value=match))
        if match > self.match:
            self.best, self.match = self._set(self.weights), match
