"""Heads for tokens that stand in rows, such as a picture's codes: each looks right, from the target's last state, and
below, from the target's state behind the token that stands above the place it guesses.

Hawk (speculative decoding of images with predictions along both axes, arXiv 2510.25739) and spatially speculative
decoding (arXiv 2606.20543) guess rightwards and downwards with separate heads, keep what was foretold for the row below
until the raster comes there, and put both into one pool of candidates. Ours keep the states instead, and one head reads
both, so that every place has one distribution: chains, sampled and static trees are then those of any heads.
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
    """Also keeps the last row's states of each row of the batch, up to the root's own."""

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        found = super().begin(prompts, sampling, needs)
        features = self._features()  # [B, L - 1, D] behind every token but the last
        nothing = features.new_zeros(len(prompts), self.draft_head.columns, features.shape[2])
        self._latest, self._known = nothing, torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        self._append(features, torch.tensor([len(one) - 1 for one in prompts], device=self.device))
        return found

    def _append(self, states: Tensor, count: Tensor) -> None:
        """The first `count` [B] of states [B, T, D] follow; where a row is not full yet, its first state stands for
        those before it."""
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
        heard = self._features()
        self._append(heard.gather(1, rows[..., None].expand(-1, -1, heard.shape[2])), count)
        super().keep(draft, verdict, count)

    def end(self) -> None:
        super().end()
        self._latest = torch.zeros(0)


class SpatialHeads(DraftHead):
    """Head k says x + SiLU(W_k [x, a]) about the token k places behind the next one: x is the target's last state and a
    its state behind the token above that place, `columns` before it; in the first row, the earliest there is."""

    parallel, cached_layers, draft_kind, taps, runner = True, 0, "tree", ("last",), Above
    needs = frozenset({"last"})

    def __init__(
        self, target: Any, *, columns: int = 16, heads: int = 4, vocabulary: PrefixCache = 0, fade: float = 0.8
    ) -> None:
        super().__init__()
        if not 1 <= heads < columns:
            raise InvalidOption(
                f"{heads} heads and rows of {columns}: there must be a head, and fewer than a row has tokens"
            )
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
            said = states[loss_mask] + F.silu(right[..., k, :][loss_mask] + below(above))
            yield Guess(self.words.logits(said), k + 2, self.fade**k, self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return features

    def spatial_states(self, state: Tensor, latest: Tensor) -> Tensor:
        """The root's state [B, D] and a row of states up to it [B, columns, D] -> what the heads say [B, heads, D]."""
        below = torch.stack([one(latest[:, k + 1]) for k, one in enumerate(self.below)], 1)
        return state[:, None] + F.silu(self.right(state).unflatten(-1, (self.depth, -1)) + below)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states)

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)
