"""Blocks whose guesses also depend on the tokens drafted before them: DFlash's block, filled in by one pass, then
corrected from left to right by a small head (DSpark, DFly, Domino).

All three share the target's embedding and output rows. Independent of how guesses become drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.drafters.trained.blocks.block_diffusion import DFlashBlock, Roots
from outrider.core.engine.trainable.block import AttentionMask, Matrix, Norm
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch
from outrider.core.training.losses import Loss


class ChainedBlock(DFlashBlock):
    """Base of blocks with a correction. `_correct` changes a position's state by the token before it, and `_remember`
    updates a memory of width `memory` by that token. A confidence head is trained to predict the acceptance
    probability of each guess.

    A node's state while drafting: the block's states [K D], the memory [M], the corrected state [D] of its next
    token."""

    parallel, draft_kind, memory = False, "chain", 0

    def __init__(self, target: Any, sizes: Mapping[str, int], **options: Any) -> None:
        super().__init__(target, **options)
        for name, size in sizes.items():
            if size < 1:
                raise InvalidOption(f"{name} is {size}; it must be 1 or more")
        self.config = {**self.config, **sizes}

    def _confident(self) -> None:
        """The confidence head, once a subclass has made its own parts."""
        self.confidence = Matrix(self.form.hidden_size, 1, bias=True, zero=True)

    def _correct(self, states: Tensor, embedded: Tensor, memory: Tensor) -> Tensor:
        """States [..., D], the embeddings [..., D] of the tokens before them, and memories [..., M] -> [..., D]."""
        raise TypeError(f"{type(self).__name__} must implement _correct()")

    def _remember(self, memory: Tensor, embedded: Tensor) -> Tensor:
        """The memory [..., M] after a token with this embedding [..., D]."""
        return memory

    def _corrected(self, states: Tensor, tokens: Tensor) -> Tensor:
        embedded = self.words.embed(tokens).to(states.dtype)
        memory, memories = states.new_zeros(*tokens.shape[:-1], self.memory), []
        for place in embedded.unbind(-2):
            memory = self._remember(memory, place)
            memories.append(memory)
        return self._correct(states, embedded, torch.stack(memories, -2))

    def _extra_loss(self, roots: Roots, states: Tensor, logits: Tensor, teacher: Tensor) -> Tensor:
        """The loss of the confidence head: its cross-entropy with the probability that a drawn token is accepted."""
        with torch.no_grad():
            accepted = torch.minimum(logits.float().softmax(-1), teacher.float().softmax(-1)).sum(-1).clamp(0, 1)
        return F.binary_cross_entropy_with_logits(self.confidence(states.detach())[..., 0].float(), accepted)

    def acceptance(self, states: Tensor) -> Tensor:
        probability: Tensor = self.confidence(states[..., -self.words.hidden_size :])[..., 0].sigmoid()
        return probability

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        states = super().future_states(state, attn_mask)
        memory = self._remember(state.new_zeros(len(state), self.memory), state)
        first = self._correct(states[:, 0], state, memory)
        return torch.cat([states.flatten(1), memory, first], -1)[:, None]

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        width, block = self.words.hidden_size, self.depth * self.words.hidden_size
        at = min(level + 1, self.depth - 1) * width
        embedded = self.words.embed(tokens)
        memory = self._remember(states[..., block : block + self.memory], embedded)
        corrected = self._correct(states[..., at : at + width], embedded, memory)
        return torch.cat([states[..., :block], memory, corrected], -1)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states[..., -self.words.hidden_size :])


class DSparkBlock(ChainedBlock):
    """DSpark (arXiv 2607.05147): DFlash's block, corrected by a low-rank bias of the token before each position. The
    confidence head ends the chain where the whole of it is likely to be rejected (policy "confident"). The paper's bias
    has its own table; ours uses the target's embedding and output rows. Other kinds of draft, such as "dynamic" trees,
    are possible and don't use that head."""

    policy = "confident"

    def __init__(self, target: Any, *, rank: int = 128, **options: Any) -> None:
        super().__init__(target, {"rank": rank}, **options)
        width = self.form.hidden_size
        self.embedded = Norm(width, self.form.norm_eps)
        self.into, self.out = Matrix(width, rank), Matrix(rank, width, zero=True)
        self._confident()

    def _correct(self, states: Tensor, embedded: Tensor, memory: Tensor) -> Tensor:
        result: Tensor = states + self.out(self.into(self.embedded(embedded)))
        return result


class DFlyBlock(ChainedBlock):
    """DFly (AngelSpec, arXiv 2607.25852). Each layer attends to its own context, the norm of DFlash's fused taps plus a
    mixture of the taps with learned weights per layer, which start with shallow taps for the first layer and deep ones
    for the last. Each position is corrected by a SwiGLU of width `correction` of its state and of the embedding of the
    token before it (TreeFlash's head, arXiv 2606.03819). A chain ends where the next token's expected gain is below the
    price of verifying it (policy "budget")."""

    policy = "budget"

    def __init__(self, target: Any, *, correction: int = 128, **options: Any) -> None:
        super().__init__(target, {"correction": correction}, **options)
        width, eps = self.form.hidden_size, self.form.norm_eps
        count, layers = len(self.taps), len(self.blocks)
        place = torch.arange(layers) / max(layers - 1, 1) * (count - 1)
        self.mixture = nn.Parameter(-(torch.arange(count) - place[:, None]).abs())
        self.state_norm, self.embedded = Norm(width, eps), Norm(width, eps)
        self.up_gate = Matrix(2 * width, 2 * correction)
        self.down = Matrix(correction, width, zero=True)
        self._confident()

    def _context(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> list[Tensor]:
        normed = self._normed(features)
        shared, taps = self.fuse(normed), torch.stack(normed.chunk(len(self.taps), -1), -1)
        weights = self.mixture.softmax(-1).to(taps.dtype)
        return [self.context_norm(shared + taps @ weight) for weight in weights]

    def _correct(self, states: Tensor, embedded: Tensor, memory: Tensor) -> Tensor:
        up, gate = self.up_gate(torch.cat([self.state_norm(states), self.embedded(embedded)], -1)).chunk(2, -1)
        result: Tensor = states + self.down(up * F.silu(gate))
        return result


class DominoBlock(ChainedBlock):
    """Domino (arXiv 2605.29707): a GRU of width `recurrent` reads the block's tokens from left to right; a low-rank
    function of a position's state and of the GRU's changes its logits. The loss starts as that of DFlash's own guesses
    and moves to that of the corrected ones over the first `base` of the training. The paper's correction has its own
    output rows; ours uses the target's."""

    def __init__(
        self, target: Any, *, recurrent: int = 128, rank: int = 128, base: float = 0.5, **options: Any
    ) -> None:
        super().__init__(target, {"recurrent": recurrent, "rank": rank}, **options)
        width = self.form.hidden_size
        if not 0 <= base <= 1:
            raise InvalidOption(f"base is {base}; it must be from 0 to 1")
        self.config = {**self.config, "base": base}
        self.memory, self.base = recurrent, base
        self.embedded = Norm(width, self.form.norm_eps)
        self.read, self.recur = Matrix(width, 3 * recurrent), Matrix(recurrent, 3 * recurrent)
        self.into, self.out = Matrix(width + recurrent, rank), Matrix(rank, width, zero=True)
        self._confident()

    def _remember(self, memory: Tensor, embedded: Tensor) -> Tensor:
        reset, update, new = self.read(self.embedded(embedded)).chunk(3, -1)
        past_reset, past_update, past_new = self.recur(memory).chunk(3, -1)
        keep = (update + past_update).sigmoid()
        fresh = (new + (reset + past_reset).sigmoid() * past_new).tanh()
        return torch.lerp(fresh, memory.to(fresh.dtype), keep)

    def _correct(self, states: Tensor, embedded: Tensor, memory: Tensor) -> Tensor:
        inner = F.silu(self.into(torch.cat([states, memory.to(states.dtype)], -1)))
        result: Tensor = states + self.out(inner)
        return result

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        share = max(1 - self.finished / self.base, 0.0) if self.base else 0.0
        roots = Roots.drawn(batch, self.anchors, self.first, self.guesses_per_pass)
        plain = self.block_states(batch, roots.places)
        teacher, token = roots.teacher(self.words), self.words.local(roots.labels)
        states = self._corrected(plain, roots.tokens)[roots.counts]
        logits = self.words.logits(states)
        total = (1 - share) * roots.mean(loss(logits, teacher, token), self.fade)
        if share:
            own = loss(self.words.logits(plain[roots.counts]), teacher, token)
            total = total + share * roots.mean(own, self.fade)
        return total + self._extra_loss(roots, states, logits, teacher)
