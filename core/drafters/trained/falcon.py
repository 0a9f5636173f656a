"""Semi-autoregressive drafting: each pass of a small layer predicts several of the target's next states, and the next
pass continues from the tokens drafted so far.

Falcon (arXiv 2412.12639), between EAGLE, with a pass per token, and DFlash, with one pass per draft. Independent of
distributions.
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
    """The layer attends to inputs that one matrix makes of a token and the state before it: the target's state for
    committed tokens, the predicted one for drafted tokens. A pass predicts the states of the next `block` positions
    from the last input and a learned vector per position; they attend to all inputs and, in both directions, to one
    another (relaxed causal attention). At the end of a block the next pass starts.

    Trained by coupled sequential glancing: after a first pass, random positions, `glance` times as many as it got
    wrong, receive the true token and state in the second pass, whose loss is the distance from the target's
    distributions plus `regress` times a smooth L1 loss of its states. Training adds `noise` to the states it reads,
    since predicted states are inexact. The paper has LSTM layers before the attention and starts a block from its last
    tokens' inputs, where ours has learned vectors. The layer starts as a copy of the target's last, or is that layer
    with LoRA corrections of rank `lora`."""

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
    def guesses_per_pass(self) -> int:
        return int(self.config["block"])

    def _input(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The layer's inputs from tokens [B, Q] and the states before them [B, Q, D]."""
        read = [self.embedded(self.words.embed(tokens)).to(features.dtype), self.entered(features)]
        fused: Tensor = self.fuse(torch.cat(read, -1))
        return fused

    def _attend_to(self, x: Tensor, attn_mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Keys and values of inputs, written to the cache if there is one."""
        assert self.block.attention_norm is not None
        return self.block.attention.read(self.block.attention_norm(x), attn_mask)

    def _predicted(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        states: Tensor = self.norm(self.block(x, attn_mask))
        return states

    # ---- training

    def block_states(self, batch: Batch, roots: Tensor) -> Tensor:
        features = before(batch.taps["last"].to(self.place.dtype))
        if self.training and self.noise:
            features = features + (torch.rand_like(features) * 2 - 1) * self.noise
        x = self._input(features, batch.tokens)
        seen = causal(self.angles, batch, x)
        mask = self.block_mask(
            roots, roots[..., None].expand(-1, -1, self.guesses_per_pass), seen, [self._attend_to(x, seen)]
        )
        (rows, count), width = roots.shape, x.shape[2]
        row = torch.arange(rows, device=roots.device)[:, None]
        inputs = x[row, roots][:, :, None] + self.place  # [B, A, K, D]

        def predicted(block: Tensor) -> Tensor:
            return self._predicted(block.flatten(1, 2), mask).view(rows, count, self.guesses_per_pass, width)

        if not self.training or not self.glance:
            return predicted(inputs)
        place = roots[..., None] + 1 + torch.arange(self.guesses_per_pass, device=roots.device)
        inside = place.clamp(max=x.shape[1] - 1)
        with torch.no_grad():
            guesses = self.words.logits(predicted(inputs)).argmax(-1)
            wrong = (guesses != self.words.local(batch.tokens).gather(1, inside.flatten(1)).view_as(guesses)).sum(-1)
            order = torch.rand(guesses.shape, device=guesses.device).argsort(-1)
            shown = (order < (self.glance * wrong[..., None]).round()) & (place == inside)
        return predicted(inputs + shown[..., None] * x[row[..., None], inside])

    def _extra_loss(
        self, batch: Batch, where: tuple[Tensor, Tensor], states: Tensor, logits: Tensor, teacher: Tensor
    ) -> Tensor:
        if not len(states):
            return states.sum()
        return self.regress * F.smooth_l1_loss(states, batch.taps["last"][where].to(states.dtype))

    # ---- drafting: a node's state is its block's states [K D] and the one that predicts the token after it [D]

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        x = self._input(features, tokens)
        self._attend_to(x, attn_mask)
        return x

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        context = attn_mask.context
        assert context is not None
        return self._pass(state[:, None], AttentionMask(attn_mask.cos, attn_mask.sin, attn_mask.mask, context=context))

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        width = self.words.hidden_size
        x = self._input(states[..., -width:], tokens)
        known = self._attend_to(x, attn_mask)
        at = (level + 1) % self.guesses_per_pass
        if at:
            return torch.cat([states[..., :-width], states[..., at * width : (at + 1) * width]], -1)
        return self._pass(x, AttentionMask(attn_mask.cos, attn_mask.sin, attn_mask.mask, context=[known]))

    def _pass(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        """Predict blocks after nodes with inputs [B, N, D] -> the nodes' states [B, N, K D + D]."""
        rows, count, width = x.shape
        node = torch.arange(count, device=x.device).repeat_interleave(self.guesses_per_pass)
        if attn_mask.mask is not None:
            back = attn_mask.mask.repeat_interleave(self.guesses_per_pass, 1)
            own = (node == node[:, None]).expand(len(back), -1, -1)
            attn_mask.mask = torch.cat([back, own], 2)
        attn_mask.cos, attn_mask.sin = (
            table.repeat_interleave(self.guesses_per_pass, 1) for table in (attn_mask.cos, attn_mask.sin)
        )
        block = (x[:, :, None] + self.place.to(x.dtype)).flatten(1, 2)
        states = self._predicted(block, attn_mask).view(rows, count, -1)
        return torch.cat([states, states[..., :width]], -1)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states[..., -self.words.hidden_size :])

    @property
    def pass_bytes(self) -> int:
        """Bytes per level of a draft: each reads the output rows, and a share of the pass that serves the block."""
        rows = self.words.weight_bytes
        return rows + (super().pass_bytes - rows) // self.guesses_per_pass
