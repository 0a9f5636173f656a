"""A model with another vocabulary, adapted to the target's.

A bridge translates the target's committed tokens into the model's. The model reads the settled tokens, which later text
cannot change, and behind them the tail, which is read again as it grows. Independent of text.
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

    def add(self, tokens: Sequence[int]) -> None: ...  # committed tokens of the target
    def settled(self) -> list[int]: ...  # tokens that became final since the last call; at first at least one
    @property
    def tail(self) -> list[int]: ...  # the tokens after the settled ones
    def back(self, drafted: Sequence[int]) -> list[int]: ...  # tokens drafted after the tail, in the target's tokens
    def copy(self) -> Self: ...


class Bridge(Protocol):
    """Translates between two vocabularies."""

    @property
    def shared(self) -> Mapping[int, int]: ...  # the target's id of a shared token -> the model's id
    @property
    def size(self) -> int | None: ...  # of the target's vocabulary; None: the same as the model's
    def open(self, prompt: Sequence[int]) -> Passage: ...


class Renamed:
    """A bridge between vocabularies with different ids for the same tokens. `names` maps the target's ids, of which
    there are `size`, to the model's. Other tokens are read as `unknown` and never drafted."""

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
        return [token for token in known[: known.index(None) if None in known else None] if token is not None]

    def copy(self) -> Self:
        other = copy.copy(self)
        other._new = [*self._new]
        return other


class Reading:
    """Keeps a model's cache in step with texts in another vocabulary."""

    def __init__(self, model: Target, bridge: Bridge) -> None:
        self.model, self.bridge = model, bridge
        self.passages: list[Passage] = []

    def begin(self, prompts: Prompts, needs: frozenset[str] = frozenset()) -> None:
        self.passages = [self.bridge.open(prompt) for prompt in prompts]
        self.model.begin([passage.settled() for passage in self.passages], Sampling(temperature=0), needs)
        self._settled = self.model.mark()
        self._read_tails()

    def add(self, rows: Prompts) -> None:
        """Add committed tokens, in the target's vocabulary; drops everything else that the model has scored."""
        for passage, tokens in zip(self.passages, rows, strict=True):
            if tokens:
                passage.add(tokens)
        self.model.rewind(self._settled)
        self.model.keep(*forced([passage.settled() for passage in self.passages], self.model.device))
        self._settled = self.model.mark()
        self._read_tails()

    def _read_tails(self) -> None:
        self.model.keep(*forced([passage.tail for passage in self.passages], self.model.device))

    def mark(self) -> object:
        return self.model.mark(), self._settled, [passage.copy() for passage in self.passages]

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        read, self._settled, passages = mark
        self.passages = [passage.copy() for passage in passages]
        self.model.rewind(read)

    def end(self) -> None:
        self.model.end()
        self.passages = []


class Translated:
    """A Target in another vocabulary: the model's distributions restricted to the shared tokens and renormalised; other
    tokens have probability 0."""

    rollback = True

    def __init__(self, model: Target, bridge: Bridge) -> None:
        self.model = model
        self.vocabulary = bridge.size or model.vocabulary
        self.device, self.weight_bytes = model.device, model.weight_bytes
        self._reading = Reading(model, bridge)
        pairs = sorted(bridge.shared.items())
        if not pairs or len({theirs for _, theirs in pairs}) < len(pairs):
            raise InvalidOption(
                "the vocabularies share no tokens, or two tokens map to the same one; use the drafter "
                "'cross-vocabulary' with method='retokenise', which needs no shared tokens"
            )
        self._ours, self._theirs = (upload(list(ids), model.device) for ids in zip(*pairs, strict=True))
        zeros = torch.zeros(self.vocabulary, dtype=torch.long, device=model.device)
        self._names = zeros.scatter(0, self._ours, self._theirs)

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._reading.begin(prompts, needs)
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._lengths = upload([len(prompt) for prompt in prompts], self.device)
        return Prefill()  # no hidden states: their positions differ from those of the target's tokens

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        scores = self.model.score(
            replace(draft, tokens=self._names[draft.tokens], distributions=None, source=None), since
        )

        def logits(rows: Tensor) -> Tensor:
            shared = scores.logits(rows).index_select(2, self._theirs)
            full = shared.new_full((*rows.shape, self.vocabulary), -torch.inf)
            return full.index_copy(2, self._ours, shared)

        return Scores(draft, self._pipeline, self._lengths, logits, scores.hidden, scores.first)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        rows = zip(verdict.rows(draft), count.tolist(), strict=True)
        self._reading.add([tokens[:kept] for tokens, kept in rows])
        self._pipeline.commit(committed(draft, verdict, count), verdict.known(count))
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
