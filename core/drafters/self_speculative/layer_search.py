"""Searches for the sublayers that a model can skip while drafting, by how many tokens of the model's own text it still
predicts without them.

`search` is Draft & Verify's Bayesian optimisation (arXiv 2309.08168), with Optuna; a `LayerSearch` is one row of
SWIFT's search during decoding (arXiv 2410.06916), a branch of the model's own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from outrider.core.assets.files import write_atomically
from outrider.core.cost.theory import speedup
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.errors import Incompatible, InvalidOption, OutriderError, install_command
from outrider.core.protocol import Prefill, Prompts, SelfDraftable, Target
from outrider.core.rules.exact import Exact

GREEDY = Sampling(temperature=0)
_FIRST_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the sublayers, skipped in the first trials


def self_draftable(prefill: Prefill, name: str) -> SelfDraftable:
    """The target's self-drafting interface; raises Incompatible if it has none."""
    if prefill.self_draftable is None:
        raise Incompatible(
            f"{name} drafts with the target's own layers, and this target can't skip layers (it is a "
            "transformers model); use one that our own decoder runs (Llama, Qwen, Mistral, Gemma, ...), or "
            "another drafter"
        )
    return prefill.self_draftable


@dataclass(frozen=True)
class SkipSet:
    """A set of sublayers to skip, and its predicted performance on the samples."""

    skip: tuple[str, ...]
    acceptance: float  # share of the samples' tokens that the reduced model predicts
    cost: float  # of a pass of the reduced model, in target passes
    length: int  # the best draft length
    speedup: float

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> SkipSet:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            numbers = {name: float(data[name]) for name in ("acceptance", "cost", "speedup")}
            return cls(tuple(str(name) for name in data["skip"]), length=int(data["length"]), **numbers)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidOption(
                f"{path} is not a saved search result ({type(error).__name__}); give a file that SkipSet.save wrote"
            ) from None


def search(
    target: Target, prompts: Prompts, *, tokens: int = 64, trials: int = 100, seed: int = 0, max_length: int = 12
) -> Iterator[SkipSet]:
    """Draft & Verify's Bayesian optimisation of the skipped sublayers; yields the best set after each trial. The paper
    times each set on samples. Ours has each set predict the target's own greedy answers in one pass, and predicts the
    speedup from its accuracy and its bytes read, so that results are reproducible. The first trials skip the sublayers
    that change their input least: in small models most random sets predict nothing."""
    optuna = searcher()
    texts = [list(prompt) for prompt in prompts]
    for step in decode(target, None, Exact(), prompts, sampling=GREEDY, max_new_tokens=tokens):
        texts[step.row] += step.emitted
    counts = [len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)]
    whole = self_draftable(target.begin(texts, GREEDY, frozenset()), "Draft & Verify")
    best: SkipSet | None = None
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
            speedups = {length: speedup(float(rate), length, cost) for length in range(1, max_length + 1)}
            length = max(speedups, key=speedups.__getitem__)
            study.tell(trial, speedups[length])
            if best is None or speedups[length] > best.speedup:
                best = SkipSet(tuple(skip), float(rate), cost, length, speedups[length])
            yield best
    finally:
        target.end()


def _starts(whole: SelfDraftable, texts: Prompts, tokens: int) -> Iterator[set[str]]:
    """The first sets to try: every third sublayer, as in the paper, and those whose input and output are most alike."""
    middle = inner(whole.sublayers)
    yield set(middle[::3])
    similarity = dict(zip(whole.sublayers, whole.similarity(texts, tokens).mean(0).tolist(), strict=True))
    order = sorted(middle, key=lambda name: -similarity[name])
    for share in _FIRST_SHARES:
        yield set(order[: max(round(share * len(order)), 1)])


def agreement(logits: Tensor, texts: Prompts, counts: Sequence[int]) -> np.ndarray:
    """[B] how many of the last counts[b] tokens of each text are the likeliest by logits [B, T, V], which predict the
    texts' last T tokens."""
    predicted = logits.argmax(-1).tolist()
    matches = []
    for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
        end = min(logits.shape[1], len(text) - 1)  # shorter texts have their logits first
        compared = min(count, end)
        pairs = zip(predicted[row][end - compared : end], text[len(text) - compared :], strict=True)
        matches.append(sum(guess == token for guess, token in pairs))
    return np.array(matches)


def searcher() -> Any:
    """The optuna module, an optional dependency."""
    try:
        import optuna
    except ImportError:
        raise OutriderError(f"searching for layers to skip needs Optuna: {install_command('search')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def inner(names: Sequence[str]) -> Sequence[str]:
    """The sublayers without those of the first and the last layer, which are never worth skipping; all of them if there
    are only two layers."""
    return names[2:-2] if len(names) > 4 else names


@dataclass(frozen=True)
class SearchSettings:
    """SWIFT's search: `count` sublayers are skipped; every `bayes_interval`-th set (0: none) is Optuna's, the others
    are random. It ends with a set that predicts more than a share `enough`, after `patience` sets in a row that were no
    better, or after `trials` sets."""

    count: int
    bayes_interval: int
    enough: float
    patience: int
    trials: int
    seed: int


class LayerSearch:
    """A search: the sets tried, and how many of a text's tokens each predicted. One belongs to a model and is kept with
    it; each row of a generation continues a branch of it, so that rows don't depend on each other, and the branches are
    merged into it when the generation ends."""

    def __init__(self, names: Sequence[str], settings: SearchSettings) -> None:
        self.names, self.settings = names, settings
        self.tried: list[tuple[np.ndarray, float]] = []
        self.first = 0  # of the sets tried in this branch
        self.stale = 0  # sets in a row that were no better than the best
        uniform = np.arange(len(names)) % 2 + np.arange(len(names)) / (2 * len(names))
        self.best, self.match = self._set(uniform), -1.0
        self.random = np.random.default_rng(settings.seed)
        self._study: Any = None
        self._known = 0  # sets that Optuna knows

    def branch(self) -> LayerSearch:
        """A copy to continue, which draws other sets than earlier ones did."""
        made = copy.copy(self)
        made.tried, made.first, made._study = list(self.tried), len(self.tried), None
        made._known = 0
        made.random = np.random.default_rng([self.settings.seed, made.first])
        return made

    def merge(self, branch: LayerSearch) -> None:
        """Add what a branch tried."""
        for weights, match in branch.tried[branch.first :]:
            self._add(weights, match)

    @property
    def ended(self) -> bool:
        settings = self.settings
        return self.match > settings.enough or self.stale >= settings.patience or len(self.tried) >= settings.trials

    def _set(self, weights: np.ndarray) -> frozenset[str]:
        """The `count` sublayers with the largest weights."""
        return frozenset(self.names[place] for place in np.argsort(-weights, kind="stable")[: self.settings.count])

    def suggest(self) -> frozenset[str]:
        """The next set to try: first the initial one, then random ones, every `bayes_interval`-th from Optuna."""
        number, every = len(self.tried), self.settings.bayes_interval
        if not number:
            self.weights = np.array([float(name in self.best) for name in self.names])
        elif every and number % every == 0:
            self.weights = self._suggested()
        else:
            self.weights = self.random.random(len(self.names))
        return self._set(self.weights)

    def tell(self, match: float) -> None:
        """Record the share of tokens that the suggested set predicted."""
        self._add(self.weights, match)

    def _add(self, weights: np.ndarray, match: float) -> None:
        self.tried.append((weights, match))
        self.stale += 1
        if match > self.match:
            self.best, self.match, self.stale = self._set(weights), match, 0

    def _suggested(self) -> np.ndarray:
        """Optuna's suggestion from all that was tried."""
        optuna = searcher()
        if self._study is None:
            sampler = optuna.samplers.TPESampler(seed=self.settings.seed, n_startup_trials=1)
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
        space = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in self.names}
        for weights, match in self.tried[self._known :]:
            params = dict(zip(self.names, weights.tolist(), strict=True))
            self._study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=match))
        self._known = len(self.tried)
        trial = self._study.ask(space)
        return np.array([trial.params[name] for name in self.names])
