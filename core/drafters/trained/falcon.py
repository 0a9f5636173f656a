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

from outrider.core.drafters.trained.blocks.block_diffusion import Anchored, Roots, block_mask
from outrider.core.drafters.trained.heads import PrefixCache, before, causal
from outrider.core.drafters.trained.lora import adapted
from outrider.core.engine.trainable.block import AttentionMask, Block, Matrix, Norm
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch


class LstmCells(nn.Module):
    """LSTM cells on top of one another, each entered with a zero state, so that a position depends on no other; then a
    projection. The forget gate, which would act on that state, is left out."""

    def __init__(self, columns: int, rows: int, *, cells: int = 2, hidden: int = 0) -> None:
        super().__init__()
        size = hidden or rows
        self.cells: Any = nn.ModuleList(
            Matrix(size if number else columns, 3 * size, bias=True) for number in range(cells)
        )
        self.out = Matrix(size, rows, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            enter, leave, new = cell(x).chunk(3, -1)
            x = leave.sigmoid() * (enter.sigmoid() * new.tanh()).tanh()
        result: Tensor = self.out(x)
        return result


class FalconHead(Anchored):
    """Two LSTM layers (of width `hidden`; 0: the target's) merge each token with the state before it: the target's
    state for committed tokens, the predicted one for drafted tokens. `layers` decoder layers attend to these inputs. A
    pass predicts the states of the next `block` positions from the last input and a learned vector per position; they
    attend to all inputs and, in both directions, to one another (relaxed causal attention). At the end of a block the
    next pass starts.

    Trained by coupled sequential glancing: after a first pass, random positions, `glance` times as many as it got
    wrong, receive the true token and state in the second pass, whose loss is the distance from the target's
    distributions plus `regress` times a smooth L1 loss of its states, in the paper's ratio. Training adds `noise` to
    the states it reads, since predicted states are inexact.

    As in the authors' code, the LSTM takes one step per position, from a zero state. The paper starts a block from its
    last tokens' inputs, where ours has learned vectors; a residual connection passes the state by the LSTM. The layers
    start as copies of the target's last, or are those with LoRA corrections of rank `lora`."""

    parallel, draft_kind, first, depth = False, "tree", 1, None  # type: ignore[assignment]

    def __init__(
        self,
        target: Any,
        *,
        block: int = 2,
        layers: int = 1,
        hidden: int = 0,
        lora: int = 0,
        anchors: int = 24,
        glance: float = 0.4,
        regress: float = 10.0,
        noise: float = 0.1,
        vocabulary: PrefixCache = 0,
        fade: float = 0.85,
    ) -> None:
        super().__init__()
        if not 0 <= glance <= 1:
            raise InvalidOption(f"glance is {glance}; it must be from 0 to 1")
        network = target.network
        self._begin(network, vocabulary, fade, block=block, layers=layers, anchors=anchors)
        self.config = {
            **self.config,
            "hidden": hidden,
            "lora": lora,
            "glance": glance,
            "regress": regress,
            "noise": noise,
        }
        self.anchors, self.glance, self.regress, self.noise = anchors, glance, regress, noise
        self.cached_layers = layers
        width, eps = self.form.hidden_size, self.form.norm_eps
        self.embedded, self.entered, self.norm = (Norm(width, eps) for _ in range(3))
        self.lstm = LstmCells(2 * width, width, hidden=hidden)
        self.place = nn.Parameter(torch.randn(block, width) * 0.1)
        blocks = [Block(self.form, index=index) for index in range(layers)]
        self.blocks: Any = nn.ModuleList(blocks)
        for own, layer in zip(reversed(blocks), reversed(network.layers), strict=False):
            own.copy(layer)
            adapted(own, lora, known=width)
        with torch.no_grad():
            self.lstm.out.weight.mul_(0.3)
            self.norm.weight.copy_(network.norm)

    @property
    def guesses_per_pass(self) -> int:
        return int(self.config["block"])

    def _input(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The layers' inputs from tokens [B, Q] and the states before them [B, Q, D]."""
        entered: Tensor = self.entered(features)
        merged: Tensor = self.lstm(torch.cat([self.embedded(self.words.embed(tokens)).to(entered.dtype), entered], -1))
        return entered + merged

    def _attend_to(self, x: Tensor, attn_mask: AttentionMask) -> list[tuple[Tensor, Tensor]]:
        """The visible keys and values in each layer, those of inputs x included, which are written to the cache if
        there is one."""
        visible = []
        for number, block in enumerate(self.blocks):
            visible.append(block.attention.read(block.attention_norm(x), attn_mask))
            if number + 1 < len(self.blocks):
                x = block(x, attn_mask)
        return visible

    def _predicted(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        for block in self.blocks:
            x = block(x, attn_mask)
        states: Tensor = self.norm(x)
        return states

    # ---- training

    def block_states(self, batch: Batch, roots: Tensor) -> Tensor:
        features = before(batch.taps["last"].to(self.place.dtype))
        if self.training and self.noise:
            features = features + (torch.rand_like(features) * 2 - 1) * self.noise
        x = self._input(features, batch.tokens)
        seen = causal(self.angles, batch, x)
        places = roots[..., None].expand(-1, -1, self.guesses_per_pass)
        mask = block_mask(self.angles, roots, places, seen, self._attend_to(x, seen))
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

    def _extra_loss(self, roots: Roots, states: Tensor, logits: Tensor, teacher: Tensor) -> Tensor:
        if not len(states):
            return states.sum()
        known = roots.batch.taps["last"][roots.row, roots.column]
        return self.regress * F.smooth_l1_loss(states, known.to(states.dtype))

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
        return self._pass(x, AttentionMask(attn_mask.cos, attn_mask.sin, attn_mask.mask, context=known))

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
