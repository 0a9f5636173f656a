"""Heads for tokens in a raster, such as image codes: each reads the target's last state and the target's state after
the token above the position that it guesses.

Hawk (speculative decoding of images with predictions along both axes, arXiv 2510.25739) and spatially speculative
decoding (arXiv 2606.20543) predict rightwards and downwards with separate heads, store downward predictions until their
row is reached, and merge both into one candidate pool. Ours stores states, and one head reads both, so that every
position has one distribution and all kinds of drafts work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.trained.head_runner import HeadRunner, ready
from outrider.core.drafters.trained.heads import PrefixCache, kept
from outrider.core.engine.trainable.block import AttentionMask, Matrix
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts
from outrider.core.training.draft_head import Batch, DraftHead, Guess


class Above(HeadRunner):
    """Also keeps the states of each batch row's last `columns` tokens, up to the root."""

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        prefill = super().begin(prompts, sampling, needs)
        features = self._features()  # [B, L - 1, D] the states of all tokens but the last
        nothing = features.new_zeros(len(prompts), self.draft_head.columns, features.shape[2])
        self._latest, self._known = nothing, torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        self._append(features, torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device))
        return prefill

    def _append(self, states: Tensor, count: Tensor) -> None:
        """Append the first `count` [B] of states [B, T, D]. Before the first raster row is full, its first state fills
        the missing ones."""
        columns = self.draft_head.columns
        self._known = self._known + count
        place = torch.arange(columns, device=self.device)
        place = torch.maximum(place, columns - self._known.clamp(min=1)[:, None]) + count[:, None]
        both = torch.cat([self._latest, states], 1)
        self._latest = both.gather(1, place[..., None].expand(-1, -1, both.shape[2]))

    def _open(self) -> None:
        super()._open()
        self._states = self.draft_head.spatial_states(self._states[:, 0], self._latest)

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        rows = F.pad(verdict.path + 1, (1, 0)).clamp(min=0)
        features = self._features()
        self._append(features.gather(1, rows[..., None].expand(-1, -1, features.shape[2])), count)
        super().keep(draft, verdict, count)

    def end(self) -> None:
        super().end()
        self._latest = torch.zeros(0)


class SpatialHeads(DraftHead):
    """Head k predicts the token k positions after the next one from x + SiLU(W_k [x, a]): x is the target's last state,
    a its state after the token `columns` before that position (in the first raster row, the earliest state)."""

    parallel, cached_layers, draft_kind, taps, runner = True, 0, "tree", ("last",), Above
    needs = frozenset({"last"})

    def __init__(
        self, target: Any, *, columns: int = 16, heads: int = 4, vocabulary: PrefixCache = 0, fade: float = 0.8
    ) -> None:
        super().__init__()
        if not 1 <= heads < columns:
            raise InvalidOption(f"heads={heads}, columns={columns}: heads must be 1 or more, and fewer than columns")
        network = target.network
        self.words = SharedEmbedding(network, vocabulary)
        self.form, self.depth, self.columns, self.fade = network.config, heads, columns, fade
        self.config = {"columns": columns, "heads": heads, "vocabulary": kept(self.words), "fade": fade}
        width = network.config.hidden_size
        self.right = Matrix(width, heads * width, bias=True, zero=True)  # of all heads
        self.below = torch.nn.ModuleList(Matrix(width, width, zero=True) for _ in range(heads))

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        states = batch.taps["last"].to(self.right.weight.dtype)
        right = self.right(states).unflatten(-1, (self.depth, -1))
        place = torch.arange(states.shape[1], device=states.device)
        for k, below in enumerate(self.below):
            loss_mask = batch.loss_mask(k + 2)
            above = states[:, (place + k + 2 - self.columns).clamp(min=0)][loss_mask]
            output = states[loss_mask] + F.silu(right[..., k, :][loss_mask] + below(above))
            yield Guess(self.words.logits(output), k + 2, self.fade**k, self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return features

    def spatial_states(self, state: Tensor, latest: Tensor) -> Tensor:
        """The root's state [B, D] and the last `columns` states [B, columns, D] -> the heads' outputs [B, heads, D]."""
        below = torch.stack([head(latest[:, k + 1]) for k, head in enumerate(self.below)], 1)
        return state[:, None] + F.silu(self.right(state).unflatten(-1, (self.depth, -1)) + below)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states)

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)
