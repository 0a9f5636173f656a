"""Semi-autoregressive drafting: a pass of a small layer foresees several of the target's states at once, and the next
pass goes on from what was drafted.

Falcon (arXiv 2412.12639), between EAGLE, whose head makes a pass for each token, and DFlash, whose block is all there
is. Knows states and tokens, nothing of distributions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.drafters.trained.block_diffusion import Anchored
from outrider.core.drafters.trained.heads import PrefixCache, before, causal
from outrider.core.drafters.trained.lora import adapted
from outrider.core.engine.trainable.block import AttentionMask, Block, Matrix, Norm
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch


class FalconHead(Anchored):
    """A token and the state before it, put together by one matrix, are what the layer attends to: with the target's
    state where it was committed, with the one foreseen where it was drafted. Behind the last of them `block` places are
    foreseen in one pass, as its input and a learned vector for each place; they look at all that came before and at one
    another, both ways (relaxed causal attention). When a draft gets to the end of a block, the next pass starts there.

    Trained by coupled sequential glancing: what a first pass gets wrong decides how many places, drawn by chance, are
    shown the true token and state together (a share `glance` of the wrong ones) in the pass that learns, which says
    what the target says and regresses its states (smooth L1). What is read is given `noise`, as foreseen states are not
    quite those of the target. In the paper LSTM layers come before the attention, and a block is asked from its last
    tokens' inputs; the learned vectors stand in for both. Its tree is fixed by hand, ours by shape or number of nodes.
    The layer begins as the target's last, or is that one, corrected to a rank of `lora`."""

    parallel, cached_layers, draft_kind, first, depth = False, 1, "tree", 1, None  # type: ignore[assignment]

    def __init__(
        self,
        target: Any,
        *,
        block: int = 2,
        lora: int = 0,
        anchors: int = 24,
        glance: float = 0.4,
        regress: float = 1.0,
        noise: float = 0.1,
        vocabulary: PrefixCache = 0,
        fade: float = 0.85,
    ) -> None:
        super().__init__()
        if not 0 <= glance <= 1:
            raise InvalidOption(f"glance is {glance}; it must be from 0 to 1")
        network = target.network
        self._begin(network, vocabulary, fade, block=block, anchors=anchors)
        self.config = {**self.config, "lora": lora, "glance": glance, "regress": regress, "noise": noise}
        self.anchors, self.glance, self.regress, self.noise = anchors, glance, regress, noise
        width, eps = self.form.hidden_size, self.form.norm_eps
        self.embedded, self.entered, self.norm = (Norm(width, eps) for _ in range(3))
        self.fuse = Matrix(2 * width, width)
        self.place = nn.Parameter(torch.randn(block, width) * 0.1)
        self.block = Block(self.form)
        self.block.copy(network.layers[-1])
        adapted(self.block, lora, known=width)
        with torch.no_grad():
            self.fuse.weight.mul_(0.3)
            self.fuse.weight[:, width:] += torch.eye(width)
            self.norm.weight.copy_(network.norm)

    @property
    def wide(self) -> int:
        return int(self.config["block"])

    def _entered(self, features: Tensor, tokens: Tensor) -> Tensor:
        """A token and the state before it, [B, Q, D] each."""
        read = [self.embedded(self.words.embed(tokens)).to(features.dtype), self.entered(features)]
        fused: Tensor = self.fuse(torch.cat(read, -1))
        return fused

    def _listen(self, x: Tensor, attn_mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Keys and values of what was put together."""
        assert self.block.attention_norm is not None
        return self.block.attention.read(self.block.attention_norm(x), attn_mask)

    def _foreseen(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        states: Tensor = self.norm(self.block(x, attn_mask))
        return states

    # ---- training

    def places(self, batch: Batch, roots: Tensor) -> Tensor:
        features = before(batch.taps["last"].to(self.place.dtype))
        if self.training and self.noise:
            features = features + (torch.rand_like(features) * 2 - 1) * self.noise
        x = self._entered(features, batch.tokens)
        seen = causal(self.angles, batch, x)
        around = self.around(roots, roots[..., None].expand(-1, -1, self.wide), seen, [self._listen(x, seen)])
        (rows, count), width = roots.shape, x.shape[2]
        row = torch.arange(rows, device=roots.device)[:, None]
        inputs = x[row, roots][:, :, None] + self.place  # [B, A, K, D]

        def foreseen(block: Tensor) -> Tensor:
            return self._foreseen(block.flatten(1, 2), around).view(rows, count, self.wide, width)

        if not self.training or not self.glance:
            return foreseen(inputs)
        place = roots[..., None] + 1 + torch.arange(self.wide, device=roots.device)
        inside = place.clamp(max=x.shape[1] - 1)
        with torch.no_grad():
            said = self.words.logits(foreseen(inputs)).argmax(-1)
            wrong = (said != self.words.local(batch.tokens).gather(1, inside.flatten(1)).view_as(said)).sum(-1)
            order = torch.rand(said.shape, device=said.device).argsort(-1)
            shown = (order < (self.glance * wrong[..., None]).round()) & (place == inside)
        return foreseen(inputs + shown[..., None] * x[row[..., None], inside])

    def _besides(
        self, batch: Batch, where: tuple[Tensor, Tensor], said: Tensor, logits: Tensor, taught: Tensor
    ) -> Tensor:
        if not len(said):
            return said.sum()
        return self.regress * F.smooth_l1_loss(said, batch.taps["last"][where].to(said.dtype))

    # ---- drafting: a node's state is the block it stands in [K D], and of that the place that speaks behind it [D]

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        x = self._entered(features, tokens)
        self._listen(x, attn_mask)
        return x

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        context = attn_mask.context
        assert context is not None
        return self._pass(state[:, None], AttentionMask(attn_mask.cos, attn_mask.sin, attn_mask.mask, context=context))

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        width = self.words.hidden_size
        x = self._entered(states[..., -width:], tokens)
        known = self._listen(x, attn_mask)
        at = (level + 1) % self.wide
        if at:
            return torch.cat([states[..., :-width], states[..., at * width : (at + 1) * width]], -1)
        return self._pass(x, AttentionMask(attn_mask.cos, attn_mask.sin, attn_mask.mask, context=[known]))

    def _pass(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        """Blocks behind nodes [B, N, D], each of which sees what the attn_mask says -> their states [B, N, K D + D]."""
        rows, count, width = x.shape
        whose = torch.arange(count, device=x.device).repeat_interleave(self.wide)
        if attn_mask.mask is not None:
            back = attn_mask.mask.repeat_interleave(self.wide, 1)
            own = (whose == whose[:, None]).expand(len(back), -1, -1)
            attn_mask.mask = torch.cat([back, own], 2)
        attn_mask.cos, attn_mask.sin = (one.repeat_interleave(self.wide, 1) for one in (attn_mask.cos, attn_mask.sin))
        block = (x[:, :, None] + self.place.to(x.dtype)).flatten(1, 2)
        states = self._foreseen(block, attn_mask).view(rows, count, -1)
        return torch.cat([states, states[..., :width]], -1)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states[..., -self.words.hidden_size :])

    @property
    def pass_bytes(self) -> int:
        """Of a level of a draft: a pass serves as many as a block is wide, the output rows are read for each."""
        rows = self.words.weight_bytes
        return rows + (super().pass_bytes - rows) // self.wide
