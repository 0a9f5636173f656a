"""The target drafts for itself with some of its sublayers left out: nothing to train, and one cache for both.

Which ones is where the three methods differ: Draft & Verify (arXiv 2309.08168) has a fixed set, found beforehand by
Bayesian optimisation; SWIFT (arXiv 2410.06916) searches on the running text; Draft on the Fly (arXiv 2410.01028) takes
the sublayers that change least, measured on the prompt. Knows names of sublayers, distributions and token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import DraftModel, DynamicTree
from outrider.core.drafters.length_policies import Confidence, DraftExit
from outrider.core.drafters.self_speculative.layer_search import (
    GREEDY,
    Found,
    LayerSearch,
    agreement,
    inner,
    self_draftable,
)
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, SelfDraftable, Target, View, committed
from outrider.core.rng import CounterRNG

_USUAL = 12
_LIKENESS = 64  # tokens of the prompt that likeness is measured on


class Skipping:
    """A target seen without some sublayers, each row without its own: as many views as there are different sets."""

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
        """What each row leaves out from now on."""
        different = list(dict.fromkeys(sets))
        self._views = {one: self._views.get(one) or self.seen(one) for one in different}
        self.weight_bytes = sum(view.weight_bytes for view in self._views.values())
        self._which = upload([different.index(one) for one in sets], self.device)

    def seen(self, skipped: Collection[str]) -> View:
        """One view, for all rows."""
        view = self.whole.view(skip=skipped)
        view.begin(self._prompts, GREEDY, frozenset())
        return view

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        every = [view.score(draft, since) for view in self._views.values()]
        logits = every[0].logits()
        if len(every) > 1:
            rows = torch.arange(draft.rows, device=self.device)
            logits = torch.stack([one.logits() for one in every])[self._which, rows]
        return Scores(draft, self._pipeline, every[0].lengths, logits, first=every[0].first)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        for view in self._views.values():
            view.keep(draft, verdict, count)
        self._pipeline.commit(committed(draft, verdict, count))

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

    def begin(self, whole: SelfDraftable, model: Skipping, prompts: Prompts) -> list[frozenset[str]]: ...
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
        whole = self_draftable(prefill, self.name)
        plain = whole.view()
        self._model = Skipping(whole, plain.vocabulary, plain.device)
        self._inner = self.make(self._model)
        self._inner.begin(prefill, prompts, sampling)
        self._model.skip(self.chooser.begin(whole, self._model, prompts))

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        assert self._inner is not None
        sets = self.chooser.again((room >= 0).tolist())
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


def check(skip: Collection[str], known: Sequence[str]) -> frozenset[str]:
    """Names of sublayers, refused where there are none such."""
    for name in skip:
        if name not in known:
            raise InvalidOption(f"there is no sublayer '{name}' to skip; they go from {known[0]} to {known[-1]}")
    return frozenset(skip)


def few(skip_ratio: float, names: Sequence[str]) -> int:
    """How many sublayers a share of them is: one at least, and never all."""
    return max(min(round(skip_ratio * len(names)), len(names) - 1), 1)


# ---- Draft & Verify: a set found beforehand


@dataclass
class Given:
    """The same sublayers in every row."""

    skip: frozenset[str]
    bytes_read: int = 0

    def begin(self, whole: SelfDraftable, model: Skipping, prompts: Prompts) -> list[frozenset[str]]:
        return [check(self.skip, whole.sublayers)] * len(prompts)

    def again(self, open_: Sequence[bool]) -> None:
        return None

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        """It was found beforehand."""


def draft_verify(
    skip: Collection[str] | str | Path | Found,
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
        skip = Found.load(Path(skip))
    if isinstance(skip, str):
        skip = [one.strip() for one in skip.split(",") if one.strip()]
    names, best = (skip.skip, skip.length) if isinstance(skip, Found) else (tuple(skip), _USUAL)
    policy = DraftExit(best if length is None else length, threshold, target_acceptance)
    return SelfDrafter("draft-verify", lambda model: DraftModel(model, policy=policy), Given(frozenset(names)))


# ---- SWIFT: a set found on the way


@dataclass
class Stream:
    """SWIFT's search: every step, one more set has a go at the last `window` tokens of the row's own output, in one
    pass, once there are so many; when one guesses enough of them, or after so many sets, the best is kept."""

    skip_ratio: float
    window: int
    trials: int
    stop_agreement: float
    bayes_interval: int
    seed: int
    bytes_read: int = 0

    def begin(self, whole: SelfDraftable, model: Skipping, prompts: Prompts) -> list[frozenset[str]]:
        self._model, self._starts = model, [len(prompt) for prompt in prompts]
        self._texts = [list(prompt) for prompt in prompts]
        names = inner(whole.sublayers)
        self.quests = [LayerSearch(names, few(self.skip_ratio, names), self.bayes_interval, self.seed) for _ in prompts]
        return [quest.best for quest in self.quests]

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        for text, tokens in zip(self._texts, emitted, strict=True):
            text += tokens

    def again(self, open_: Sequence[bool]) -> list[frozenset[str]] | None:
        counts = [
            self.window * (going and len(text) - start >= self.window and self._seeking(quest))
            for text, start, going, quest in zip(self._texts, self._starts, open_, self.quests, strict=True)
        ]
        if not any(counts):
            return None
        texts = [text if going else text[:1] for text, going in zip(self._texts, open_, strict=True)]
        suggested = {row: self.quests[row].suggest() for row, count in enumerate(counts) if count}
        for one in dict.fromkeys(suggested.values()):
            view = self._model.seen(one)
            right = agreement(view.recall(texts, self.window), texts, counts)
            self.bytes_read += view.weight_bytes
            for row in (row for row, sublayers in suggested.items() if sublayers == one):
                self.quests[row].tell(right[row] / counts[row])
        return [quest.best for quest in self.quests]

    def _seeking(self, quest: LayerSearch) -> bool:
        return len(quest.tried) < self.trials and quest.match < self.stop_agreement


def swift(
    *,
    skip_ratio: float = 0.45,
    window: int = 16,
    trials: int = 32,
    stop_agreement: float = 0.95,
    bayes_interval: int = 8,
    nodes: int = 12,
    width: int = 3,
    depth: int = 6,
    min_probability: float = 0.2,
    seed: int = 0,
) -> SelfDrafter:
    """SWIFT: skips a share `skip_ratio` of the sublayers, never those of the first and the last layer. Which ones is
    searched for while decoding: candidates are random, and every `bayes_interval`-th (0: none) is Optuna's suggestion.
    Drafts are trees of nodes whose probability reaches `min_probability`. Ours scores one candidate per round in a pass
    of its own, on the row's last `window` tokens (the paper: 32), and counts that pass."""
    if not 0 < skip_ratio < 1 or min(window, trials) < 1 or bayes_interval < 0:
        raise InvalidOption(
            f"skip_ratio={skip_ratio}, window={window}, trials={trials}, bayes_interval={bayes_interval}: skip_ratio "
            "must be between 0 and 1, window and trials 1 or more, bayes_interval 0 or more"
        )
    return SelfDrafter(
        "swift",
        lambda model: DynamicTree(model, nodes=nodes, width=width, depth=depth, min_probability=min_probability),
        Stream(skip_ratio, window, trials, stop_agreement, bayes_interval, seed),
    )


# ---- Draft on the Fly: a set read off the prompt


@dataclass
class Alike:
    """What changes least when the prompt is read."""

    skip_ratio: float
    min_similarity: float
    parts: tuple[str, ...]
    bytes_read: int = 0

    def begin(self, whole: SelfDraftable, model: Skipping, prompts: Prompts) -> list[frozenset[str]]:
        names = [name for name in inner(whole.sublayers) if name.split(".")[0] in self.parts]
        places = [whole.sublayers.index(name) for name in names]
        alike = whole.likeness(prompts, _LIKENESS)[:, places].double().tolist()
        self.bytes_read += whole.weight_bytes
        found = []
        for row in alike:
            order = sorted(range(len(names)), key=lambda place: (-row[place], place))[: few(self.skip_ratio, names)]
            found.append(frozenset(names[place] for place in order if row[place] >= self.min_similarity))
        return found

    def again(self, open_: Sequence[bool]) -> None:
        return None

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        """The prompt has said it all."""


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
        "draft-on-the-fly",
        lambda model: DraftModel(model, policy=Confidence(length, threshold)),
        Alike(skip_ratio, min_similarity, tuple(parts)),
    )
