"""A model seen through another vocabulary: to whoever drafts with it, it has the target's.

What it reads is what a bridge makes of the target's tokens, settled as far as they can't be tokenised otherwise any
more, and behind that the rest, which is read anew as it grows. Knows two sets of token ids and the bridge between them,
nothing of text.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, Self

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict, forced
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target, committed


class Passage(Protocol):
    """One row's text in the model's tokens."""

    def add(self, tokens: Sequence[int]) -> None: ...  # of the target's, committed
    def settled(self) -> list[int]: ...  # what has become final since it was last asked; at first one token at least
    @property
    def tail(self) -> list[int]: ...  # the rest
    def back(self, drafted: Sequence[int]) -> list[int]: ...  # in the target's tokens: what was drafted behind the tail
    def copy(self) -> Self: ...  # as it is now


class Bridge(Protocol):
    """Between two vocabularies."""

    @property
    def shared(self) -> Mapping[int, int]: ...  # the target's id of a token that both have -> the model's
    @property
    def size(self) -> int | None: ...  # of the target's vocabulary; None: the same as the model's
    def open(self, prompt: Sequence[int]) -> Passage: ...


class Renamed:
    """A bridge between vocabularies that call the same tokens by other ids: `names` has the model's for the target's,
    of which there are `size`. Tokens that have none are read as `unknown` and never drafted."""

    def __init__(self, names: Mapping[int, int], unknown: int = 0, size: int | None = None) -> None:
        self.shared, self.size, self._unknown = dict(names), size, unknown
        self._back = {theirs: ours for ours, theirs in names.items()}

    def open(self, prompt: Sequence[int]) -> Passage:
        return _Renamed(self.shared, self._back, self._unknown, prompt)


class _Renamed:
    def __init__(self, there: Mapping[int, int], back: Mapping[int, int], unknown: int, prompt: Sequence[int]) -> None:
        self._there, self._back, self._unknown = there, back, unknown
        self.tail: list[int] = []
        self._new: list[int] = []
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        self._new += [self._there.get(token, self._unknown) for token in tokens]

    def settled(self) -> list[int]:
        new, self._new = self._new, []
        return new

    def back(self, drafted: Sequence[int]) -> list[int]:
        known = [self._back.get(token) for token in drafted]
        return [one for one in known[: known.index(None) if None in known else None] if one is not None]

    def copy(self) -> Self:
        other = copy.copy(self)
        other._new = [*self._new]
        return other


class Reading:
    """What a model has read of texts in other tokens than its own."""

    def __init__(self, model: Target, bridge: Bridge) -> None:
        self.model, self.bridge = model, bridge
        self.passages: list[Passage] = []

    def begin(self, prompts: Prompts, needs: frozenset[str] = frozenset()) -> None:
        self.passages = [self.bridge.open(prompt) for prompt in prompts]
        self.model.begin([one.settled() for one in self.passages], Sampling(temperature=0), needs)
        self._settled = self.model.mark()
        self._read_tails()

    def add(self, rows: Prompts) -> None:
        """What was committed, in the target's tokens; what else the model has scored is dropped."""
        for passage, tokens in zip(self.passages, rows, strict=True):
            if tokens:
                passage.add(tokens)
        self.model.rewind(self._settled)
        self.model.keep(*forced([one.settled() for one in self.passages], self.model.device))
        self._settled = self.model.mark()
        self._read_tails()

    def _read_tails(self) -> None:
        self.model.keep(*forced([one.tail for one in self.passages], self.model.device))

    def mark(self) -> object:
        return self.model.mark(), self._settled, [one.copy() for one in self.passages]

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        read, self._settled, passages = mark
        self.passages = [one.copy() for one in passages]
        self.model.rewind(read)

    def end(self) -> None:
        self.model.end()
        self.passages = []


class Translated:
    """A target whose tokens are another's: the distributions of a model, restricted to the tokens that both
    vocabularies have and renormalised. What it can't say has no share in them."""

    rollback = True

    def __init__(self, model: Target, bridge: Bridge) -> None:
        self.model = model
        self.vocabulary = bridge.size or model.vocabulary
        self.device, self.weight_bytes = model.device, model.weight_bytes
        self._reading = Reading(model, bridge)
        pairs = sorted(bridge.shared.items())
        if not pairs or len({theirs for _, theirs in pairs}) < len(pairs):
            raise InvalidOption(
                "the vocabularies share no tokens, or one that stands for two; the drafter 'cross-vocabulary' with "
                "method='retokenise' does without"
            )
        self._ours, self._theirs = (upload(list(one), model.device) for one in zip(*pairs, strict=True))
        nothing = torch.zeros(self.vocabulary, dtype=torch.long, device=model.device)
        self._names = nothing.scatter(0, self._ours, self._theirs)

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._reading.begin(prompts, needs)
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._lengths = upload([len(prompt) for prompt in prompts], self.device)
        return Prefill()  # its states stand at other places than the target's tokens

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        scores = self.model.score(
            replace(draft, tokens=self._names[draft.tokens], distributions=None, source=None), since
        )

        def logits(rows: Tensor) -> Tensor:
            known = scores.logits(rows).index_select(2, self._theirs)
            every = known.new_full((*rows.shape, self.vocabulary), -torch.inf)
            return every.index_copy(2, self._ours, known)

        return Scores(draft, self._pipeline, self._lengths, logits, scores.hidden, scores.first)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        rows = zip(verdict.rows(draft), count.tolist(), strict=True)
        self._reading.add([tokens[:kept] for tokens, kept in rows])
        self._pipeline.commit(committed(draft, verdict, count))
        self._lengths = self._lengths + count

    def mark(self) -> object:
        return self._reading.mark(), copy.copy(self._pipeline), self._lengths

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        read, pipeline, self._lengths = mark
        self._reading.rewind(read)
        self._pipeline = copy.copy(pipeline)

    def end(self) -> None:
        self._reading.end()
