"""A target whose logits are hashes of the context, and a cheaper view of it: exact distributions without weights, for
tests, enumeration, notebooks and the terminal demo."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption, unknown
from outrider.core.protocol import Prefill, Prompts, Scores, committed
from outrider.core.rng import hash_tokens, mix, signed, uniform_of


def _padded(texts: Prompts, device: torch.device) -> Tensor:
    """[B, L], padded with -1."""
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[-1] * (longest - len(text))] for text in texts], device=device)


def _contexts(start: Tensor, tokens: Tensor) -> Tensor:
    """The contexts before each of tokens [B, K] and after the last, [B, K + 1], from contexts [B]; -1 is skipped."""
    contexts = [start]
    for column in tokens.unbind(1):
        contexts.append(torch.where(column < 0, contexts[-1], hash_tokens(contexts[-1], column)))
    return torch.stack(contexts, 1)


class TableTarget:
    """A target whose logits are hashes of the prefix, without weights or a cache.

    `blur` mixes in a second hash: a blurred copy of a target is an imperfect draft model. Hidden states at any tap are
    hashes of the same contexts, `width` numbers each.
    """

    width = 8
    rollback = True
    reads_embeddings = True  # any id has a hash
    weight_bytes = 0

    def __init__(
        self,
        vocabulary: int,
        seed: int = 0,
        *,
        sharpness: float = 1.0,
        blur: float = 0.0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        if vocabulary < 2:
            raise InvalidOption(f"the vocabulary is {vocabulary}; it must be 2 or more")
        self.vocabulary = vocabulary
        self.device = torch.device(device)
        self.sharpness, self.blur, self.dtype = sharpness, blur, dtype
        self.kept: dict[object, Any] = {}
        self._salts = [signed(mix(mix(seed) + offset)) for offset in (0, 1)]

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._taps = needs
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self._context = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        read = self._roll(_padded(prompts, self.device))[:, :-1]
        return Prefill(self.hidden(read, needs), self)

    def _roll(self, tokens: Tensor) -> Tensor:
        """Advance each row's context by tokens [B, K]; -1 is skipped -> the context after each, [B, K]."""
        contexts = _contexts(self._context, tokens)
        self._context = contexts[:, -1]
        return contexts[:, 1:]

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        return self._scores(draft, since, self._pipeline, self.blur, self._taps)

    def _scores(
        self, draft: Draft, since: int | None, pipeline: LogitsPipeline, blur: float, taps: Collection[str]
    ) -> Scores:
        contexts = self._context[:, None]  # [B, 1 + nodes]
        parents = draft.tree.parents.expand(draft.rows, -1) + 1
        for node in range(draft.size):
            before = contexts.gather(1, parents[:, node : node + 1])
            contexts = torch.cat([contexts, hash_tokens(before, draft.tokens[:, node : node + 1])], 1)
        first = 0 if since is None else since + 1
        contexts = contexts[:, first:]
        return Scores(draft, pipeline, self._lengths, self.logits(contexts, blur), self.hidden(contexts, taps), first)

    def hidden(self, contexts: Tensor, taps: Collection[str]) -> dict[str, Tensor]:
        """[B, K] -> noise [B, K, width] for each tap."""
        places = torch.arange(self.width, device=self.device)
        return {
            tap: torch.logit(uniform_of(hash_tokens(contexts[..., None] ^ crc32(tap.encode()), places)).to(self.dtype))
            for tap in taps
        }

    def logits(self, contexts: Tensor, blur: float | None = None) -> Tensor:
        """[...] -> [..., V] logistic noise."""
        blur = self.blur if blur is None else blur
        ids = torch.arange(self.vocabulary, device=self.device)
        clear, noise = (
            torch.logit(uniform_of(hash_tokens(contexts[..., None] ^ salt, ids)).to(self.dtype)) for salt in self._salts
        )
        return self.sharpness * ((1 - blur) * clear + blur * noise)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        tokens = committed(draft, verdict, count)
        self._roll(tokens)
        self._lengths = self._lengths + count
        self._pipeline.commit(tokens, verdict.known(count))

    def mark(self) -> object:
        return self._context, self._lengths, copy.copy(self._pipeline)

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        self._context, self._lengths, pipeline = mark
        self._pipeline = copy.copy(pipeline)

    def end(self) -> None:
        self._context = self._lengths = torch.zeros(0, dtype=torch.long)

    # ---- cheaper views: each skipped sublayer adds blur

    @property
    def sublayers(self) -> tuple[str, ...]:
        return tuple(_TABLE_PARTS)

    def view(
        self,
        *,
        skip: Collection[str] = (),
        exit: int | None = None,
        window: tuple[int, int] | None = None,
        chunks: tuple[int, int] | None = None,
        refresh: int = 16,
        bits: int | None = None,
    ) -> TableView:
        for name in skip:
            if name not in _TABLE_PARTS:
                raise unknown("sublayer", name, _TABLE_PARTS)
        parts = [*(_TABLE_PARTS[name] for name in sorted(set(skip))), 0.3 * (exit is not None)]
        parts += [0.2 * (window is not None) - 0.1 * (chunks is not None), 0.1 * (bits is not None)]
        return TableView(self, self.blur + (1 - self.blur) * min(sum(parts), 1.0), exit)

    def similarity(self, texts: Prompts, count: int) -> Tensor:
        ids = torch.arange(len(_TABLE_PARTS), device=self.device)
        return uniform_of(hash_tokens(self._context[:, None], ids))


_TABLE_PARTS = {"attention.0": 0.1, "mlp.0": 0.4, "attention.1": 0.05, "mlp.1": 0.3}  # blur that skipping each adds


class TableView:
    """A table target with more blur that shares its contexts; at an exit it has hidden states."""

    rollback = True
    weight_bytes = layer_bytes = cache_bytes = cache_passes = 0
    mute = False  # logits cost nothing

    def __init__(self, table: TableTarget, blur: float, exit: int | None = None) -> None:
        self.table, self.blur = table, blur
        self.taps = () if exit is None else (f"layer.{exit - 1}",)
        self.vocabulary, self.device = table.vocabulary, table.device

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        return Prefill()

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        return self.table._scores(draft, since, self._pipeline, self.blur, self.taps)

    def recall(self, texts: Prompts, count: int) -> Tensor:
        start = torch.zeros(len(texts), dtype=torch.long, device=self.device)
        contexts = _contexts(start, _padded(texts, self.device))
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        wanted = torch.arange(count, device=self.device)
        place = (lengths - (lengths - 1).clamp(max=count))[:, None] + wanted  # [B, count]
        exists = place < lengths[:, None]
        before = contexts.gather(1, torch.where(exists, place, 0))
        return torch.where(exists[..., None], self.table.logits(before, self.blur), 0)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        self._pipeline.commit(committed(draft, verdict, count), verdict.known(count))

    def carry(self) -> None:
        """Nothing is computed that could be reused."""

    def mark(self) -> object:
        return copy.copy(self._pipeline)

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, LogitsPipeline)
        self._pipeline = copy.copy(mark)

    def end(self) -> None:
        """Nothing to free."""
