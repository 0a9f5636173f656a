"""Multi-token prediction: a chain of small modules, each of which computes the next state, for the target's output
layer, from the state before it and the next token.

DeepSeek-V3's modules (arXiv 2412.19437), one per token ahead, are trained with the model; ours after a frozen target.
A single module applied repeatedly is the recursive variant (FastMTP).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.drafters.trained.eagle import round_guesses, shaped, unrolled
from outrider.core.drafters.trained.head_runner import ready
from outrider.core.drafters.trained.heads import PrefixCache, before, kept
from outrider.core.drafters.trained.lora import adapted
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.engine.types import Config
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, DraftHead, Guess, agreement


class Module(nn.Module):
    """Norms of both inputs, a matrix that combines them, and a block (or another `layer` in its place)."""

    def __init__(self, form: Config, index: int, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.embedded, self.entered = (Norm(form.hidden_size, form.norm_eps) for _ in range(2))
        self.fuse = Matrix(2 * form.hidden_size, form.hidden_size)
        self.block: Any = Block(form, index=index) if layer is None else layer
        with torch.no_grad():
            self.fuse.weight[:, form.hidden_size :] += torch.eye(form.hidden_size)

    def forward(self, x: Tensor, embedded: Tensor, attn_mask: AttentionMask) -> Tensor:
        result: Tensor = self.block(self._fused(x, embedded), attn_mask)
        return result

    def _fused(self, x: Tensor, embedded: Tensor) -> Tensor:
        fused: Tensor = self.fuse(torch.cat([self.embedded(embedded), self.entered(x)], -1))
        return fused

    def read(self, x: Tensor, embedded: Tensor, attn_mask: AttentionMask) -> None:
        """Only write the token's keys and values, for later passes of this module."""
        fused = self._fused(x, embedded)
        assert self.block.attention_norm is not None
        both = self.block.attention.read(self.block.attention_norm(fused), attn_mask)
        if attn_mask.rounds is not None:
            attn_mask.rounds.setdefault(self.block.attention.index, []).append(both)


class MtpModules(DraftHead):
    """Module k guesses the token k positions ahead from module k - 1's states; the last module continues from its own.
    Each attends to the tokens it read: committed ones with the target's states, drafted ones with the states of the
    module that read them. In the paper module k reads all tokens with module k - 1's states. Ours start as copies of
    the target's last layer, or are that layer with LoRA corrections of rank `lora`."""

    parallel, draft_kind, taps, depth = False, "chain", ("last",), None
    needs = frozenset({"last"})

    def __init__(
        self,
        target: Any,
        *,
        modules: int = 1,
        rounds: int = 4,
        hidden: int = 0,
        form: Mapping[str, Any] | None = None,
        normed_output: bool = False,
        lora: int = 0,
        vocabulary: PrefixCache = 0,
        fade: float = 0.6,
        layer: nn.Module | None = None,
        own: bool = False,
        own_embedding: bool = False,
    ) -> None:
        """`layer`: the block of a single module, for a target without layers to start from."""
        super().__init__()
        if min(modules, rounds) < 1:
            raise InvalidOption(f"modules={modules}, rounds={rounds}: each must be 1 or more")
        network = target.network
        self.words = SharedEmbedding(network, vocabulary, own=own, own_embedding=own_embedding)
        self.form = shaped(network.config, hidden, form)
        self.normed_output = normed_output  # are the normed states fed back, as FastMTP does?
        self.rounds, self.fade, self.cached_layers = max(rounds, modules), fade, modules
        self.config = {
            "modules": modules,
            "rounds": rounds,
            "hidden": hidden,
            "form": dict(form or {}),
            "normed_output": normed_output,
            "lora": lora,
            "vocabulary": kept(self.words),
            "fade": fade,
        }
        chain = [Module(self.form, index, layer) for index in range(modules)]
        for last in network.layers[-1:]:
            for module in chain:
                module.block.copy(last)
                adapted(module.block, lora, known=self.form.hidden_size, changed=bool(hidden or form))
        self.chain: Any = nn.ModuleList(chain)
        self.norm = Norm(self.form.hidden_size, self.form.norm_eps)
        self.angles = Angles(self.form)
        with torch.no_grad():
            self.norm.weight.copy_(network.norm)

    def advance(self, x: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        """The states [B, Q, D] of tokens that are `level` positions after the last committed one."""
        turn, embedded = min(level, self.cached_layers - 1), self.words.embed(tokens)
        for module in self.chain[turn + 1 :]:
            module.read(x, embedded, attn_mask)
        states: Tensor = self.chain[turn](x, embedded, attn_mask)
        return self.norm(states) if self.normed_output else states

    def _rounds(self, batch: Batch) -> Iterator[Tensor]:
        def advance(x: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
            assert attn_mask.rounds is not None
            return self.advance(x, tokens, attn_mask, len(attn_mask.rounds.get(self.cached_layers - 1, ())))

        x = before(batch.taps["last"].to(self.norm.weight.dtype))
        return unrolled(self.angles, batch, x, advance)

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        return round_guesses(self, self._rounds(batch), self.rounds)

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        return agreement(list(round_guesses(self, self._rounds(batch), depth)), batch, depth)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return self.advance(features, tokens, attn_mask, 0)

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        return self.advance(states, tokens, attn_mask, level + 1)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states if self.normed_output else self.norm(states))

    @property
    def pass_bytes(self) -> int:
        """Bytes of the output rows and one module."""
        return self.words.weight_bytes + (weight_bytes(self) - self.words.weight_bytes) // self.cached_layers

    def drafts(self, target: Any) -> Any:
        return ready(self, target)
