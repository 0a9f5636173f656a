"""Whole chains of drafted tokens in one call of the compiled kernels, for a decoder and for views of it.

Independent of drafts, rules and what else a target does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.core.distribution import Distribution, LogitsPipeline
from outrider.core.engine.native.draft_chain import NativeChain

if TYPE_CHECKING:
    from outrider.core.engine.kv_cache.cache import Cache
    from outrider.core.engine.network import Network


class DrawsChains(ABC):
    """Gives a target with a network and sampling settings outrider.core.protocol.ChainDrawing."""

    network: Network
    _pipeline: LogitsPipeline

    def _chain(self) -> NativeChain | None:
        """The compiled kernels for chains, if they compute what passes one by one compute."""
        supported = type(self._pipeline) is LogitsPipeline and self._pipeline.sampling.plain
        return self.network.native_chain if supported and self._draws_chains() else None

    @abstractmethod
    def _draws_chains(self) -> bool:
        """Whether a pass of this target does nothing else than the compiled kernels do."""

    @abstractmethod
    def _written(self) -> Cache:
        """The cache whose free slots a chain may be written to."""

    @abstractmethod
    def _drew(self, scored: int) -> None:
        """Count a chain's nodes up to `scored` as scored."""

    @torch.no_grad()
    def draw_chain(
        self, numbers: np.ndarray, threshold: float = 0.0, last: bool = False, joint: bool = False
    ) -> tuple[Tensor, Distribution] | None:
        """Draw a chain for a batch of one row in one call of the compiled kernels: tokens [1, N], each drawn with one
        of the uniform numbers, and their distributions. All tokens that were read count as scored afterwards. None: the
        caller needs one pass per token here."""
        cache, chain, sampling = self._written(), self._chain(), self._pipeline.sampling
        rows = cache.rows
        if chain is None or len(rows.host) > 1 or rows.table is not None:
            return None
        wait, steps = rows.pending.shape[1], len(numbers)
        cache.reserve(wait + steps)
        self.network.ensure_positions(rows.host[0] + wait + steps, cache.long)
        uniforms, conditioning = None if sampling.greedy else numbers, self.network.conditioning_of(0)
        tokens, law = chain.draw(
            *(rows.pending[0], rows.host[0], cache.store, steps, conditioning, uniforms, sampling.temperature),
            *(threshold, last, joint),
        )
        self._drew(len(tokens) - int(last or len(tokens) == steps))
        return tokens[None], law

    @torch.no_grad()
    def draw_rows(self, logits: Tensor, numbers: Tensor) -> tuple[Tensor, Distribution] | None:
        """A token [B] from each row of logits [B, V], drawn with one of the uniform numbers [B] as `draw_chain` draws,
        and the distributions [B, V]; None where `draw_chain` is not possible for one row."""
        chain, sampling = self._chain(), self._pipeline.sampling
        if sampling.greedy or chain is None or logits.dtype != torch.float32:
            return None
        return chain.draw_rows(logits, numbers, sampling.temperature)

    def confidence(self, logits: Tensor) -> Tensor | None:
        """The highest probability of each row of logits [B, V], as `draw_chain` reads it; None as above."""
        chain = self._chain() if logits.dtype == torch.float32 else None
        return None if chain is None else chain.confidence(logits)
