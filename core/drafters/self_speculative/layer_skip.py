"""The target drafts for itself with some of its sublayers skipped, without training and over the same cache.

The methods differ in how they choose the sublayers: Draft & Verify (arXiv 2309.08168) has a fixed set from a Bayesian
optimisation; SWIFT (arXiv 2410.06916) searches during decoding; Draft on the Fly (arXiv 2410.01028) skips those that
change their input least on the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.length_policies import Confidence, DraftExit
from outrider.core.drafters.self_speculative.confident_tree import ConfidentTree
from outrider.core.drafters.self_speculative.layer_search import (
    GREEDY,
    LayerSearch,
    SearchSettings,
    SkipSet,
    agreement,
    inner,
    self_draftable,
)
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, SelfDraftable, Target, View, committed
from outrider.core.rng import CounterRNG

_DEFAULT_LENGTH = 12
_SIMILARITY_TOKENS = 64  # tokens of the prompt on which similarity is measured


class Skipping:
    """The target without some sublayers, as a Target. Each row skips its own set; there is one view per distinct
    set."""

    rollback = True

    def __init__(self, whole: SelfDraftable, vocabulary: int, device: torch.device) -> None:
        self.whole, self.vocabulary, self.device = whole, vocabulary, device
        self.weight_bytes = 0
        self._views: dict[frozenset[str], View] = {}

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._prompts = prompts
        self.skip([frozenset()] * len(prompts))
        return Prefill()

    def skip(self, sets: Sequence[frozenset[str]]) -> None:
        """Set the sublayers that each row skips from now on."""
        distinct = list(dict.fromkeys(sets))
        self._views = {skipped: self._views.get(skipped) or self.view(skipped) for skipped in distinct}
        self.weight_bytes = sum(view.weight_bytes for view in self._views.values())
        self._which = upload([distinct.index(skipped) for skipped in sets], self.device)

    def view(self, skipped: Collection[str]) -> View:
        """A new view of all rows without these sublayers."""
        view = self.whole.view(skip=skipped)
        view.begin(self._prompts, GREEDY, frozenset())
        return view

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        by_view = [view.score(draft, since) for view in self._views.values()]
        logits = by_view[0].logits()
        if len(by_view) > 1:
            rows = torch.arange(draft.rows, device=self.device)
            logits = torch.stack([scores.logits() for scores in by_view])[self._which, rows]
        return Scores(draft, self._pipeline, by_view[0].lengths, logits, first=by_view[0].first)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        for view in self._views.values():
            view.keep(draft, verdict, count)
        self._pipeline.commit(committed(draft, verdict, count), verdict.known(count))

    def mark(self) -> object:
        return [view.mark() for view in self._views.values()]

    def rewind(self, mark: object) -> None:
        """Rewind within one round, so the logits pipeline's state (penalties) is unchanged."""
        assert isinstance(mark, list)
        for view, own in zip(self._views.values(), mark, strict=True):
            view.rewind(own)

    def end(self) -> None:
        for view in self._views.values():
            view.end()


class Chooser(Protocol):
    """Chooses the sublayers that each row skips, at the start and before every round."""

    bytes_read: int  # weights read in order to choose

    def begin(self, whole: SelfDraftable, model: Skipping, prompts: Prompts) -> list[frozenset[str]]: ...
    def update(self, open_: Sequence[bool]) -> list[frozenset[str]] | None: ...  # None: no change
    def learn(self, emitted: Sequence[Sequence[int]]) -> None: ...
    def end(self) -> None: ...


class SelfDrafter:
    """A drafter over the target without the sublayers that a chooser skips; `make` makes the chain or tree drafter once
    the target is known."""

    vocabulary: int | None = None
    needs: frozenset[str] = frozenset()

    def __init__(self, name: str, make: Callable[[Target], DraftModel | ConfidentTree], chooser: Chooser) -> None:
        self.name, self.make, self.chooser = name, make, chooser
        self._read = 0
        self._inner: DraftModel | ConfidentTree | None = None

    @property
    def bytes_read(self) -> int:
        return self._read + self.chooser.bytes_read + (self._inner.bytes_read if self._inner else 0)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._read += self._inner.bytes_read if self._inner else 0
        whole = self_draftable(prefill, self.name)
        plain = whole.view()
        self._model = Skipping(whole, plain.vocabulary, plain.device)
        self._inner = self.make(self._model)
        self._inner.begin(prefill, prompts, sampling)
        self._model.skip(self.chooser.begin(whole, self._model, prompts))

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        assert self._inner is not None
        sets = self.chooser.update((room >= 0).tolist())
        if sets is not None:
            self._model.skip(sets)
        return self._inner.propose(room, rng)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        assert self._inner is not None
        self._inner.observe(draft, scores, verdict, rng)
        self.chooser.learn(verdict.rows(draft))

    def end(self) -> None:
        if self._inner is not None:
            self._inner.end()
            self.chooser.end()


def check(skip: Collection[str], known: Sequence[str]) -> frozenset[str]:
    """The names as a set; raises InvalidOption for a name that is not a sublayer of the target."""
    for name in skip:
        if name not in known:
            raise InvalidOption(f"there is no sublayer '{name}' to skip; they go from {known[0]} to {known[-1]}")
    return frozenset(skip)


def skip_count(skip_ratio: float, names: Sequence[str]) -> int:
    """The number of sublayers to skip: at least one, never all."""
    return max(min(round(skip_ratio * len(names)), len(names) - 1), 1)


# ---- Draft & Verify: a fixed set


@dataclass
class FixedChooser:
    """The same sublayers in every row."""

    skip: frozenset[str]
    bytes_read: int = 0

    def begin(self, whole: SelfDraftable, model: Skipping, prompts: Prompts) -> list[frozenset[str]]:
        return [check(self.skip, whole.sublayers)] * len(prompts)

    def update(self, open_: Sequence[bool]) -> None:
        return None

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        """Nothing to learn."""

    def end(self) -> None:
        """Nothing to keep."""


def draft_verify(
    skip: Collection[str] | str | Path | SkipSet,
    *,
    length: int | None = None,
    threshold: float = 0.6,
    target_acceptance: float = 0.85,
) -> SelfDrafter:
    """Draft & Verify with a fixed set of skipped sublayers: their names, the result of `search`, or the file it was
    saved to. Drafting stops where the highest probability falls below a threshold, which adapts so that the acceptance
    rate approaches `target_acceptance`. The paper uses the probability of the drawn token; ours decides before the
    draw. `length` is the longest draft; default: the length that `search` found best, else the paper's 12."""
    if isinstance(skip, Path) or (isinstance(skip, str) and skip.endswith(".json")):
        skip = SkipSet.load(Path(skip))
    if isinstance(skip, str):
        skip = [name.strip() for name in skip.split(",") if name.strip()]
    names, best = (skip.skip, skip.length) if isinstance(skip, SkipSet) else (tuple(skip), _DEFAULT_LENGTH)
    policy = DraftExit(best if length is None else length, threshold, target_acceptance)
    return SelfDrafter("Draft & Verify", lambda model: DraftModel(model, policy=policy), FixedChooser(frozenset(names)))


# ---- SWIFT: a set searched for during decoding


@dataclass
class SearchChooser:
    """SWIFT's search: every round, one more set predicts the last `window` tokens of the row's own output in one pass,
    and rows use the best set so far. The search belongs to the model: the next request goes on where it stopped, and
    after its end only drafts."""

    skip_ratio: float
    window: int
    stop_agreement: float
    patience: int
    trials: int
    bayes_interval: int
    seed: int
    bytes_read: int = 0
    searches: list[LayerSearch] = field(default_factory=list)  # a branch a row

    def begin(self, whole: SelfDraftable, model: Skipping, prompts: Prompts) -> list[frozenset[str]]:
        self._model, self._starts = model, [len(prompt) for prompt in prompts]
        self._texts = [list(prompt) for prompt in prompts]
        names = inner(whole.sublayers)
        settings = SearchSettings(
            skip_count(self.skip_ratio, names),
            self.bayes_interval,
            self.stop_agreement,
            self.patience,
            self.trials,
            self.seed,
        )
        self.shared: LayerSearch = whole.kept.setdefault(("SWIFT", settings, self.window), LayerSearch(names, settings))
        with _MERGING:
            self.searches = self._unmerged = [self.shared.branch() for _ in prompts]
        return [search.best for search in self.searches]

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        for text, tokens in zip(self._texts, emitted, strict=True):
            text += tokens

    def update(self, open_: Sequence[bool]) -> list[frozenset[str]] | None:
        counts = [
            self.window * (going and len(text) - start >= self.window and not search.ended)
            for text, start, going, search in zip(self._texts, self._starts, open_, self.searches, strict=True)
        ]
        if not any(counts):
            return None
        texts = [text if going else text[:1] for text, going in zip(self._texts, open_, strict=True)]
        suggested = {row: self.searches[row].suggest() for row, count in enumerate(counts) if count}
        for skipped in dict.fromkeys(suggested.values()):
            view = self._model.view(skipped)
            right = agreement(view.recall(texts, self.window), texts, counts)
            self.bytes_read += view.weight_bytes
            for row in (row for row, sublayers in suggested.items() if sublayers == skipped):
                self.searches[row].tell(right[row] / counts[row])
        return [search.best for search in self.searches]

    def end(self) -> None:
        with _MERGING:
            for search in self._unmerged:
                self.shared.merge(search)
        self._unmerged = []


_MERGING = Lock()  # several requests may decode with one model


def swift(
    *,
    skip_ratio: float = 0.12,
    window: int = 32,
    stop_agreement: float = 0.95,
    patience: int = 300,
    trials: int = 1000,
    bayes_interval: int = 25,
    nodes: int = 24,
    depth: int = 8,
    threshold: float = 0.8,
    candidates: Sequence[int] = (3, 5, 8, 10),
    seed: int = 0,
) -> SelfDrafter:
    """SWIFT: skips a share `skip_ratio` of the sublayers, never those of the first and the last layer. Which ones is
    searched for while decoding, over as many requests as it takes: candidates are random, and every `bayes_interval`-th
    (0: none) is Optuna's suggestion. The search ends with a set that predicts more than a share `stop_agreement` of the
    last `window` tokens, after `patience` candidates in a row that were no better, or after `trials` candidates. Drafts
    are trees of at most `depth` levels and `nodes` nodes (ConfidentTree). Ours scores a candidate a round in a pass of
    its own, on the row's latest tokens (the paper: on the request's first ones), and counts that pass. The paper skips
    0.45 of the sublayers of models of 13 billion parameters; a small model has fewer to spare."""
    if not 0 < skip_ratio < 1 or min(window, trials, patience) < 1 or bayes_interval < 0:
        raise InvalidOption(
            f"skip_ratio={skip_ratio}, window={window}, patience={patience}, trials={trials}, "
            f"bayes_interval={bayes_interval}: skip_ratio must be between 0 and 1, window, patience and trials 1 or "
            "more, bayes_interval 0 or more"
        )
    return SelfDrafter(
        "SWIFT",
        lambda model: ConfidentTree(model, nodes=nodes, depth=depth, threshold=threshold, candidates=candidates),
        SearchChooser(skip_ratio, window, stop_agreement, patience, trials, bayes_interval, seed),
    )


# ---- Draft on the Fly: a set chosen on the prompt


@dataclass
class SimilarityChooser:
    """The sublayers whose output is most similar to their input on the prompt."""

    skip_ratio: float
    min_similarity: float
    parts: tuple[str, ...]
    bytes_read: int = 0

    def begin(self, whole: SelfDraftable, model: Skipping, prompts: Prompts) -> list[frozenset[str]]:
        names = [name for name in inner(whole.sublayers) if name.split(".")[0] in self.parts]
        indices = [whole.sublayers.index(name) for name in names]
        similarities = whole.similarity(prompts, _SIMILARITY_TOKENS)[:, indices].double().tolist()
        self.bytes_read += whole.weight_bytes
        count, sets = skip_count(self.skip_ratio, names), []
        for row in similarities:
            order = sorted(range(len(names)), key=lambda index: (-row[index], index))[:count]
            sets.append(frozenset(names[index] for index in order if row[index] >= self.min_similarity))
        return sets

    def update(self, open_: Sequence[bool]) -> None:
        return None

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        """Nothing to learn."""

    def end(self) -> None:
        """Nothing to keep."""


def draft_on_the_fly(
    *,
    skip_ratio: float = 0.3,
    min_similarity: float = 0.0,
    parts: Collection[str] = ("attention",),
    length: int = 4,
    threshold: float = 0.4,
) -> SelfDrafter:
    """Draft on the Fly: skips, in each row, the share `skip_ratio` of sublayers whose input and output have the highest
    cosine similarity on the row's prompt, if it reaches `min_similarity`. `parts` names the kinds that may be skipped:
    attention (the paper's), mlp, or both. The paper has a threshold per model; ours ranks sublayers, so one setting
    serves any model. Drafting stops where the highest probability falls below `threshold`."""
    if not 0 < skip_ratio < 1 or not parts or not set(parts) <= {"attention", "mlp"}:
        raise InvalidOption(
            f"skip_ratio={skip_ratio}, parts={tuple(parts)}: skip_ratio must be between 0 and 1, and parts be "
            "attention, mlp or both"
        )
    return SelfDrafter(
        "Draft on the Fly",
        lambda model: DraftModel(model, policy=Confidence(length, threshold)),
        SimilarityChooser(skip_ratio, min_similarity, tuple(parts)),
    )
