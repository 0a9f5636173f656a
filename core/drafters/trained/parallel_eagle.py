"""P-EAGLE: EAGLE-3's layers guess several tokens in one pass.

"P-EAGLE: Parallel-Drafting EAGLE with Scalable Training" (arXiv 2602.01469). Independent of how guesses become drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.drafters.trained.blocks.block_diffusion import Roots, all_blocks, block_mask
from outrider.core.drafters.trained.eagle import Eagle3Head
from outrider.core.drafters.trained.heads import before, causal
from outrider.core.engine.native.draft_tree import NativeTree
from outrider.core.engine.trainable.block import AttentionMask
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, DraftHead, Guess, guessed
from outrider.core.training.losses import Loss


class PEagleHead(Eagle3Head):
    """P-EAGLE. Every position but the first reads the embedding of the token `mask` and a learned state in place of the
    taps, and attends to those before it.

    The first guess is trained after every position, the others after `anchors` random ones per row; the paper instead
    draws the positions of each depth, fewer of deeper ones."""

    parallel, draft_kind, depth = True, "tree", 5
    mask: Tensor

    def __init__(self, target: Any, *, depth: int = 5, mask: int = 0, anchors: int = 24, **options: Any) -> None:
        super().__init__(target, **options)
        if min(depth, anchors) < 1:
            raise InvalidOption(f"depth={depth}, anchors={anchors}: each must be 1 or more")
        self.config = {**self.config, "depth": depth, "mask": mask, "anchors": anchors}
        self.depth, self.anchors = depth, anchors
        self.masks = depth - 1
        self.mask_hidden = nn.Parameter(torch.randn(len(self.taps) * self.form.hidden_size) * 0.1)
        self.register_buffer("mask", torch.tensor([mask]), persistent=False)

    def native_tree(self) -> NativeTree | None:
        return None

    def _masked(self, rows: int, count: int, attn_mask: AttentionMask) -> Tensor:
        """The states [B, n, D] of n positions with unknown tokens and states."""
        entered = self.enter(self.mask_hidden.to(self.fuse.weight.dtype)).expand(rows, count, -1)
        return self.advance(entered, self.mask.expand(rows, count), attn_mask)

    def _read(self, batch: Batch) -> tuple[Tensor, AttentionMask, list[tuple[Tensor, Tensor]]]:
        """The states [B, T, D] after every token, their mask, and each layer's keys and values."""
        x = torch.cat([before(batch.taps[tap]) for tap in self.taps], -1)
        x = self.enter(x.to(self.fuse.weight.dtype))
        seen, kept = causal(self.angles, batch, x), list[tuple[Tensor, Tensor]]()
        return self.advance(x, batch.tokens, seen, kept), seen, kept

    def _ahead(self, roots: Tensor, seen: AttentionMask, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The states [B, A, K - 1, D] of the positions after roots [B, A]."""
        rows, count = roots.shape
        positions = roots[..., None] + 1 + torch.arange(self.masks, device=roots.device)
        mask = block_mask(self.angles, roots, positions, seen, context, ordered=True)
        return self._masked(rows, count * self.masks, mask).view(rows, count, self.masks, -1)

    def block_states(self, batch: Batch, roots: Tensor) -> Tensor:
        """The states [B, A, K, D] that guess the K tokens after each root [B, A]."""
        states, seen, context = self._read(batch)
        first = states.gather(1, roots[..., None].expand(-1, -1, states.shape[2]))[:, :, None]
        return torch.cat([first, self._ahead(roots, seen, context)], 2) if self.masks else first

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        states = all_blocks(self.block_states, batch)
        for k in range(self.depth):
            logits = self.logits(states[batch.loss_mask(1 + k)][:, k])
            yield Guess(logits, 1 + k, self.fade**k, self.words.vocabulary)

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        return DraftHead.hits(self, batch, depth)

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        states, seen, context = self._read(batch)
        first = Guess(self.logits(states[batch.loss_mask()]), 1, 1.0, self.words.vocabulary)
        total = guessed([first], batch, loss)
        if not self.masks:
            return total
        roots = Roots.drawn(batch, self.anchors, 2, self.masks)
        logits = self.logits(self._ahead(roots.places, seen, context)[roots.counts])
        each = loss(logits, roots.teacher(self.words), self.words.local(roots.labels))
        return total + self.fade * roots.mean(each, self.fade)

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        if not self.masks:
            return state[:, None]
        rows, count = len(state), self.masks
        own = torch.ones(count, count, dtype=torch.bool, device=state.device).tril()
        root, seen = attn_mask.root()
        mask = torch.cat([seen.expand(rows, count, -1), own.expand(rows, -1, -1)], 2)
        after = (root + 1 + torch.arange(count, device=state.device)).expand(rows, -1)
        cos, sin = (angles[:, 1 : 1 + count] for angles in (attn_mask.cos, attn_mask.sin))
        places = AttentionMask(cos, sin, mask, context=attn_mask.context, queries=after)
        return torch.cat([state[:, None], self._masked(rows, count, places)], 1)
