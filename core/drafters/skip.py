"""The target drafts for itself with some of its sublayers left out: nothing to train, and one cache for both.

Which ones is where the three methods differ: Draft & Verify (arXiv 2309.08168) has a fixed set, found beforehand by
Bayesian optimisation; SWIFT (arXiv 2410.06916) searches on the running text; Draft on the Fly (arXiv 2410.01028) takes
the sublayers that change least, measured on the prompt. Knows names of sublayers, laws and token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.device import upload
from outrider.core.dice import Dice
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.model import DraftModel, DynamicTree
from outrider.core.errors import Incompatible, InvalidOption, OutriderError
from outrider.core.laws import Lawmaker, Sampling
from outrider.core.policies import Confidence, DraftExit
from outrider.core.rules.exact import Exact
from outrider.core.speed import speedup
from outrider.core.target import Itself, Prefill, Prompts, Scores, Target, View, committed

_LIKENESS = 64  # tokens of the prompt that likeness is measured on
_GREEDY = Sampling(temperature=0)


def itself(prefill: Prefill, who: str) -> Itself:
    """The target, to be seen cheaper."""
    if prefill.itself is None:
        raise Incompatible(
            f"the drafter '{who}' drafts with the target's own layers, and this target can't be seen without some of "
            "them (it runs on code of others); take a model of Llama's or Qwen's family, or another drafter"
        )
    return prefill.itself


class Skipping:
    """A target seen without some sublayers, each row without its own: as many views as there are different sets."""

    rollback = True

    def __init__(self, whole: Itself, vocabulary: int, device: torch.device) -> None:
        self.whole, self.vocabulary, self.device = whole, vocabulary, device
        self.weight_bytes = 0
        self._views: dict[frozenset[str], View] = {}

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._lawmaker = Lawmaker(sampling, prompts, self.vocabulary, self.device)
        self._prompts = prompts
        self.skip([frozenset()] * len(prompts))
        return Prefill()

    def skip(self, sets: Sequence[frozenset[str]]) -> None:
        """What each row leaves out from now on."""
        different = list(dict.fromkeys(sets))
        self._views = {one: self._views.get(one) or self.seen(one) for one in different}
        self.weight_bytes = sum(view.weight_bytes for view in self._views.values())
        self._which = upload([different.index(one) for one in sets], self.device)

    def seen(self, skipped: Collection[str]) -> View:
        """One view, for all rows."""
        view = self.whole.view(skip=skipped)
        view.begin(self._prompts, _GREEDY, frozenset())
        return view

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        every = [view.score(draft, since) for view in self._views.values()]
        logits = every[0].logits()
        if len(every) > 1:
            rows = torch.arange(draft.rows, device=self.device)
            logits = torch.stack([one.logits() for one in every])[self._which, rows]
        return Scores(draft, self._lawmaker, every[0].lengths, logits, first=every[0].first)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        for view in self._views.values():
            view.keep(draft, verdict, count)
        self._lawmaker.commit(committed(draft, verdict, count))

    def mark(self) -> object:
        return [view.mark() for view in self._views.values()]

    def rewind(self, mark: object) -> None:
        """Within one step: what penalties remember has not moved."""
        assert isinstance(mark, list)
        for view, one in zip(self._views.values(), mark, strict=True):
            view.rewind(one)

    def end(self) -> None:
        for view in self._views.values():
            view.end()


class Chooser(Protocol):
    """Says what each row leaves out; asked again before every step."""

    bytes_read: int  # of weights, in looking

    def begin(self, whole: Itself, model: Skipping, prompts: Prompts) -> list[frozenset[str]]: ...
    def again(self, open_: Sequence[bool]) -> list[frozenset[str]] | None: ...  # None: as before
    def learn(self, emitted: Sequence[Sequence[int]]) -> None: ...


class SelfDrafter:
    """A drafter over the target's own layers, of which a chooser leaves some out; `make` puts a chain or a tree on top,
    once the target is known."""

    vocabulary: int | None = None
    needs: frozenset[str] = frozenset()

    def __init__(self, name: str, make: Callable[[Target], DraftModel | DynamicTree], chooser: Chooser) -> None:
        self.name, self.make, self.chooser = name, make, chooser
        self._read = 0
        self._inner: DraftModel | DynamicTree | None = None

    @property
    def bytes_read(self) -> int:
        return self._read + self.chooser.bytes_read + (self._inner.bytes_read if self._inner else 0)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._read += self._inner.bytes_read if self._inner else 0
        whole = itself(prefill, self.name)
        plain = whole.view()
        self._model = Skipping(whole, plain.vocabulary, plain.device)
        self._inner = self.make(self._model)
        self._inner.begin(prefill, prompts, sampling)
        self._model.skip(self.chooser.begin(whole, self._model, prompts))

    def propose(self, room: Tensor, dice: Dice) -> Draft:
        assert self._inner is not None
        sets = self.chooser.again((room >= 0).tolist())
        if sets is not None:
            self._model.skip(sets)
        return self._inner.propose(room, dice)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, dice: Dice) -> None:
        assert self._inner is not None
        self._inner.observe(draft, scores, verdict, dice)
        self.chooser.learn(verdict.rows(draft))

    def end(self) -> None:
        if self._inner is not None:
            self._inner.end()


def check(skip: Collection[str], known: Sequence[str]) -> frozenset[str]:
    """Names of sublayers, refused where there are none such."""
    for name in skip:
        if name not in known:
            raise InvalidOption(f"there is no sublayer '{name}' to skip; they go from {known[0]} to {known[-1]}")
    return frozenset(skip)


def few(share: float, names: Sequence[str]) -> int:
    """How many sublayers a share of them is: one at least, and never all."""
    return max(min(round(share * len(names)), len(names) - 1), 1)


# ---- Draft & Verify: a set found beforehand


@dataclass
class Given:
    """The same sublayers in every row."""

    skip: frozenset[str]
    bytes_read: int = 0

    def begin(self, whole: Itself, model: Skipping, prompts: Prompts) -> list[frozenset[str]]:
        return [check(self.skip, whole.sublayers)] * len(prompts)

    def again(self, open_: Sequence[bool]) -> None:
        return None

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        """It was found beforehand."""


def draft_verify(
    skip: Collection[str] | str | Path | Found, *, length: int = 12, bound: float = 0.6, wanted: float = 0.85
) -> SelfDrafter:
    """A fixed set of skipped sublayers: their names, or what `search` found, as it is or as the file it was saved to.
    Drafting stops where the view is unsure, by a bound that follows the acceptance towards `wanted`. Where the paper
    looks at the probability of the token already drawn, ours looks at the law before the draw."""
    if isinstance(skip, Path) or (isinstance(skip, str) and skip.endswith(".json")):
        skip = Found.load(Path(skip))
    if isinstance(skip, str):
        skip = [one.strip() for one in skip.split(",") if one.strip()]
    names = skip.skip if isinstance(skip, Found) else tuple(skip)
    policy = DraftExit(length, bound, wanted)
    return SelfDrafter("draft-verify", lambda model: DraftModel(model, policy=policy), Given(frozenset(names)))


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
    target: Target, prompts: Prompts, *, tokens: int = 64, trials: int = 100, seed: int = 0, longest: int = 12
) -> Iterator[Found]:
    """Draft & Verify's Bayesian optimisation, by Optuna: which sublayers to leave out. Yields the best set so far after
    each trial. Where the paper times each set on samples, ours has each set guess the target's own greedy answers in
    one pass and predicts the speedup from that and from the bytes it reads, so that a seed finds the same set again."""
    optuna = searcher()
    texts = [list(prompt) for prompt in prompts]
    for step in decode(target, None, Exact(), prompts, sampling=_GREEDY, limit=tokens):
        texts[step.row] += step.emitted
    counts = [len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)]
    whole = itself(target.begin(texts, _GREEDY, frozenset()), "draft-verify")
    best: Found | None = None
    try:
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        for number in range(trials):
            if not number:
                middle = set(_inner(whole.sublayers)[::3])
                study.enqueue_trial({name: name in middle for name in whole.sublayers})
            trial = study.ask()
            skip = [name for name in whole.sublayers if trial.suggest_categorical(name, [False, True])]
            view = whole.view(skip=skip)
            view.begin(texts, _GREEDY, frozenset())
            rate = agreement(view.recall(texts, max(counts)), texts, counts).sum() / sum(counts)
            cost = view.weight_bytes / max(whole.weight_bytes, 1)
            gains = {length: speedup(float(rate), length, cost) for length in range(1, longest + 1)}
            length = max(gains, key=lambda one: gains[one])
            study.tell(trial, gains[length])
            if best is None or gains[length] > best.speedup:
                best = Found(tuple(skip), float(rate), cost, length, gains[length])
            yield best
    finally:
        target.end()


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


def _inner(names: Sequence[str]) -> Sequence[str]:
    """All but the first and the last layer's, where there are more than two: those are never worth leaving out."""
    return names[2:-2] if len(names) > 4 else names


# ---- SWIFT: a set found on the way


class _Quest:
    """One row's search: which sets were tried, and how much of the row's own text each would have guessed."""

    def __init__(self, names: Sequence[str], count: int, bayes: int, seed: int) -> None:
        self.names, self.count, self.bayes = names, count, bayes
        self.random = np.random.default_rng(seed)
        self.tried: list[tuple[np.ndarray, float]] = []
        self.best, self.match = self._set(np.arange(len(names)) % 2 + np.arange(len(names)) / (2 * len(names))), -1.0
        self.study: Any = None
        if bayes:
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
        elif self.bayes and number % self.bayes == 0:
            asked = self.study.ask(self.space)
            self.weights = np.array([asked.params[name] for name in self.names])
        else:
            self.weights = self.random.random(len(self.names))
        return self._set(self.weights)

    def tell(self, match: float) -> None:
        self.tried.append((self.weights, match))
        if self.bayes:
            params = dict(zip(self.names, self.weights.tolist(), strict=True))
            self.study.add_trial(self.trial(params=params, distributions=self.space, value=match))
        if match > self.match:
            self.best, self.match = self._set(self.weights), match


@dataclass
class Stream:
    """SWIFT's search: every step, one more set has a go at the last tokens of the row's own output, in one pass; when
    one guesses enough of them, or after so many, the best is kept."""

    share: float
    window: int
    trials: int
    enough: float
    bayes: int
    seed: int
    bytes_read: int = 0

    def begin(self, whole: Itself, model: Skipping, prompts: Prompts) -> list[frozenset[str]]:
        self._model, self._starts = model, [len(prompt) for prompt in prompts]
        self._texts = [list(prompt) for prompt in prompts]
        names = _inner(whole.sublayers)
        self.quests = [_Quest(names, few(self.share, names), self.bayes, self.seed) for _ in prompts]
        return [quest.best for quest in self.quests]

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        for text, tokens in zip(self._texts, emitted, strict=True):
            text += tokens

    def again(self, open_: Sequence[bool]) -> list[frozenset[str]] | None:
        counts = [
            min(len(text) - start, self.window) * (going and self._seeking(quest))
            for text, start, going, quest in zip(self._texts, self._starts, open_, self.quests, strict=True)
        ]
        if not any(counts):
            return None
        texts = [text if going else text[:1] for text, going in zip(self._texts, open_, strict=True)]
        wanted = {row: self.quests[row].suggest() for row, count in enumerate(counts) if count}
        for one in dict.fromkeys(wanted.values()):
            view = self._model.seen(one)
            right = agreement(view.recall(texts, self.window), texts, counts)
            self.bytes_read += view.weight_bytes
            for row in (row for row, suggested in wanted.items() if suggested == one):
                self.quests[row].tell(right[row] / counts[row])
        return [quest.best for quest in self.quests]

    def _seeking(self, quest: _Quest) -> bool:
        return len(quest.tried) < self.trials and quest.match < self.enough


def swift(
    *,
    share: float = 0.45,
    window: int = 32,
    trials: int = 64,
    enough: float = 0.95,
    bayes: int = 8,
    nodes: int = 12,
    width: int = 3,
    depth: int = 6,
    least: float = 0.2,
    seed: int = 0,
) -> SelfDrafter:
    """A `share` of the sublayers is skipped; which, is searched for on the running text: at random, and every
    `bayes`-th time (0: never) where Optuna thinks best. The draft is a tree that is cut where the view is unsure: no
    node thought less than `least` likely. The first and the last layer are kept. Ours scores one set a step in a pass
    of its own, on up to `window` of the row's last tokens, and counts that pass."""
    if not 0 < share < 1 or min(window, trials) < 1 or bayes < 0:
        raise InvalidOption(
            f"share={share}, window={window}, trials={trials}, bayes={bayes}: share must be between 0 and 1, window "
            "and trials 1 or more, bayes 0 or more"
        )
    return SelfDrafter(
        "swift",
        lambda model: DynamicTree(model, nodes=nodes, width=width, depth=depth, least=least),
        Stream(share, window, trials, enough, bayes, seed),
    )


# ---- Draft on the Fly: a set read off the prompt


@dataclass
class Alike:
    """What changes least when the prompt is read."""

    share: float
    least: float
    parts: tuple[str, ...]
    bytes_read: int = 0

    def begin(self, whole: Itself, model: Skipping, prompts: Prompts) -> list[frozenset[str]]:
        names = [name for name in _inner(whole.sublayers) if name.split(".")[0] in self.parts]
        places = [whole.sublayers.index(name) for name in names]
        alike = whole.likeness(prompts, _LIKENESS)[:, places].double().tolist()
        self.bytes_read += whole.weight_bytes
        found = []
        for row in alike:
            order = sorted(range(len(names)), key=lambda place: (-row[place], place))[: few(self.share, names)]
            found.append(frozenset(names[place] for place in order if row[place] >= self.least))
        return found

    def again(self, open_: Sequence[bool]) -> None:
        return None

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        """The prompt has said it all."""


def draft_on_the_fly(
    *,
    share: float = 0.35,
    least: float = 0.0,
    parts: Collection[str] = ("attention", "mlp"),
    length: int = 6,
    bound: float = 0.4,
) -> SelfDrafter:
    """Of each row, the `share` of sublayers whose input and output are most alike by cosine on its own prompt, no less
    than `least`; `parts` says which kinds may go. The paper drops whole attention layers by thresholds found for each
    model; ours ranks sublayers, so that one setting serves any model. Drafting stops where the view is unsure."""
    if not 0 < share < 1 or not parts or not set(parts) <= {"attention", "mlp"}:
        raise InvalidOption(
            f"share={share}, parts={tuple(parts)}: share must be between 0 and 1, parts from attention and mlp"
        )
    return SelfDrafter(
        "draft-on-the-fly",
        lambda model: DraftModel(model, policy=Confidence(length, bound)),
        Alike(share, least, tuple(parts)),
    )
